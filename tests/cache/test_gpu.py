"""Caches that Triton kernels decode from: the same logits as by torch or by the CPU's kernels.

Without a CUDA device the kernels run under Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, compressed
from manifoldkv.kernels import decode
from tests.families import tiny_model, tiny_tokens
from tests.plans import DESIGNS, designed_plan

triton = pytest.importorskip("triton")
# The interpreter computes with what lies in memory beyond the last token, and stores none of it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
from manifoldkv.kernels import gpu_encode  # noqa: E402

PROMPT, TOKENS = 9, 14


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if (request.param == "cpu") != triton.knobs.runtime.interpret:
        pytest.skip("the interpreter is for machines without a CUDA device, and only for them")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _whole_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_encode, "MANY_TOKENS", 1)


def decoded(model: PreTrainedModel, plan: CompressionPlan) -> Tensor:
    """Logits of a prompt, of a step, of a few tokens at once, and of a padded batch."""
    ids = tiny_tokens(2, TOKENS).to(model.device)
    logits = []
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        for step in ids.split([PROMPT, 1, TOKENS - PROMPT - 1], dim=1):
            logits.append(model(step, past_key_values=cache).logits)
        if not any(layer.is_sliding for layer in cache.layers):  # they have dropped tokens
            cache.crop(-2)
        logits.append(model(ids[:, -2:-1], past_key_values=cache).logits)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        logits.append(model(ids, attention_mask=mask, past_key_values=new_cache()).logits[:, 3:])
    return torch.cat(logits, dim=1)


# Of trellis-coded latents the interpreter takes a minute.
SLOW = [pytest.mark.slow] if triton.knobs.runtime.interpret else []


@pytest.mark.parametrize(
    ("family", "kind"),
    [pytest.param("llama", x, marks=SLOW if "trellis" in x else []) for x in DESIGNS]
    + [("mistral", "chain"), ("gpt-oss", "own keys")],  # windows; learnt sinks
)
def test_logits_are_those_without_the_kernels(
    family: str, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, torch.float32)
    plan = designed_plan(model, kind)
    model.to(device)
    monkeypatch.setattr(decode, "GPUS", ())
    expected = decoded(model, plan)
    monkeypatch.setattr(decode, "GPUS", ("cpu", "cuda"))
    difference = (decoded(model, plan) - expected).norm(dim=2) / expected.norm(dim=2)
    # A latent on the boundary of two codes may be rounded to either.
    assert difference.median() < 1e-5
    assert difference.max() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["own keys", "trellis chain"])
def test_a_model_in_16_bits_decodes_about_the_same(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama", torch.float32)
    plan = designed_plan(model, kind)
    expected = decoded(model.to("cuda"), plan)
    found = decoded(model.to(dtype), plan).float()
    assert ((found - expected).norm() / expected.norm()).item() < 0.1
