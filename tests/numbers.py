"""Measured numbers of a page, and whether a committed table has them.

Above a table, list or paragraph with measured numbers stands a comment that names CSV files:
``<!-- numbers: figures/a/results.csv figures/b/results.csv -->``. From there to the next empty line
every decimal number and every "N times" has to equal, at its printed precision, a value of these
files in a column of `MEASURES`, in the unit given there, and "N of M" a score on M items.

Only the methods count that are named in backticks: in the first cell of a row of a Markdown table,
or in the paragraph. Where a table's heading has "times smaller", all numbers of a row have to be of
one size. Standard errors need a column ``windows`` of at least four.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parent.parent
COMMENT = re.compile(r"<!-- numbers: (.*?) -->\n")
NUMBER = re.compile(r"(?<![\w.,/])-?\d+\.\d+(?![\d.]|,\d)|(?<![\w.,/])\d+(?= times\b)")
COUNT = re.compile(r"\b(\d+) of (\d+)\b")
MEASURED = re.compile(r"\bnats\b|times smaller|%")
MEASURES = {
    "ratio": lambda v: 1 / v,  # printed as times smaller
    "requested_ratio": lambda v: v,
    "times_smaller": lambda v: v,
    "added_nll": lambda v: v,
    "nll_error": lambda v: v,
    "decode_time": lambda v: v,
    "attention_work": lambda v: v,
    "work": lambda v: v,
    "time_ratio": lambda v: v,
    "basis_bytes": lambda v: v / 1024,  # KiB
    "stock_working_bytes": lambda v: v / 2**20,  # MiB
    "compressed_working_bytes": lambda v: v / 2**20,
}
"""Columns that pages quote, and how they are printed."""
COUNTED = ("passkey", "long-passkey", "uuid")
"""Tasks whose answers pages count."""
UNCOMPRESSED = (0.0, 1.0)
"""Loss, size and time of the uncompressed cache, which no file need repeat."""


def blocks(text: str) -> list[str]:
    """Return what stands between empty lines, without code."""
    return re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def faults(text: str) -> list[str]:
    """Return a line for every number of a page that no file has, and every missing comment."""
    found = []
    for block in blocks(text):
        comment = COMMENT.search(block)
        body = COMMENT.sub("", re.sub(r"\]\([^)]*\)", "]", block))
        if comment is None:
            prose = re.sub(r"`.*?`", "", body)
            if MEASURED.search(prose) and re.search(r"(?<![\w-])\d", prose):
                found.append(f"no CSV file is named above {body[:60]!r}")
            continue
        tables = [pd.read_csv(ROOT / name) for name in comment[1].split()]
        is_table = body.startswith("|")
        of_one_size = is_table and "times smaller" in body.splitlines()[0]
        for line in body.splitlines() if is_table else [body]:
            if missing := not_in(tables, line, of_one_size):
                found.append(f"{missing} of {line[:60]!r} in no CSV file")
    return found


def not_in(tables: list[pd.DataFrame], line: str, of_one_size: bool) -> list[str]:
    """Return the numbers of a line that no table has; of the size with the fewest of them."""
    method = line.split("|")[1] if line.startswith("|") else line
    rows = pd.concat([rows_of(method, table) for table in tables])
    parts = [part for _, part in rows.groupby("ratio")] if of_one_size and "ratio" in rows else []
    missing = min((missing_of(line, part) for part in parts or [rows]), key=len)
    enough = any("windows" in table and table["windows"].min() >= 4 for table in tables)
    return missing if "±" not in line or enough else [*missing, "± of fewer than four windows"]


def rows_of(method: str, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the methods that are named in backticks; without names, all rows."""
    if method.strip().startswith("uncompressed") and "stock_nll" in table:
        of_stock = ["measured_on", "task", "items", "stock_nll", "stock_score"]
        return table[[name for name in of_stock if name in table]].assign(added_nll=0.0)
    names = re.findall(r"`([\w-]+)`", method)
    named = table[table["composition"].isin(names)] if "composition" in table else table[:0]
    return table if named.empty else named


def missing_of(line: str, table: pd.DataFrame) -> list[str]:
    """Return the numbers of a line that a table does not have."""
    numbers = [change(table[name]) for name, change in MEASURES.items() if name in table]
    if {"stock_nll", "added_nll"} <= set(table.columns):  # perplexities
        numbers += [np.exp(table["stock_nll"]), np.exp(table["stock_nll"] + table["added_nll"])]
    known = np.concatenate([*numbers, UNCOMPRESSED]).astype(float)
    missing = [n for n in NUMBER.findall(re.sub(r"`.*?`", "", line)) if not among(n, known)]
    counts = counted(table)
    return missing + [
        f"{a} of {b}" for a, b in COUNT.findall(line) if (int(a), int(b)) not in counts
    ]


def counted(table: pd.DataFrame) -> set[tuple[int, int]]:
    """Return pairs of answers found and questions asked."""
    pairs = set()
    tasks = table.reindex(columns=["measured_on", "task"]).isin(COUNTED).any(axis=1)
    for score in ("score", "stock_score"):
        if {score, "items"} <= set(table.columns):
            asked = table.loc[tasks, [score, "items"]].dropna().to_numpy()
            pairs |= {(round(share * items), int(items)) for share, items in asked}
    return pairs


def among(number: str, known: np.ndarray) -> bool:
    """Return whether a printed number is one of these, rounded to its places."""
    places = len(number.partition(".")[2])
    return bool((np.abs(known - float(number)) <= 0.5 * 10**-places + 1e-9).any())
