"""Perplexities and accuracies of plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import CompressionPlan
from manifoldkv.evaluate import perplexity
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from paper.accuracy import zero_shot
from paper.plans import Labelled
from paper.steps import Steps
from paper.tasks import Tasks


@dataclass(frozen=True)
class Measurements:
    """Perplexities and accuracies of plans on the model called `name` in tables."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    corpora: Mapping[str, Tensor]  # (windows, length) by title
    tasks: Tasks
    checkpoints: Checkpoints
    steps: Steps

    def evaluated(
        self,
        labelled: Labelled | None,
        measure: Callable[[CompressionPlan | None], pd.DataFrame],
    ) -> pd.DataFrame:
        """Return perplexities or accuracies of a plan, or of the uncompressed model."""
        columns: dict[str, Any] = {"method": "uncompressed", "policy": "none", "point": 1.0}
        columns |= {"seed": 0, "requested_ratio": None, "ratio": 1.0, "bits": 16}
        columns |= {} if labelled is None else labelled.columns()
        frame = measure(None if labelled is None else labelled.plan)
        return frame.assign(model=self.name, bytes_ratio=columns["ratio"], **columns)

    def perplexities(
        self, plan: CompressionPlan | None, corpora: Sequence[str] = ()
    ) -> pd.DataFrame:
        """Return perplexities and added NLL, each with its standard error.

        Both errors are of the difference from the uncompressed model, window by window. On all
        corpora unless some are named.
        """
        rows = []
        for corpus in corpora or self.corpora:
            tokens = self.corpora[corpus]
            nll = self.nll(plan, tokens)
            added = nll - self.nll(None, tokens)
            spread = (nll if plan is None else added).std() / math.sqrt(len(nll))
            value = math.exp(nll.mean())
            rows.append(
                {"value": value, "standard_error": value * spread, "measure": "perplexity"}
                | {"of": corpus, "added_nll": added.mean(), "added_nll_error": spread}
            )
        return pd.DataFrame(rows)

    def nll(self, plan: CompressionPlan | None, tokens: Tensor) -> pd.Series:
        """Return the nats per token of every window."""

        def compute() -> pd.DataFrame:
            return pd.DataFrame({"nll": perplexity(self.model, tokens, plan).by_sequence})

        checkpoints = self.of_plan(plan).keyed(tokens=digest_of_tokens(tokens))
        return self.steps.frame(checkpoints, "nll", "perplexity", compute)["nll"]

    def accuracies(self, plan: CompressionPlan | None) -> pd.DataFrame:
        """Return accuracies with their standard errors over items."""

        def compute() -> pd.DataFrame:
            return zero_shot(
                *(self.model, self.tokenizer, self.tasks.names, plan),
                data=self.tasks.data,
                limit=self.tasks.items,
            )

        checkpoints = self.of_plan(plan).keyed(
            tasks=self.tasks.names, items=self.tasks.items, documents=self.tasks.documents()
        )
        frame = self.steps.frame(checkpoints, "accuracy", "accuracy", compute)
        frame = frame.rename(columns={"task": "of", "accuracy": "value"})
        return frame.assign(measure="accuracy")[["value", "standard_error", "measure", "of"]]

    def of_plan(self, plan: CompressionPlan | None) -> Checkpoints:
        """Return the checkpoints of a plan's measurements."""
        return self.checkpoints.keyed(
            plan=None if plan is None else plan.digest(), dtype=str(self.model.dtype)
        )
