"""`benchmark.py agreement` as a user runs it, on few prompts."""

from pathlib import Path

import pandas as pd

from tests.studies.running import finished


def test_more_bits_agree_longer_and_a_repeated_run_reads_its_steps(tmp_path: Path) -> None:
    arguments = (
        *("benchmark", "agreement", "--text", "pydoc-topics", "--sequences", 3),
        *("--sequence-length", 64, "--prompt-length", 90, "--held-out", 4, "--new-tokens", 16),
        *("--methods", "integers", "sinks-recent", "--ratios", "1/2", "--out", tmp_path),
    )
    done = finished(*arguments)
    results = done.table()
    means = results.groupby(["composition", "ratio"])["accepted"].mean()
    assert means["uncompressed"].tolist() == [1]
    integers = means["integers"].sort_index()  # 2, 3, 4 and 8 bits
    assert integers.iloc[0] < integers.iloc[-1]
    assert results.groupby(["composition", "ratio"])["prompt"].count().eq(4).all()
    assert "| `sinks-recent` | 2.0" in done.text()
    assert "held-out prompts of 90 tokens" in done.text()
    pd.testing.assert_frame_equal(finished(*arguments).table(), results)
