"""Do engines run an exported checkpoint, and what do they gain from it?

    python studies/serving.py
    python studies/serving.py --model smollm2 --exported half \\
        --texts c4-validation.jsonl wikitext2-test.txt --vllm-python envs/vllm/bin/python \\
        --llama-python envs/llamacpp/bin/python

The original and a checkpoint that `manifoldkv export` has written run in transformers, vLLM and
llama.cpp, these two in environments of their own; an engine that is not there is named, with the
line that installs it. Every engine says what its caches take, goes on greedily from the same token
ids, and decodes over caches of several lengths, the two checkpoints in turns. llama.cpp has both as
GGUF files in float16 written here, with caches of 16, 8 and 4 bits whose losses are measured. vLLM
computes a prompt, keeps it in the store of a codec (recipe "stored") and serves it after a restart.
Without --exported and --stored-plan both are made here, in closed form from the first text. Written
into --out: results.csv (a row for each engine, checkpoint and cache), speeds.csv, losses.csv,
store.csv, summary.md and a figure. What is measured is stored in --out/steps: an interrupted run
goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import pandas as pd
import torch
from engines.base import EXPORTED, ORIGINAL, Asked, Engine
from engines.llama import LlamaCpp
from engines.report import Served, draw, summary
from engines.stock import Transformers
from engines.store import served_from_store
from engines.vllm_server import Vllm
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv import (
    Codec,
    CompressionPlan,
    ManifoldKVError,
    compress,
    export_checkpoint,
    open_text,
    sample_tokens,
)
from manifoldkv.export.gguf import write_gguf
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import check_length

ENGINES = ("transformers", "vllm", "llama.cpp")
TIMES = 8
"""How much smaller a stored cache is, where no plan is given."""


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    add = parser.add_argument
    add("--exported", type=Path, help="checkpoint of `manifoldkv export` (made here)")
    add("--stored-plan", type=Path, help="plan of recipe stored for vLLM's store (made here)")
    add(
        "--texts",
        nargs="+",
        default=["docstrings"],
        help="losses are measured on these, prompts are of the first (docstrings)",
    )
    add("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="beside transformers (all)")
    add("--vllm-python", default=sys.executable, help="interpreter that has vLLM (this one)")
    add("--llama-python", default=sys.executable, help="one that has llama-cpp-python (this one)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    add("--prompts", type=int, default=8, help="that greedy texts go on from (%(default)s)")
    add("--prompt", type=int, default=64, help="tokens of each (%(default)s)")
    add("--new-tokens", type=int, default=32, help="of a greedy text (%(default)s)")
    add("--contexts", type=int, nargs="+", default=[512], help="of speeds, in tokens (512)")
    add("--steps", type=int, default=16, help="tokens that are timed at a time (%(default)s)")
    add("--rounds", type=int, default=5, help="turns of every checkpoint (%(default)s)")
    add("--windows", type=int, default=4, help="of a text, for losses (%(default)s)")
    add("--window", type=int, default=512, help="tokens of each (%(default)s)")
    add("--stored-prompt", type=int, default=513, help="tokens of the stored one (%(default)s)")
    add("--sequences", type=int, default=16, help="calibration of what is made (%(default)s)")
    add("--sequence-length", type=int, default=256, help="tokens of each (%(default)s)")
    parser.add_threads()
    parser.add_out("figures/serving/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    counts = ("prompts", "prompt", "new_tokens", "steps", "rounds", "windows")
    if min(*(getattr(given, name) for name in counts), *given.contexts) < 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in counts)
        raise ManifoldKVError(f"{names} and --contexts must be at least 1")
    out = common.output_folder(given, "serving", Path(given.model).name)
    if given.redraw:
        common.draw(out, partial(drawn, out))
        return
    with tempfile.TemporaryDirectory() as work:
        served = Serving(given, out, Path(work)).served()
    known = {"model": common.short(given.model), "threads": given.threads}
    versions = served.results["engine"].map(served.versions)
    frames = {
        "results": served.results.assign(version=versions, **known),
        "speeds": served.speeds,
        "losses": served.losses,
        "store": served.store,
    }
    for name, frame in frames.items():
        if len(frame):
            frame.to_csv(out / f"{name}.csv", index=False)
    common.draw(out, partial(drawn, out))
    common.write_summary(out, summary(served, given))


def drawn(out: Path, results: pd.DataFrame) -> dict[str, Figure]:
    """Return the figure of the tables in a folder."""
    tables = [
        pd.read_csv(path) if (path := out / f"{name}.csv").is_file() else pd.DataFrame()
        for name in ("speeds", "losses")
    ]
    return {"served": draw(results, *tables)}


class Serving:
    """Both checkpoints, what engines are asked of them, and what they have answered."""

    def __init__(self, given: argparse.Namespace, out: Path, work: Path) -> None:
        self.given, self.out, self.work = given, out, work
        self.model, self.tokenizer = common.load(given.model)
        sources = [open_text(name) for name in given.texts]
        longest = max(*given.contexts, given.stored_prompt) + given.steps + 1
        check_length(self.model, max(longest, given.window, given.prompt + given.new_tokens))
        self.windows = {
            common.short(name): self._sampled(source, given.windows, given.window)
            for name, source in zip(given.texts, sources, strict=True)
        }
        self.calibration = sample_tokens(
            sources[0],
            self.tokenizer,
            sequences=given.sequences,
            length=given.sequence_length,
            split="calibration",
        )
        if given.stored_plan is not None:
            Codec(self.model, CompressionPlan.load(given.stored_plan))  # or it is refused
        exported = self._exported()
        self.models = {ORIGINAL: self.model, EXPORTED: common.load(str(exported))[0]}
        (long_text,) = self._sampled(sources[0], 1, max(given.contexts))
        (self.stored_prompt,) = self._sampled(sources[0], 1, given.stored_prompt)
        self.asked = Asked(
            folders={ORIGINAL: str(self.model.config._name_or_path), EXPORTED: str(exported)},
            dtype=given.dtype,
            prompts=self._sampled(sources[0], given.prompts, given.prompt),
            new_tokens=given.new_tokens,
            long_text=long_text,
            steps=given.steps,
            rounds=given.rounds,
            threads=given.threads,
        )
        self.stored = common.stored_in(out, given).keyed(
            models=[digest_of_model(model) for model in self.models.values()],
            dtype=given.dtype,
            threads=given.threads,
        )

    def _sampled(self, source: TextSource, sequences: int, length: int) -> list[list[int]]:
        found: list[list[int]] = sample_tokens(
            source, self.tokenizer, sequences=sequences, length=length, split="held-out"
        ).tolist()
        return found

    def _exported(self) -> Path:
        """Return the exported checkpoint: the one that is given, or one in closed form."""
        if self.given.exported is not None:
            return Path(self.given.exported)
        plan = self._plan("commuting", 0.5)
        return export_checkpoint(self.model, plan, self.work / EXPORTED).folder

    def _plan(self, recipe: str, ratio: float) -> CompressionPlan:
        return compress(
            self.model,
            self.calibration,
            recipe=recipe,
            ratio=ratio,
            context=self.given.stored_prompt,
            folder=self.out / "steps" / recipe,
        )

    def _stored_plan(self) -> Path:
        if self.given.stored_plan is not None:
            return Path(self.given.stored_plan)
        folder = self.work / "stored-plan"
        self._plan("stored", 1 / TIMES).save(folder)
        return folder

    def _engines(self) -> list[Engine]:
        """Return what is asked: transformers first, which the others are compared to."""
        wanted: dict[str, Callable[[], Engine]] = {
            "transformers": lambda: Transformers(self.asked),
            "vllm": lambda: Vllm(self.asked, self.given.vllm_python),
            "llama.cpp": lambda: LlamaCpp(self.asked, self.given.llama_python, self._gguf),
        }
        return [
            make() for name, make in wanted.items() if name in (*self.given.engines, ENGINES[0])
        ]

    def _gguf(self) -> dict[str, Path]:
        """Write both checkpoints as GGUF files with weights in float16."""
        found = {}
        for name, model in self.models.items():
            self.tokenizer.save_pretrained(self.work / "tokenizer")
            found[name] = self.work / f"{name}.gguf"
            halved = in_half(model)
            write_gguf(halved, self.work / "tokenizer", found[name], name)
        return found

    def served(self) -> Served:
        """Return what all engines have answered, and which of them are missing."""
        served = Served()
        for engine in tqdm(self._engines(), "engines", disable=None):
            try:
                version = engine.version()
                self._ask(engine, version, served)
                served.versions[engine.name] = version
            except ManifoldKVError as error:
                served.missing[engine.name] = f"{error} (`{engine.install}`)"
            finally:
                engine.close()
        return served

    def _ask(self, engine: Engine, version: str, served: Served) -> None:
        apart = [path.read_text(encoding="utf-8") for path in engine.apart]
        stored = self.stored.keyed(version=version, apart=apart).made_by(type(engine))
        name, asked = engine.name, self.asked
        of_texts = stored.keyed(prompts=asked.prompts, new_tokens=asked.new_tokens)
        caches = stored.frame(f"caches-{name}", engine.caches)
        texts = of_texts.frame(f"texts-{name}", engine.texts)
        speeds = []
        for tokens in tqdm(self.given.contexts, f"speeds, {name}", leave=False, disable=None):
            ids = asked.long_text[:tokens]
            known = stored.keyed(ids=ids, steps=asked.steps, rounds=asked.rounds)
            frame = known.frame(f"speeds-{name}-{tokens}", partial(engine.speeds, tokens))
            speeds.append(frame.assign(tokens=tokens))
        losses, store = pd.DataFrame(), pd.DataFrame()
        if isinstance(engine, LlamaCpp):
            losses = self._losses(engine, stored)
        if isinstance(engine, Vllm):
            engine.close()  # the servers with a store are others
            store = self._store(engine, stored)
        served.add(name, caches, texts, pd.concat(speeds), losses, store)

    def _losses(self, engine: LlamaCpp, stored: Checkpoints) -> pd.DataFrame:
        frames = []
        for text, windows in self.windows.items():
            known = stored.keyed(windows=windows)
            frame = known.frame(f"losses-{engine.name}", partial(engine.losses, windows))
            frames.append(frame.assign(text=text))
        return pd.concat(frames, ignore_index=True)

    def _store(self, engine: Vllm, stored: Checkpoints) -> pd.DataFrame:
        prompt = self.stored_prompt

        def compute() -> pd.DataFrame:
            return served_from_store(self.asked, engine.python, self._stored_plan(), prompt)

        given = self.given.stored_plan
        plan = None if given is None else CompressionPlan.load(given).digest()
        return (
            stored.made_by(served_from_store)
            .keyed(plan=plan, prompt=prompt)
            .frame("store", compute)
        )


def in_half(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with weights in float16."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.to(torch.float16)


if __name__ == "__main__":
    sys.exit(main())
