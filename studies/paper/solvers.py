"""The paper's predictor beside another solver, in a few layers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import pandas as pd

from manifoldkv import Solver
from manifoldkv.core.basis import SITES, Basis, HeadGrouping, Site
from manifoldkv.evaluate.diagnostics import layer_errors
from manifoldkv.learn.objectives import LayerOutput
from manifoldkv.statistics.layer import LayerActivations

START = "EigenAttention"


def compare_solvers(
    layers: Iterable[tuple[LayerActivations, LayerActivations]], solvers: Mapping[str, Solver]
) -> pd.DataFrame:
    """Return the layer-output errors and the seconds of solvers at rank head_dim / 2.

    Each site by itself, the other one exact, in the paper's head groupings; EigenAttention's basis,
    in closed form, beside them.

    Parameters
    ----------
    layers : iterable of (LayerActivations, LayerActivations)
        Activations of the fit and of the errors.
    solvers : mapping
        Solver by name.

    Returns
    -------
    DataFrame
        ``layer, site, solver, seconds`` (of the processor) and ``layer_output_error``.
    """
    rows = []
    for fit, held_out in layers:
        rank = fit.head_dim // 2
        for site in SITES:
            grouping = HeadGrouping("shared" if site == "key" else 1, fit.kv_heads)
            problem = LayerOutput().problem(fit, site, grouping)
            row = {"layer": fit.layer, "site": site}
            rows.append(row | _measured(START, 0.0, held_out, problem.initial(rank), site))
            for name, solver in solvers.items():
                begun = time.process_time()
                basis = solver.solve(problem, rank).basis
                seconds = time.process_time() - begun
                rows.append(row | _measured(name, seconds, held_out, basis, site))
    return pd.DataFrame(rows)


def _measured(
    name: str, seconds: float, held_out: LayerActivations, basis: Basis, site: Site
) -> dict[str, object]:
    key, value = (basis, None) if site == "key" else (None, basis)
    error = layer_errors(held_out, key, value).layer_output_error
    return {"solver": name, "seconds": seconds, "layer_output_error": error}


def solvers_caption(errors: pd.DataFrame, layers: int, candidates: int) -> str:
    """Return errors and seconds of `compare_solvers`, extrapolated to all layers, in a sentence.

    `candidates` is the number of ranks solved for in every layer and site.
    """
    names = ", ".join(str(layer) for layer in dict.fromkeys(errors["layer"]))
    means = errors.groupby("solver", sort=False)[["layer_output_error", "seconds"]].mean()
    error, seconds = means["layer_output_error"], means["seconds"]
    parts = [f"EigenAttention {error[START]:.4f}"]
    for name in means.index.drop(START):
        hours = seconds[name] * 2 * layers * candidates / 3600
        parts.append(
            f"{name} {error[name]:.4f} in {seconds[name]:.1f} processor seconds a basis, by which "
            f"all layers and ranks take {hours:.2f} hours"
        )
    return f"in layers {names} at half the rank, mean layer-output errors: {'; '.join(parts)}"
