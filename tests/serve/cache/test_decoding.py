"""What a decode step over latents multiplies and holds, seen from below torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldkv import CompressionPlan, compressed
from manifoldkv.core.basis import Site
from manifoldkv.plan.composition import sources
from manifoldkv.plan.compute import multiplications, stock_multiplications
from manifoldkv.serve.cache import attention, mixed, numba_backend, running
from manifoldkv.serve.cache import backend as cache_backend
from manifoldkv.serve.cache.attention import CachedAttention
from manifoldkv.serve.cache.rank_backend import RankBackend
from manifoldkv.serve.cache.torch_backend import TorchBackend
from tests.families import tiny_model, tiny_tokens
from tests.plans import DESIGNS, designed_plan, random_plan

FEW, MANY = 40, 50
aten = torch.ops.aten


class Recorded(TorchDispatchMode):
    """Multiplications of the operations inside, and the largest tensor they made."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        is_view = any(one.alias_info is not None for one in function._schema.returns)
        if isinstance(result, torch.Tensor) and not is_view:
            self.largest = max(self.largest, result.numel())
        packet = function.overloadpacket
        if packet in (aten.mm, aten.bmm):
            self.multiplications += result.numel() * args[0].shape[-1]
        elif packet is aten.baddbmm_:
            self.multiplications += result.numel() * args[1].shape[-1]
        elif packet in (aten.mul, aten.mul_, aten.addcmul, aten.addcmul_):
            self.multiplications += result.numel()
        else:
            assert packet not in (
                aten.baddbmm,
                aten.addmm,
                aten._scaled_dot_product_flash_attention,
            )
        return result


def decoded(
    plan: CompressionPlan, tokens: int, monkeypatch: pytest.MonkeyPatch, family: str = "llama"
) -> list[Recorded]:
    """What the attention of every layer does for the last of some tokens."""
    model, ids = tiny_model(family, torch.float32), tiny_tokens(1, tokens)
    found: list[Recorded] = []
    attend = CachedAttention.attend

    def recorded(*args: Any) -> torch.Tensor:
        found.append(Recorded())
        with found[-1]:
            return attend(*args)

    with compressed(model, plan) as new_cache, torch.no_grad(), monkeypatch.context() as patched:
        cache = new_cache()
        model(ids[:, :-1], past_key_values=cache)
        patched.setattr(CachedAttention, "attend", recorded)
        patched.setattr(TorchBackend, "reconstruct", None)  # reconstructed for prompts alone
        model(ids[:, -1:], past_key_values=cache)
    return found


def low_rank(**settings: Any) -> Callable[[], CompressionPlan]:
    return partial(random_plan, tiny_model("llama", torch.float32), **settings)


def designed(kind: str, family: str = "llama") -> Callable[[], CompressionPlan]:
    return partial(designed_plan, tiny_model(family, torch.float32), kind, sinks=0)


def beyond_kernels(plan: CompressionPlan, index: int) -> int:
    """Multiplications of torch for a token of a layer less those of the kernels, which are counted.

    Kernels multiply steps and gains into the maps, the scales of mixed latents into the weights,
    and a prediction of full rank by the identity.
    """

    def latents(site: Site) -> list[int]:
        used = sources(plan.layers, index, site)
        return [dict(plan.layers[index - below].sites)[of].latents for below, of in used]

    of_values = sum(2 * count - plan.shape.query_heads for count in latents("value"))
    key = plan.layers[index].key
    identity = 0 if key.predictor is None else key.features**2
    return sum(latents("key")) + of_values - identity


@pytest.mark.parametrize(
    "make",
    [
        designed("dense"),
        designed("chain"),
        low_rank(rotary="pre"),
        low_rank(rotary="pre", key_grouping="all", value_grouping="all", oblique=True),
        low_rank(rotary="post"),
        low_rank(rotary="post", key_grouping="all", oblique=True),
    ],
)
def test_the_work_of_a_plan_is_what_torch_multiplies(
    make: Callable[[], CompressionPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the multiplication, but for what compiled kernels do in another way (`beyond_kernels`).

    Blocks of keys are zeros of a dense matrix here, so that no plan has bands.
    """
    for module in (running, mixed):
        monkeypatch.setattr(module, "can_compile", lambda dtype, device: False)
    plan = make()
    few, many = (decoded(plan, tokens, monkeypatch) for tokens in (FEW, MANY))
    total = stock = 0
    for index, layer in enumerate(plan.layers):
        difference = many[index].multiplications - few[index].multiplications
        per_token, remainder = divmod(difference, MANY - FEW)
        assert remainder == 0
        expected = multiplications(plan.layers, index, plan.shape, plan.rotary)
        assert per_token == expected + (beyond_kernels(plan, index) if plan.variable_width else 0)
        total += expected
        stock += stock_multiplications(layer, plan.shape)
    assert plan.compute == pytest.approx(total / stock)


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("kind", DESIGNS)
def test_no_tensor_of_a_step_holds_keys_or_values_of_all_tokens(
    kind: str, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of torch are of 8 tokens of 16 features; a text in one tile shows that they are seen.

    Compiled kernels hold tiles of predictions of keys alone, which are smaller by their rank.
    """
    if by_kernels:
        pytest.importorskip("numba")
        monkeypatch.setattr(numba_backend, "TOKENS_AT_A_TIME", 8)
    else:
        monkeypatch.setattr(running, "can_compile", lambda dtype, device: False)
    family = "llama" if by_kernels else "gpt-oss"
    plan = designed(kind, family)()
    if not by_kernels:
        assert max(one.largest for one in decoded(plan, MANY, monkeypatch, family)) >= 16 * MANY
    monkeypatch.setattr(cache_backend, "ELEMENTS_AT_A_TIME", 16 * 8)
    assert max(one.largest for one in decoded(plan, MANY, monkeypatch, family)) < 16 * MANY


def test_a_continued_prompt_attends_to_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    def reconstruct(*_: object) -> None:
        raise AssertionError("keys and values of all tokens were reconstructed")

    monkeypatch.setattr(RankBackend, "reconstruct", reconstruct)
    model = tiny_model("llama")
    plan = random_plan(model, key_rank=4, key_grouping=1, rotary="post")
    tokens = tiny_tokens(2, 8 + attention.MANY_QUERIES)
    with torch.no_grad(), compressed(model, plan) as new_cache:
        cache = new_cache()
        model(tokens[:, :8], past_key_values=cache)
        output = model(tokens[:, 8:], past_key_values=cache)
    assert output.logits.isfinite().all()
