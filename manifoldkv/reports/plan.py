"""A report of a plan that a person opens: one HTML file that needs no network."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.diagnostics import layer_errors
from manifoldkv.errors import OutputError
from manifoldkv.evaluation.perplexity import compare
from manifoldkv.layers.activations import LayerActivations
from manifoldkv.layers.capture import capture
from manifoldkv.objectives import EigenAttention
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.ranks.base import LayerBases
from manifoldkv.ranks.budget import candidate_ranks
from manifoldkv.ranks.surfaces import ROWS, ErrorSurface, layer_surface
from manifoldkv.runs.files import write_whole

LOG = logging.getLogger(__name__)

LAYER_SEQUENCES = 4
"""Of the held-out ones, on which layers are measured by themselves."""
TEMPLATES = Path(__file__).parent
KEY_COLOUR, VALUE_COLOUR = "#0072b2", "#d55e00"


def write_report(
    path: str | Path,
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor,
    *,
    folder: str | Path = "plan",
) -> None:
    """Measure a plan and write what came out.

    Needs ``pip install manifoldkv[report]``.

    Parameters
    ----------
    path : str or Path
        Of the HTML file, about 5 MB: the library that draws is in it.
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        From `compress`.
    tokens : Tensor
        Held-out token ids, (sequences, length), on which everything is measured.
    folder : str or Path
        Where the plan is, for the lines that load it.

    Raises
    ------
    OutputError
        If plotly is not installed, or the file cannot be written.
    """
    page = template("plan.html")  # an absent library is found before anything is measured
    drawing = _Drawing()
    plan.check_model(model)
    quality = compare(model, tokens, plan)
    LOG.info("measuring the layers for the report")
    layers, surfaces = _measure_layers(model, plan, tokens[:LAYER_SEQUENCES])
    length = tokens.shape[1]
    # The ratio of coded latents is one to a cache in 16 bits, whatever the model runs in.
    dtype = torch.bfloat16 if plan.coded else model.dtype
    full = sum(layer.elements(length, recent=length) for layer in plan.layers)
    html = page.render(
        library=drawing.library,
        provenance=plan.provenance,
        plan=plan,
        quality=quality,
        sequences=tokens.shape[0],
        length=length,
        cache_bytes=plan.nbytes(length, dtype=dtype),
        full_bytes=full * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        quantization=None if plan.quantization is None else asdict(plan.quantization),
        folder=str(folder),
        predicted=plan.provenance.predicted_nats,
        layer_sequences=min(LAYER_SEQUENCES, tokens.shape[0]),
        charts={
            "errors": drawing.errors(layers),
            "ranks": drawing.ranks(layers, plan.layers[0].key.head_dim),
            "surface": drawing.surfaces(surfaces, plan) if surfaces else None,
            "bits": drawing.bits(layers) if plan.coded else None,
        },
    )
    write_whole(Path(path), html.encode())


def template(name: str) -> Any:
    """Return a page to be filled in by Jinja2, which escapes what it is given.

    Raises
    ------
    OutputError
        If a library that reports need is not installed.
    """
    try:
        import jinja2
        import markdown_it  # noqa: F401
        import plotly  # noqa: F401
    except ImportError as error:
        raise OutputError(f"a report needs {error.name}: pip install manifoldkv[report]") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name)


def _measure_layers(
    model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor
) -> tuple[pd.DataFrame, list[ErrorSurface]]:
    rows, surfaces = [], []
    for activations in capture(model, tokens):
        layer = plan.layers[activations.layer]
        errors = layer_errors(activations, *layer.projections(), rotary=plan.rotary)
        rows.append({"layer": activations.layer, "error": errors.layer_output_error})
        rows[-1] |= {"key": layer.key.rank, "value": layer.value.rank}
        rows[-1] |= {f"{site} bits": bits for site, bits in layer.mean_bits.items()}
        if not plan.coded:  # ranks are not what a coded plan chooses
            surfaces.append(_surface(activations, layer, plan))
    return pd.DataFrame(rows), surfaces


def _surface(
    activations: LayerActivations, layer: LayerPlan, plan: CompressionPlan
) -> ErrorSurface:
    """Return the errors at other ranks, of EigenAttention's bases in the grouping of the plan."""
    bases = LayerBases({}, {})
    for site, basis in layer.sites:
        problem = EigenAttention().problem(activations, site, basis.grouping, plan.rotary)
        for rank in candidate_ranks(activations.head_dim):
            bases.of(site)[rank] = problem.closed_form(rank)
    return layer_surface(activations, bases, plan.rotary, ROWS)


