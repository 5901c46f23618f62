"""Caches on a machine without Numba: torch decodes, with the same results."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from manifoldkv import CompressionPlan, compressed
from manifoldkv.serve.kernels import decode
from tests.families import tiny_model, tiny_tokens
from tests.plans import DESIGNS, designed_plan

PROMPT = 40


@contextmanager
def without_numba() -> Iterator[None]:
    """A machine on which Numba is not found, and its kernels cannot be called."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode, "find_spec", lambda name: None)
        patched.setattr(decode, "kernels", None)
        decode.is_available.cache_clear()
        yield
    decode.is_available.cache_clear()


def decoded(plan: CompressionPlan) -> Tensor:
    """Logits of four tokens that are decoded one by one after a prompt."""
    model, ids = tiny_model("llama", torch.float32), tiny_tokens(4, PROMPT + 4)
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        model(ids[:, :PROMPT], past_key_values=cache)
        steps = ids[:, PROMPT:].split(1, dim=1)
        return torch.cat([model(step, past_key_values=cache).logits for step in steps], dim=1)


@pytest.mark.parametrize("kind", DESIGNS)
def test_torch_decodes_the_same_logits_and_says_so_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")
    plan = designed_plan(tiny_model("llama", torch.float32), kind)
    by_kernels = decoded(plan)
    with without_numba():
        by_torch = decoded(plan)
    difference = (by_torch - by_kernels).norm(dim=(1, 2)) / by_kernels.norm(dim=(1, 2))
    # A latent on the boundary of two codes may be rounded to either, in one of the texts.
    assert sorted(difference.tolist())[-2] < 1e-5
    assert difference.max() < 0.05
    said = [record.getMessage() for record in caplog.records if "numba" in record.getMessage()]
    assert said == ["numba is not installed: decoding uses slower torch operations"]
