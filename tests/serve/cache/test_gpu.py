"""Caches that Triton kernels decode from: the same logits as by torch or by the CPU's kernels.

Without a CUDA device the kernels run under Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, compressed
from manifoldkv.core.basis import Site
from manifoldkv.plan.formats.trellis import TrellisCoded
from manifoldkv.serve.cache.trellis import TrellisStore
from manifoldkv.serve.kernels import decode
from tests.families import tiny_model, tiny_tokens
from tests.plans import DESIGNS, designed_plan

triton = pytest.importorskip("triton")
# The interpreter computes with what lies in memory beyond the last token, and stores none of it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
from manifoldkv.serve.cache.trellis_triton import TritonTrellisStore  # noqa: E402
from manifoldkv.serve.kernels.triton import encode as gpu_encode  # noqa: E402

PROMPT, TOKENS = 9, 14


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


@pytest.mark.parametrize("site", ["key", "value"])
def test_a_site_may_store_no_latents(
    site: Site, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", torch.float32)
    plan = designed_plan(model, "own keys")
    first, second, third = plan.layers
    planned = second.of(site)
    nothing = replace(planned.quantizer, bits=torch.zeros_like(planned.quantizer.bits))
    second = replace(second, **{site: replace(planned, quantizer=nothing)})
    plan = replace(plan, layers=(first, second, third))
    model.to(device)
    monkeypatch.setattr(decode, "GPUS", ())
    expected = decoded(model, plan)
    monkeypatch.setattr(decode, "GPUS", ("cpu", "cuda"))
    assert (decoded(model, plan) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("bits", [[2.0, 1.5, 1.0, 0.5], []])
def test_a_store_reads_what_a_store_on_a_cpu_does(
    bits: list[float], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "GPUS", ("cpu", "cuda"))
    widths = torch.tensor([*bits, 0.0, 0.0])
    ones = [torch.ones(len(widths)) for _ in range(3)]
    quantizer = TrellisCoded(widths, *ones)
    stores = [
        TrellisStore(quantizer, torch.float32, torch.device("cpu")),
        TritonTrellisStore(quantizer, torch.float32, device),
    ]
    x = torch.randn(2, 1, 5, len(widths), generator=torch.Generator().manual_seed(0))
    found = []
    for store, on in zip(stores, (torch.device("cpu"), device), strict=True):
        store.append(x[:, :, :2].to(on))
        appended = store.append_and_read(x[:, :, 2:].to(on))
        assert torch.equal(appended, store.read(2, 5))
        store.drop_first(1)
        found.append(store.read(0, 4).cpu())
    assert stores[0].nbytes == stores[1].nbytes
    torch.testing.assert_close(found[1], found[0])


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
