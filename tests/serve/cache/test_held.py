"""Constants that a compressed model holds: what is reported, each once, for as long as the plan."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed
from manifoldkv.serve.cache import storage
from manifoldkv.serve.cache.compressed import _Run
from manifoldkv.serve.kernels import decode
from tests.families import tiny_model, tiny_tokens
from tests.plans import DESIGNS, designed_plan, random_plan

PLANS: dict[str, Callable[[PreTrainedModel], CompressionPlan]] = {
    **{kind: lambda model, kind=kind: designed_plan(model, kind) for kind in DESIGNS},
    "rank": random_plan,
    "oblique": lambda model: random_plan(model, oblique=True, rotary="post"),
    "integers": lambda model: random_plan(model, quantization=Quantization(4)),
}
# The interpreter takes seconds.
CASES = [(kind, path) for kind in PLANS for path in ("kernels", "torch")]
CASES += [("own keys", "triton"), ("low-rank chain", "triton")]


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(storage, "is_available", lambda: False)
    if request.param == "triton":
        triton = pytest.importorskip("triton")
        if not triton.knobs.runtime.interpret:
            pytest.skip("the interpreter is for machines without a CUDA device")
        monkeypatch.setattr(decode, "GPUS", ("cpu",))
    return str(request.param)


@cache
def plan_of(kind: str) -> CompressionPlan:
    return PLANS[kind](tiny_model("llama", torch.float32))


def reachable(root: object, *without: str) -> Iterator[Tensor]:
    """All tensors and arrays that an object refers to, but for what some classes hold."""
    pending, seen = [root], set[int]()
    while pending:
        x = pending.pop()
        skipped = isinstance(x, type | ModuleType | FunctionType | nn.Module)
        if id(x) in seen or skipped or type(x).__name__ in without:
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray):
            yield torch.from_numpy(x)
        elif isinstance(x, Tensor):
            yield x
        else:
            pending += gc.get_referents(x)


def stepped(model: PreTrainedModel, plan: CompressionPlan) -> _Run:
    """The run of a block after a prompt and two decode steps."""
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache, ids = new_cache(), tiny_tokens(1, 40)
        for step in ids.split([33, 1, 1, 5], dim=1):
            model(step, past_key_values=cache)
    assert isinstance(new_cache, _Run)
    return new_cache


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "path"), CASES, indirect=["path"])
def test_what_is_reported_is_what_is_held_once(kind: str, path: str, dtype: torch.dtype) -> None:
    run = stepped(tiny_model("llama", dtype), plan_of(kind))
    held = list(reachable(run._attentions))
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    assert run.constant_nbytes() == sum(memory.values())
    # Tables of keys have some matrices in the order of kernels.
    ordered = reachable(run._attentions, "KeyTables", "Keys")
    largest = {x.untyped_storage().data_ptr(): x for x in ordered if x.is_floating_point()}
    matrices = [x for x in largest.values() if x.numel() > 16 and x.ndim > 1]
    for one, other in combinations(matrices, 2):
        assert not same_numbers(one, other), (one.shape, other.shape)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers but for 0 and 1, in any order and dtype."""
    found = [x.bfloat16().flatten().sort().values for x in (one, other)]
    found = [x[(x != 0) & (x != 1)] for x in found]
    return bool(len(found[0])) and torch.equal(*found)


def test_constants_are_prepared_once_and_freed_with_the_plan() -> None:
    model = tiny_model("llama", torch.float32)
    plan = designed_plan(model, "own keys")
    first, second = stepped(model, plan), stepped(model, plan)
    memory = {x.data_ptr() for x in reachable(first._attentions)}
    assert memory == {x.data_ptr() for x in reachable(second._attentions)}
    alive = weakref.ref(first._attentions[0]._backend)
    del first, second, plan
    gc.collect()
    assert alive() is None