class _Drawing:
    """Charts by plotly."""

    def __init__(self) -> None:
        import plotly.graph_objects
        import plotly.offline

        self._go = plotly.graph_objects
        # A closing tag inside the library would end its script.
        self.library = plotly.offline.get_plotlyjs().replace("</script", "<\\/script")

    def errors(self, layers: pd.DataFrame) -> str:
        figure = self._figure("layer", "layer-output error")
        figure.add_bar(
            x=layers["layer"],
            y=layers["error"],
            marker_color=KEY_COLOUR,
            hovertemplate="layer %{x}: %{y:.4f}<extra></extra>",
        )
        return self._html(figure)

    def ranks(self, layers: pd.DataFrame, head_dim: int) -> str:
        figure = self._figure("layer", f"rank per head, of {head_dim}")
        self._add_sites(figure, layers, "", "rank %{y}")
        figure.update_yaxes(range=[0, 1.05 * head_dim])
        return self._html(figure)

    def bits(self, layers: pd.DataFrame) -> str:
        figure = self._figure("layer", "bits per number, mean")
        self._add_sites(figure, layers, " bits", "%{y:.2f} bits")
        figure.update_yaxes(rangemode="tozero")
        return self._html(figure)

    def _add_sites(self, figure: Any, layers: pd.DataFrame, column: str, shown: str) -> None:
        """Add a line for keys and one for values."""
        for site, colour in (("key", KEY_COLOUR), ("value", VALUE_COLOUR)):
            figure.add_scatter(
                x=layers["layer"],
                y=layers[f"{site}{column}"],
                name=f"{site}s",
                mode="lines+markers",
                line={"color": colour, "shape": "hvh"},
                hovertemplate=f"layer %{{x}}: {site} {shown}<extra></extra>",
            )
        figure.update_layout(hovermode="x")

    def surfaces(self, surfaces: list[ErrorSurface], plan: CompressionPlan) -> str:
        """Return a heat map per layer, one of them shown, and a list to choose from."""
        figure = self._figure("key rank", "value rank")
        for index, (surface, layer) in enumerate(zip(surfaces, plan.layers, strict=True)):
            figure.add_heatmap(
                x=surface.key_ranks,
                y=surface.value_ranks,
                z=surface.errors.T.tolist(),
                colorscale="Viridis",
                colorbar={"title": {"text": "error", "side": "right"}},
                visible=index == 0,
                hovertemplate="keys %{x}, values %{y}: %{z:.4f}<extra></extra>",
            )
            figure.add_scatter(
                x=[layer.key.rank],
                y=[layer.value.rank],
                mode="markers",
                marker={"symbol": "x", "size": 12, "color": "white", "line": {"width": 1}},
                visible=index == 0,
                showlegend=False,
                hovertemplate="the plan: keys %{x}, values %{y}<extra></extra>",
            )
        count = len(surfaces)
        buttons = [
            {
                "label": f"layer {shown}",
                "method": "restyle",
                "args": [{"visible": [i // 2 == shown for i in range(2 * count)]}],
            }
            for shown in range(count)
        ]
        figure.update_layout(
            updatemenus=[
                {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.2, "yanchor": "top"}
            ]
        )
        return self._html(figure)

    def _figure(self, x: str, y: str) -> Any:
        figure = self._go.Figure()
        figure.update_layout(
            template="simple_white",
            height=340,
            margin={"l": 60, "r": 20, "t": 40, "b": 50},
            legend={"orientation": "h", "y": 1.15},
            font={"size": 12},
        )
        figure.update_xaxes(title_text=x)
        figure.update_yaxes(title_text=y)
        return figure

    def _html(self, figure: Any) -> str:
        return str(
            figure.to_html(
                full_html=False,
                include_plotlyjs=False,
                config={"responsive": True, "displayModeBar": False},
            )
        )
