"""The charts of a report, in the JSON of plotly."""

from __future__ import annotations

from typing import Any

import pandas as pd

KEY_COLOUR, VALUE_COLOUR = "#0072b2", "#d55e00"


class Drawing:
    """Charts by plotly, each as the JSON of its data and layout, safe inside HTML."""

    def __init__(self) -> None:
        import plotly.graph_objects

        self._go = plotly.graph_objects

    def errors(self, layers: pd.DataFrame) -> str:
        figure = self._figure("layer-output error")
        figure.add_bar(
            x=layers["layer"],
            y=layers["layer_output_error"],
            marker_color=KEY_COLOUR,
            hovertemplate="layer %{x}: %{y:.4f}<extra></extra>",
        )
        return self._json(figure)

    def ranks(self, layers: pd.DataFrame, head_dim: int) -> str:
        label = f"rank per head, of {head_dim}"
        return self._sites(layers, "rank", label, "rank %{y}", range=[0, 1.05 * head_dim])

    def bits(self, layers: pd.DataFrame) -> str:
        label = "bits per number, mean"
        return self._sites(layers, "bits", label, "%{y:.2f} bits", rangemode="tozero")

    def _sites(self, layers: pd.DataFrame, column: str, label: str, shown: str, **axis: Any) -> str:
        """Return a chart with a line for keys and one for values."""
        figure = self._figure(label)
        # Solid and dotted, so that equal lines are both visible.
        for site, colour, dash in (("key", KEY_COLOUR, "solid"), ("value", VALUE_COLOUR, "dot")):
            figure.add_scatter(
                x=layers["layer"],
                y=layers[f"{site}_{column}"],
                name=f"{site}s",
                mode="lines+markers",
                line={"color": colour, "shape": "hvh", "dash": dash},
                hovertemplate=f"layer %{{x}}: {site} {shown}<extra></extra>",
            )
        figure.update_layout(hovermode="x")
        figure.update_yaxes(**axis)
        return self._json(figure)

    def _figure(self, y: str) -> Any:
        figure = self._go.Figure()
        figure.update_layout(
            template="simple_white",
            height=340,
            margin={"l": 60, "r": 20, "t": 40, "b": 50},
            legend={"orientation": "h", "y": 1.15},
            font={"size": 12},
        )
        figure.update_xaxes(title_text="layer")
        figure.update_yaxes(title_text=y)
        return figure

    def _json(self, figure: Any) -> str:
        # A closing tag inside a name would end the script element of the chart.
        return str(figure.to_json()).replace("<", "\\u003c")
