"""The LM Evaluation Harness on the compressed cache.

Importing this module registers the model ``manifoldkv`` with the harness: its Hugging Face model
with a plan and a compressed cache.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.cache import compressed


@register_model("manifoldkv")
class ManifoldKVLM(HFLM):
    """The harness's Hugging Face model on a compressed cache.

    ``python -m manifoldkv.evaluate.zero_shot --model manifoldkv --model_args
    pretrained=MODEL,plan=FOLDER --tasks …`` is the harness's command line with this model.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        As in HFLM.
    plan : str or CompressionPlan
        A plan, or the folder of one.
    other_weights : bool
        Whether the plan may be that of another model of the same shape.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        plan: str | CompressionPlan,
        other_weights: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained=pretrained, **kwargs)
        if isinstance(plan, str):
            plan = CompressionPlan.load(plan)
        self.plan = plan.transferred_to(Decoder.of(self.model)) if other_weights else plan
        # For the life of this object: no request runs uncompressed.
        self._block = compressed(self.model, self.plan)
        self._block.__enter__()

    def close(self) -> None:
        """Restore the model."""
        self._block.__exit__(None, None, None)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
