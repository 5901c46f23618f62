"""A report of a plan that a person opens: one HTML file that needs no network."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.activations.layer import LayerActivations
from manifoldkv.diagnostics import plan_errors
from manifoldkv.errors import RunError
from manifoldkv.evaluation.continuation import beginning, continuation
from manifoldkv.evaluation.perplexity import compare
from manifoldkv.objectives import EigenAttention
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.provenance import Provenance
from manifoldkv.ranks.base import LayerBases
from manifoldkv.ranks.budget import candidate_ranks
from manifoldkv.ranks.surfaces import ROWS, ErrorSurface, layer_surface
from manifoldkv.reports.charts import Drawing
from manifoldkv.reports.library import LIBRARY, library, packed_library
from manifoldkv.runs.files import write_whole
from manifoldkv.text.tokens import positions

LOG = logging.getLogger(__name__)

LAYER_SEQUENCES = 4
"""Of the held-out ones, on which layers are measured by themselves."""
NEW_TOKENS = 60
"""Written after a held-out text, at most; half of what the model takes, where that is less."""
SHOWN = 400
"""Characters of that text that are shown, its last ones."""
TEMPLATES = Path(__file__).parent


def write_report(
    path: str | Path,
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor,
    *,
    folder: str | Path = "plan",
    tokenizer: PreTrainedTokenizerBase | None = None,
    self_contained: bool = True,
) -> None:
    """Measure a plan and write what came out.

    Needs ``pip install -c constraints.txt -e ".[report]"``.

    Parameters
    ----------
    path : str or Path
        Of the HTML file.
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        From `compress`.
    tokens : Tensor
        Held-out token ids, (sequences, length), on which everything is measured.
    folder : str or Path
        Where the plan is, for the lines that load it.
    tokenizer : PreTrainedTokenizerBase, optional
        The model's. With it the report also shows how the first sequence goes on, on the stock
        cache and on the compressed one.
    self_contained : bool
        Whether the library that draws is in the file, compressed, which then takes about 2 MB and
        a browser of 2023 or later; otherwise it is in ``plotly.min.js`` beside it, of 5 MB.

    Raises
    ------
    RunError
        If plotly is not installed, or the file cannot be written.
    """
    page = template("plan.html")  # an absent library is found before anything is measured
    drawing = Drawing()
    plan.check_model(model)
    quality = compare(model, tokens, plan)
    LOG.info("measuring the layers for the report")
    layers, surfaces = _measure_layers(model, plan, tokens[:LAYER_SEQUENCES])
    length = tokens.shape[1]
    # The ratio of mixed widths is one to a cache in 16 bits, whatever the model runs in.
    dtype = torch.bfloat16 if plan.variable_width else model.dtype
    full = sum(layer.full_elements(length) for layer in plan.layers)
    html = page.render(
        name=model_name(plan.provenance),
        packed=packed_library() if self_contained else None,
        library=LIBRARY,
        texts=None if tokenizer is None else _texts(model, plan, tokens, tokenizer),
        provenance=plan.provenance,
        plan=plan,
        quality=quality,
        sequences=tokens.shape[0],
        length=length,
        cache_bytes=plan.nbytes(length, dtype=dtype),
        full_bytes=full * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        folder=str(folder),
        predicted=plan.provenance.predicted_nats,
        predicted_tokens=plan.provenance.predicted_tokens,
        layer_sequences=min(LAYER_SEQUENCES, tokens.shape[0]),
        charts={
            "errors": drawing.errors(layers),
            "ranks": drawing.ranks(layers, plan.layers[0].key.head_dim),
            "surface": drawing.surfaces(surfaces, plan) if surfaces else None,
            "bits": drawing.bits(layers) if plan.variable_width else None,
        },
    )
    path = Path(path)
    if not self_contained:
        write_whole(path.with_name(LIBRARY), library().encode())
    write_whole(path, html.encode())


def template(name: str) -> Any:
    """Return a page to be filled in by Jinja2, which escapes what it is given.

    Raises
    ------
    RunError
        If a library that reports need is not installed.
    """
    try:
        import jinja2
        import markdown_it  # noqa: F401
        import plotly  # noqa: F401
    except ImportError as error:
        raise RunError(
            f'a report needs {error.name}: pip install -c constraints.txt -e ".[report]"'
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name)


def model_name(provenance: Provenance) -> str:
    """Return the name of a model: its id on the Hub, or of a folder the last part."""
    name = provenance.model
    return name if name.count("/") < 2 and not name.startswith(("/", ".")) else Path(name).name


def _texts(
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the end of a held-out text, and its continuations before and after compression."""
    LOG.info("continuing a text for the report")
    new_tokens = min(NEW_TOKENS, positions(model) // 2)
    asked = beginning(model, tokens, new_tokens)
    before, after = (
        tokenizer.decode(
            continuation(model, asked, known, new_tokens=new_tokens), skip_special_tokens=True
        )
        for known in (None, plan)
    )
    begun = tokenizer.decode(asked[0], skip_special_tokens=True)
    return {
        "begun": f"…{begun[-SHOWN:]}" if len(begun) > SHOWN else begun,
        "before": before,
        "after": after,
        "tokens": asked.shape[1],
    }


def _measure_layers(
    model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor
) -> tuple[pd.DataFrame, list[ErrorSurface]]:
    rows, surfaces = [], []
    for activations, errors in plan_errors(model, plan, tokens):
        layer = plan.layers[activations.layer]
        rows.append({"layer": activations.layer, "error": errors.layer_output_error})
        rows[-1] |= {"key": layer.key.rank, "value": layer.value.rank}
        rows[-1] |= {f"{site} bits": bits for site, bits in layer.mean_bits.items()}
        if not plan.variable_width:  # else the plan chooses bits, not ranks
            surfaces.append(_surface(activations, layer, plan))
    return pd.DataFrame(rows), surfaces


def _surface(
    activations: LayerActivations, layer: LayerPlan, plan: CompressionPlan
) -> ErrorSurface:
    """Return the errors at other ranks, of EigenAttention's bases in the grouping of the plan."""
    bases = LayerBases({}, {})
    for site, planned in layer.sites:
        problem = EigenAttention().problem(activations, site, planned.grouping, plan.rotary)
        for rank in candidate_ranks(activations.head_dim):
            bases.of(site)[rank] = problem.closed_form(rank)
    return layer_surface(activations, bases, plan.rotary, ROWS)
