"""Autocast, switched-off gradients and other defaults: the same plans and the same numbers.

Whoever calls us may have set any of them.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import (
    RECIPES,
    Codec,
    CompressionPlan,
    Quantization,
    compress,
    compressed,
    diagnose,
    perplexity,
    tune,
)
from manifoldkv.core.basis import HeadGrouping
from manifoldkv.core.modes import in_own_modes, own_modes
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.solvers import SOLVERS
from manifoldkv.models.decoder import Decoder
from manifoldkv.recipes.full_rank import full_rank_plan
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.collect import collect
from tests.families import FAMILIES, tiny_model, tiny_tokens
from tests.plans import designed_plan, random_plan
from tests.short_recipes import short, with_fields
from tests.stored import filled, some_tokens, stored_model, stored_plan, tensors


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


MODES = {
    "autocast": autocast,
    "no gradients": lambda: torch.set_grad_enabled(False),
    "inference": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: default_device("meta"),  # what is made there has no numbers
}
MIXTURES = (
    ("autocast", "no gradients", "float64"),
    ("inference", "bfloat16", "meta"),
)
"""All modes twice over, which saves time where each takes some."""
mixed = pytest.mark.parametrize("modes", MIXTURES, ids=" ".join)
each = pytest.mark.parametrize("modes", [(name,) for name in MODES], ids=" ".join)


@contextmanager
def set_modes(names: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(MODES[name]())
        yield


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama", torch.float32)


@cache
def tokens() -> Tensor:
    return tiny_tokens(4, 12)


@cache
def plan_of(recipe: str) -> CompressionPlan:
    return compress(model(), tokens(), recipe=short(recipe), context=200)


@mixed
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"bits"}))  # slow, as `best` but for work
def test_plans(recipe: str, modes: tuple[str, ...]) -> None:
    with set_modes(modes):
        plan = compress(model(), tokens(), recipe=short(recipe), context=200)
        assert plan.digest() == plan_of(recipe).digest()
    assert plan.compute == plan_of(recipe).compute
    assert not any(
        x.is_inference() for pair in plan.bases.values() for b in pair for x in (b.down, b.up)
    )


@mixed
@pytest.mark.parametrize("name", SOLVERS.names())
def test_solvers(name: str, modes: tuple[str, ...]) -> None:
    """Also on a problem that was asked something in those modes before."""
    solver = with_fields(SOLVERS.get(name)(), epochs=2, steps=3)
    activations = next(capture(model(), tokens(), [1]))
    for objective in (OBJECTIVES.get("k-svd")(), OBJECTIVES.get("layer-output")()):
        if not solver.accepts(objective, "value", 1)[0]:
            continue
        expected, problem, used = (
            objective.problem(activations, "value", HeadGrouping(1, 2)) for _ in range(3)
        )
        with set_modes(modes):
            (_, found), *_ = solver.solve_ranks(problem, [3])
            used.initial(3), used.statistics(), used.loss(found.basis)
        expected = solver.solve(expected, 3).basis
        for basis in (found.basis, solver.solve(used, 3).basis):
            assert torch.equal(basis.down, expected.down)
            assert torch.equal(basis.up, expected.up)
            assert not basis.down.is_inference()


@mixed
@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_objectives(name: str, modes: tuple[str, ...]) -> None:
    objective, losses = OBJECTIVES.get(name)(), []
    metric = torch.eye(16, dtype=torch.float64) if objective.needs_statistics else None
    for names in ((), modes):
        with set_modes(names):
            activations = next(capture(model(), tokens(), [1]))
            heads = HeadGrouping("shared", 2)
            problem = objective.problem(activations, "key", heads, "pre", metric)
            losses.append(float(problem.loss(problem.initial(3))))
    assert losses[0] == losses[1]


@mixed
def test_fisher_tuning_and_measurements(modes: tuple[str, ...]) -> None:
    plan = plan_of("low-rank")
    found = []
    for names in ((), modes):
        with set_modes(names):
            statistics = collect(model(), tokens(), jacobian=True)
            tuned = tune(model(), plan, tokens(), steps=2)
            table = diagnose(capture(model(), tokens()), plan.bases)
            loss = perplexity(model(), tokens(), plan)
        found.append((statistics, tuned.digest(), table, loss))
    plain, other = found
    assert plain[0] == other[0]
    assert not any(x.is_inference() for x in other[0].tensors().values())
    assert plain[1] == other[1]
    assert plain[2].equals(other[2])
    assert plain[3] == other[3]


PLANS = {
    "bits": lambda: designed_plan(model(), "chain"),
    "trellis": lambda: designed_plan(model(), "trellis chain"),
    "low-rank": lambda: random_plan(model(), sinks=2),
    "low-rank, rotated": lambda: random_plan(model(), rotary="post"),
    "static": lambda: random_plan(model(), quantization=Quantization(8)),
}


@cache
def plan_to_run(kind: str) -> CompressionPlan:
    return PLANS[kind]()


@torch.no_grad()
def read_in_parts(kind: str, *modes: tuple[str, ...]) -> Tensor:
    """Logits of a prompt and of two more calls, each in modes of its own."""
    ids, logits = tiny_tokens(2, 44), []
    for part, names in zip(ids.split([40, 1, 3], dim=1), modes, strict=True):
        with set_modes(names):
            if not logits:
                block = compressed(model(), plan_to_run(kind))
                new_cache = block.__enter__()
                cache = new_cache()
            logits.append(model()(input_ids=part, past_key_values=cache).logits)
    block.__exit__(None, None, None)
    return torch.cat(logits, dim=1)


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    one, other = (torch.cat([x.float().flatten() for x in parts]) for parts in (found, expected))
    return float((one - other).norm() / other.norm())


@cache
def plain_logits(kind: str) -> Tensor:
    return read_in_parts(kind, (), (), ())


@each
@pytest.mark.parametrize("kind", list(PLANS))
def test_decoding(kind: str, modes: tuple[str, ...]) -> None:
    """A cache goes on in other modes than those it was begun in."""
    expected = plain_logits(kind)
    for logits in (
        read_in_parts(kind, modes, modes, modes),
        read_in_parts(kind, modes, (), modes),
        read_in_parts(kind, (), modes, ()),
    ):
        assert logits.dtype.itemsize == 4 or modes == ("autocast",)
        assert relative_error([logits], [expected]) <= (0.05 if modes == ("autocast",) else 0)


def test_generation_under_autocast() -> None:
    with compressed(model(), plan_to_run("bits")), autocast():
        ids = model().generate(tiny_tokens(1, 40), max_new_tokens=4, do_sample=False)
    assert ids.shape == (1, 44)


@each
def test_codec(modes: tuple[str, ...]) -> None:
    ids = some_tokens(2, 300)
    stock = filled(stored_model(), ids)
    codec = Codec(stored_model(), stored_plan())
    blob = codec.encode(stock, ids)
    expected = tensors(codec.decode(blob))
    with set_modes(modes):
        again = Codec(stored_model(), stored_plan())
        assert again.encode(stock, ids) == blob
        part = tensors(again.decode(blob, 270))
        found = tensors(codec.decode(blob))
        assert torch.equal(again.input_ids(blob).cpu(), ids)
    for x, y, z in zip(found, expected, part, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(z, y[:, :, :270])
        x.add_(1)  # which a tensor of inference mode refuses


def test_codec_of_a_cache_filled_under_autocast() -> None:
    codec, ids = Codec(stored_model(), stored_plan()), some_tokens(1, 300)
    expected = tensors(codec.decode(codec.encode(filled(stored_model(), ids))))
    with autocast():
        found = tensors(codec.decode(codec.encode(filled(stored_model(), ids))))
    assert relative_error(found, expected) < 0.05


@each
def test_plans_are_changed_saved_and_read(modes: tuple[str, ...], tmp_path: Path) -> None:
    plan = plan_of("low-rank")
    with set_modes(modes):
        shorter, full = plan.truncated(0.45), full_rank_plan(model())
        plan.save(tmp_path)
        read = CompressionPlan.load(tmp_path)
        assert read.digest() == plan.digest()
        assert read.transferred_to(Decoder.of(model())).digest() == plan.digest()
    assert shorter.digest() == plan.truncated(0.45).digest()
    assert full.digest() == full_rank_plan(model()).digest()
    assert (
        tune(model(), read, tokens(), steps=1).digest()
        == tune(model(), plan, tokens(), steps=1).digest()
    )
    assert (read.compute, read.basis_nbytes()) == (plan.compute, plan.basis_nbytes())


@in_own_modes
def _made() -> Iterator[Tensor]:
    yield torch.empty(1)
    yield torch.empty(1, requires_grad=True) + 1


@mixed
def test_modes_are_those_of_the_caller_between_items(modes: tuple[str, ...]) -> None:
    def state() -> tuple[object, ...]:
        made = torch.empty(1)
        return made.dtype, made.device, made.is_inference(), torch.is_grad_enabled()

    with set_modes(modes):
        before = state()
        for item in _made():
            assert (item.dtype, item.device.type) == (torch.float32, "cpu")
            assert not item.is_inference()
            assert state() == before
        assert item.requires_grad
        assert state() == before


def test_the_default_dtype_is_set_back_by_the_last_thread() -> None:
    inside, leave = threading.Barrier(2), threading.Barrier(2)

    def block() -> None:
        with own_modes():
            inside.wait()
            leave.wait()
            assert torch.get_default_dtype() == torch.float32

    with default_dtype(torch.bfloat16):
        other = threading.Thread(target=block)
        with own_modes():
            other.start()
            inside.wait()
        assert torch.get_default_dtype() == torch.float32  # still inside, over there
        leave.wait()
        other.join()
        assert torch.get_default_dtype() == torch.bfloat16


@pytest.mark.parametrize("recipe", ["bits", "low-rank", "paper", "fast"])
def test_models_made_in_inference_mode(recipe: str) -> None:
    """Bits in the other modes too."""
    with torch.inference_mode():
        made, seen = copy.deepcopy(model()), tokens().clone()
    assert all(parameter.is_inference() for parameter in made.parameters())
    with set_modes(MIXTURES[1] if recipe == "bits" else ()):
        plan = compress(made, seen, recipe=short(recipe), context=200)
    assert plan.digest() == plan_of(recipe).digest()
    assert all(parameter.is_inference() for parameter in made.parameters())


@each
def test_operations_on_caches(modes: tuple[str, ...]) -> None:
    """Their tokens are those of a stock cache, filled in the same modes."""
    ids, logits = tiny_tokens(2, 44), []
    for names in ((), modes):
        with torch.no_grad(), set_modes(names):
            stock = filled(model(), ids[:, :40])
            with compressed(model(), plan_to_run("bits"), prefill="exact") as new_cache:
                cache = new_cache(stock)
                cache.batch_repeat_interleave(2)
                cache.crop(-1)
                cache.compact()
                copied = copy.deepcopy(cache)
                more = ids[:, 39:].repeat_interleave(2, dim=0)
                logits.append(model()(input_ids=more, past_key_values=copied).logits)
        with torch.no_grad(), compressed(model(), plan_to_run("bits")):
            cache.crop(-3)
            model()(input_ids=more, past_key_values=cache)
    assert relative_error([logits[1]], [logits[0]]) <= (0.05 if modes == ("autocast",) else 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_families_under_autocast(family: str, rotary: str) -> None:
    one, found = tiny_model(family, torch.float32), []
    plan = random_plan(one, rotary=rotary, key_rank=7, value_rank=7, sinks=2)
    for names in ((), ("autocast",)):
        with torch.no_grad(), set_modes(names), compressed(one, plan) as new_cache:
            cache, parts = new_cache(), tiny_tokens(2, 37).split([36, 1], dim=1)
            found.append(torch.cat([one(x, past_key_values=cache).logits for x in parts], dim=1))
    error = (found[1] - found[0]).norm(dim=-1) / found[0].norm(dim=-1)
    assert float(error.median()) < 0.03  # of tokens, some of which get other experts
