"""Model card of a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

if TYPE_CHECKING:
    from manifoldkv.plan.plan import CompressionPlan

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""Name of a repository on the Hub; other names are not linked on a card."""
CARD = Path(__file__).with_name("card.md")


def card_of(plan: CompressionPlan, repo_id: str) -> str:
    """Return the page of a plan in a repository of the Hub, in Markdown."""
    provenance = plan.provenance
    metadata = ModelCardData(
        library_name="manifoldkv",
        base_model=provenance.model if REPOSITORY.fullmatch(provenance.model) else None,
        tags=["kv-cache", "compression", "low-rank"],
    )
    sinks = f", the first {plan.sinks} tokens uncompressed" if plan.sinks else ""
    return CARD.read_text(encoding="utf-8").format(
        metadata=metadata.to_yaml(),
        name=repo_id.split("/")[-1],
        repository=json.dumps(repo_id),
        model=json.dumps(provenance.model),
        plan=plan,
        length=provenance.context,
        rest=f", {plan.formats}{sinks}",
        per_token=plan.bytes_per_token(),
        ranks="\n".join(
            f"| {index} | {layer.key.rank} | {layer.value.rank} | {layer.key.head_dim} |"
            for index, layer in enumerate(plan.layers)
        ),
    )
