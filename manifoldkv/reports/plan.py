"""A report of a plan: one HTML file that needs no network."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.basis import SITES
from manifoldkv.diagnostics import diagnose_plan
from manifoldkv.errors import RunError
from manifoldkv.evaluation.continuation import Continuations, beginning, continuations
from manifoldkv.evaluation.memory import constant_bytes
from manifoldkv.evaluation.perplexity import compare, with_error
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.provenance import Provenance
from manifoldkv.reports.charts import Drawing
from manifoldkv.reports.library import LIBRARY, library, packed_library
from manifoldkv.runs.files import write_whole
from manifoldkv.text.tokens import positions

LOG = logging.getLogger(__name__)

LAYER_SEQUENCES = 4
"""Number of held-out sequences for the errors of single layers."""
NEW_TOKENS = 60
"""Largest number of tokens after a held-out text; at most half the positions of the model."""
TEMPLATE = Path(__file__).with_name("plan.html")


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
    """Measure a plan and write the report.

    Needs ``pip install -c constraints.txt -e ".[report]"``.

    Parameters
    ----------
    path : str or Path
        HTML file to write.
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        From `compress`.
    tokens : Tensor
        Held-out token ids, (sequences, length), int64, for all measurements.
    folder : str or Path
        Folder of the plan, for the lines of code that load it.
    tokenizer : PreTrainedTokenizerBase, optional
        The model's. With it the report also shows continuations of the first sequence, on the
        stock cache and on the compressed one.
    self_contained : bool
        Whether plotly.js is in the file, compressed, which then takes about 2 MB and needs a
        browser of 2023 or later; otherwise it is in ``plotly.min.js`` beside it, of 5 MB.

    Raises
    ------
    RunError
        If jinja2 or plotly is not installed, or the file cannot be written.
    PlanError
        If the plan was made for another model.
    """
    page = template()  # an absent library is named before anything is measured
    drawing = Drawing()
    plan.check_model(Decoder.of(model))
    quality = compare(model, tokens, plan)
    LOG.info("measuring the layers for the report")
    layers = diagnose_plan(model, plan, tokens[:LAYER_SEQUENCES])
    for site in SITES:
        layers[f"{site}_bits"] = [layer.mean_bits[site] for layer in plan.layers]
    length = tokens.shape[1]
    # The ratio of mixed widths is one to a cache in 16 bits, whatever the model runs in.
    dtype = torch.bfloat16 if plan.variable_width else model.dtype
    full = sum(layer.full_elements(length) for layer in plan.layers)
    html = page.render(
        name=model_name(plan.provenance),
        packed=packed_library() if self_contained else None,
        library=LIBRARY,
        texts=None if tokenizer is None else _texts(model, plan, tokens, tokenizer),
        added=with_error(quality.added_nll, quality.standard_error),
        provenance=plan.provenance,
        plan=plan,
        quality=quality,
        sequences=tokens.shape[0],
        length=length,
        cache_bytes=plan.nbytes(length, dtype=dtype),
        full_bytes=full * dtype.itemsize,
        plan_bytes=plan.basis_nbytes(torch.float32),
        constant_bytes=constant_bytes(model, plan, tokens),
        dtype=str(dtype).removeprefix("torch."),
        folder=str(folder),
        layer_sequences=min(LAYER_SEQUENCES, tokens.shape[0]),
        charts={
            "errors": drawing.errors(layers),
            "ranks": drawing.ranks(layers, plan.layers[0].key.head_dim),
            "bits": drawing.bits(layers) if plan.variable_width else None,
        },
    )
    path = Path(path)
    if not self_contained:
        write_whole(path.with_name(LIBRARY), library().encode())
    write_whole(path, html.encode())


def template() -> Any:
    """Return the Jinja2 template of the page, which escapes all values.

    Raises
    ------
    RunError
        If a library that reports need is not installed.
    """
    try:
        import jinja2
        import plotly  # noqa: F401
    except ImportError as error:
        raise RunError(
            f'a report needs {error.name}: pip install -c constraints.txt -e ".[report]"'
        ) from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def model_name(provenance: Provenance) -> str:
    """Return the name of a model: its id on the Hub, or the last part of a folder."""
    name = provenance.model
    return name if name.count("/") < 2 and not name.startswith(("/", ".")) else Path(name).name


def _texts(
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor,
    tokenizer: PreTrainedTokenizerBase,
) -> Continuations:
    new_tokens = min(NEW_TOKENS, positions(model) // 2)
    prompt = beginning(model, tokens, new_tokens)
    return continuations(model, tokenizer, prompt, [plan], new_tokens)
