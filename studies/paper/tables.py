"""The tables over all models."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from paper.protocol import EIGEN, GROUPED, SAME_RANKS, STIEF
from paper.published import published_rows


def table_of_results(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's main table: a row per model, method and requested ratio.

    Every corpus or task has two columns, means over seeds: of its values and, with " SE" after its
    name, of their standard errors. The uncompressed model has no requested ratio.
    """
    part = evaluations[evaluations["bits"] == 16]
    points = part.groupby(["model", "method", "point"], sort=False)
    ratios = points.agg(requested_ratio=("requested_ratio", "first"), ratio=("ratio", "mean"))
    index = ["model", "method", "point"]
    values = part.pivot_table("value", index, "of", sort=False)
    errors = part.pivot_table("standard_error", index, "of", sort=False).add_suffix(" SE")
    columns = [c for of in dict.fromkeys(part["of"]) for c in (of, f"{of} SE")]
    return ratios.join(values.join(errors)[columns]).reset_index().drop(columns="point")


def bases_at_the_same_ranks(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of bases at the ranks of the paper's sequential rule."""
    part = of_methods(evaluations, {EIGEN: SAME_RANKS, STIEF: "sequential", GROUPED: SAME_RANKS})
    return _wide(part[part["method"] != "uncompressed"], "method")


def rules_with_the_same_bases(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of rank rules with EigenAttention's and with the paper's bases."""
    part = evaluations[evaluations["method"].isin([EIGEN, STIEF])]
    return _wide(part[~part["policy"].isin([SAME_RANKS, "release"])], "policy")


def of_methods(evaluations: pd.DataFrame, policies: dict[str, str]) -> pd.DataFrame:
    """Return the rows of some methods, each under one rule, and of the uncompressed model."""
    wanted = evaluations["method"].map(policies | {"uncompressed": "none"})
    return evaluations[evaluations["policy"] == wanted]


def _wide(part: pd.DataFrame, of: str) -> pd.DataFrame:
    """Return added NLL ± standard error (achieved ratio), a column for every requested ratio."""
    part = part[part["measure"] == "perplexity"]
    keys = ["model", "of", "method", "policy", "requested_ratio"]
    means = part.groupby(keys, sort=False)[["added_nll", "added_nll_error", "ratio"]].mean()
    means["cell"] = [
        f"{row.added_nll:.3f} ± {row.added_nll_error:.3f} ({row.ratio:.3f})"
        for row in means.itertuples()
    ]
    wide = means.reset_index().pivot_table("cell", keys[:-1], keys[-1], aggfunc="first", sort=False)
    wide = wide[sorted(wide.columns, reverse=True)].rename(columns="ratio {:g}".format)
    names = {"of": "corpus", "method": "bases", "policy": "ranks"}
    wide = wide.reset_index().rename(columns=names).rename_axis(columns=None)
    first = ["model", "corpus", "bases"]
    if of == "method":
        return wide.drop(columns="ranks").sort_values(first[:2], kind="stable")
    return wide.sort_values(first, kind="stable")


def write_tables(tables: list[dict[str, pd.DataFrame]], out: Path, captions: list[str]) -> None:
    """Write the three tables over all models as CSV and Markdown, the first as LaTeX too."""
    notes = "\n".join(f"- {caption}" for caption in captions)
    theirs = published_rows()
    theirs.insert(1, "method", "layer-output (the paper's number)")
    theirs.loc[theirs["requested_ratio"].isna(), "method"] = "uncompressed (the paper's number)"
    rows = pd.concat([*(table["table1"] for table in tables), theirs], ignore_index=True)
    shown = with_errors(rows)
    (out / "table1.tex").write_text(shown.to_latex(index=False, escape=True), encoding="utf-8")
    written = {
        "table1": (
            rows,
            shown,
            "Perplexities (lower is better) and accuracies, ± standard errors over windows (of the "
            "difference from the uncompressed model) or items; means over seeds. EigenAttention's "
            "ranks are those of its search, which has no ratio. The paper's rows are of "
            "other models and other texts than ours.",
        ),
    }
    for name, caption in (
        ("table2", "Bases at the same ranks, those of the sequential rule for the paper's bases"),
        ("table3", "Rank rules with the same bases"),
    ):
        frame = pd.concat([table[name] for table in tables], ignore_index=True)
        text = (
            f"{caption}: added NLL, nats per token, ± standard errors over windows (achieved "
            "ratio)."
        )
        written[name] = (frame, frame, text)
    for name, (frame, readable, caption) in written.items():
        frame.to_csv(out / f"{name}.csv", index=False)
        text = (
            f"# Table {name[-1]}\n\n{caption}\n\n{readable.to_markdown(index=False)}\n\n"
            f"Ours:\n\n{notes}\n"
        )
        (out / f"{name}.md").write_text(text, encoding="utf-8")


def with_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with numbers as text, with standard errors where they exist."""
    shown = rows[["model", "method"]].copy()
    for column in rows.columns[2:]:
        if column.endswith(" SE"):
            continue
        errors = rows.get(f"{column} SE", pd.Series(float("nan"), rows.index))
        shown[column] = [
            _number(value) + (f" ± {error:.2g}" if error == error else "")
            for value, error in zip(rows[column], errors, strict=True)
        ]
    return shown


def _number(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.3f}" if value < 2 else f"{value:.2f}"
