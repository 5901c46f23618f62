"""What is measured of a plan: perplexities and accuracies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import CompressionPlan
from manifoldkv.evaluation import perplexity
from manifoldkv.evaluation.zero_shot import zero_shot
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from paper.plans import Labelled
from paper.steps import Steps
from paper.tasks import Tasks


class Measurements:
    """Measures plans on one model.

    Parameters
    ----------
    name : str
        Of the model, in tables.
    model, tokenizer
        From `load_model`.
    corpora : mapping
        Title to held-out token ids, (windows, length).
    tasks : Tasks
        What accuracies are measured on.
    checkpoints : Checkpoints
        For the weights and the code.
    steps : Steps
        Where times are counted.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        corpora: Mapping[str, Tensor],
        tasks: Tasks,
        checkpoints: Checkpoints,
        steps: Steps,
    ) -> None:
        self._name, self._model, self._tokenizer = name, model, tokenizer
        self._corpora, self._tasks = corpora, tasks
        self._checkpoints, self._steps = checkpoints, steps

    def evaluated(
        self,
        labelled: Labelled | None,
        measure: Callable[[CompressionPlan | None], pd.DataFrame],
    ) -> pd.DataFrame:
        """Return perplexities or accuracies of a plan, or of the uncompressed model."""
        columns: dict[str, Any] = {"method": "uncompressed", "policy": "none", "point": 1.0}
        columns |= {"seed": 0}
        columns |= {"requested_ratio": None, "ratio": 1.0, "bits": 16}
        columns |= {} if labelled is None else labelled.columns()
        frame = measure(None if labelled is None else labelled.plan)
        return frame.assign(model=self._name, bytes_ratio=columns["ratio"], **columns)

    def perplexities(
        self, plan: CompressionPlan | None, corpora: Sequence[str] = ()
    ) -> pd.DataFrame:
        """Return them with their standard errors, and the added NLL with its own.

        Both errors are of the difference from the uncompressed model, window by window. On all
        corpora unless some are named.
        """
        rows = []
        for corpus in corpora or self._corpora:
            tokens = self._corpora[corpus]
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
            return pd.DataFrame({"nll": perplexity(self._model, tokens, plan).by_sequence})

        checkpoints = self.of_plan(plan).keyed(tokens=digest_of_tokens(tokens))
        return self._steps.frame(checkpoints, "nll", "perplexity", compute)["nll"]

    def accuracies(self, plan: CompressionPlan | None) -> pd.DataFrame:
        """Return them with their standard errors over items."""

        def compute() -> pd.DataFrame:
            return zero_shot(
                *(self._model, self._tokenizer, self._tasks.names, plan),
                data=self._tasks.data,
                limit=self._tasks.items,
            )

        checkpoints = self.of_plan(plan).keyed(
            tasks=self._tasks.names, items=self._tasks.items, documents=self._tasks.documents()
        )
        frame = self._steps.frame(checkpoints, "accuracy", "accuracy", compute)
        frame = frame.rename(columns={"task": "of", "accuracy": "value"})
        return frame.assign(measure="accuracy")[["value", "standard_error", "measure", "of"]]

    def of_plan(self, plan: CompressionPlan | None) -> Checkpoints:
        """Return the checkpoints for what is measured of a plan."""
        return self._checkpoints.keyed(
            plan=None if plan is None else plan.digest(), dtype=str(self._model.dtype)
        )
