"""Models inside what torch.compile and PEFT put around them."""

import shutil
from collections.abc import Callable, Iterator

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv import compress, compressed, diagnose
from manifoldkv.core.errors import CacheError, ModelError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.support import attention_of, decoder_layers, linear_weight, unwrapped
from manifoldkv.statistics.capture import capture
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import LONG, ROTARIES, assert_equal, reference
from tests.short_recipes import short

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # PEFT asks for it
)
BACKENDS = ["eager", *(["inductor"] if shutil.which("c++") else [])]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model: PreTrainedModel, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


def in_place(model: PreTrainedModel, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def by_layer(model: PreTrainedModel, backend: str) -> nn.Module:
    for layer in decoder_layers(model):
        layer.compile(backend=backend)
    return model


def pieces(model: nn.Module, cache: object, tokens: Tensor) -> Tensor:
    split = tokens.split([5, 1, 1, LONG - 7], dim=1)
    return torch.cat([model(input_ids=x, past_key_values=cache).logits for x in split], dim=1)


@pytest.mark.parametrize(
    ("family", "compiled_as", "used_before", "opened_with"),
    [
        ("llama", whole, False, "the model itself"),
        ("gemma3", whole, True, "the compiled model"),
        # These two compile a model in place: it is the compiled model.
        ("gemma3", in_place, False, "the compiled model"),
        ("llama", in_place, True, "the compiled model"),
        ("llama", by_layer, False, "the compiled model"),
        ("gemma3", by_layer, True, "the compiled model"),
    ],
)
class TestCompiledModels:
    @torch.no_grad()
    def test_they_are_compressed(
        self, family: str, compiled_as: Callable, used_before: bool, opened_with: str
    ) -> None:
        """In one block after another: what was compiled before a block is of no use inside."""
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plans = [random_plan(model), random_plan(model, rotary="post", key_rank=3)]
        expected = [reference(model, plan, tokens) for plan in plans]
        stock = model(input_ids=tokens).logits
        compiled = compiled_as(model, "eager")
        if used_before:
            assert_equal(compiled(input_ids=tokens).logits, stock)
        for plan, logits in zip(plans + plans[:1], expected + expected[:1], strict=True):
            with compressed(compiled if "compiled" in opened_with else model, plan) as new_cache:
                assert_equal(compiled(input_ids=tokens).logits, logits)
                assert_equal(pieces(compiled, new_cache(), tokens), logits)
                assert_equal(pieces(model, new_cache(), tokens), logits)
            assert_equal(compiled(input_ids=tokens).logits, stock)


class TestCompiling:
    @pytest.mark.parametrize("backend", BACKENDS)
    @torch.no_grad()
    def test_backends(self, backend: str) -> None:
        model, tokens = tiny_model("llama", torch.float32), tiny_tokens(2, LONG)
        plan = random_plan(model)
        with compressed(model, plan):
            expected = model(input_ids=tokens).logits
        compiled = whole(model, backend)
        with compressed(compiled, plan) as new_cache:
            found = pieces(compiled, new_cache(), tokens)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    def test_errors_are_still_ours(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        compiled = whole(model, "eager")
        with (
            compressed(compiled, random_plan(model)),
            pytest.raises(CacheError, match="leave output_attentions out"),
        ):
            compiled(input_ids=tokens, output_attentions=True)

    def test_a_full_graph_cannot_be_had(self) -> None:
        model = tiny_model("llama")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with (
            compressed(compiled, random_plan(model)),
            pytest.raises(torch._dynamo.exc.Unsupported, match="do without fullgraph=True"),
        ):
            compiled(input_ids=tiny_tokens())

    def test_a_part_that_is_replaced_is_refused(self) -> None:
        model = tiny_model("llama")
        plan = random_plan(model)
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
        with (
            pytest.raises(ModelError, match=r"model\.layers\.1 is compiled by itself"),
            compressed(model, plan),
        ):
            pass

    @pytest.mark.parametrize("compiled_as", [whole, in_place, by_layer])
    def test_bases_are_those_of_the_model_as_it_is_written(self, compiled_as: Callable) -> None:
        tokens = tiny_tokens()
        expected = compress(tiny_model("llama"), tokens, recipe=short("fast")).digest()
        compiled = compiled_as(tiny_model("llama"), "eager")
        assert compress(compiled, tokens, recipe=short("fast")).digest() == expected


def adapted(model: PreTrainedModel, *targets: str, **options: object) -> peft.PeftModel:
    """With random adapters that are not merged."""
    settings = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.2, "init_lora_weights": False} | options
    config = peft.LoraConfig(target_modules=list(targets), task_type="CAUSAL_LM", **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = peft.get_peft_model(model, config)
    return found.to(torch.float64).eval()


def merged(*targets: str, **options: object) -> PreTrainedModel:
    """The same as one model."""
    return adapted(tiny_model("llama"), *targets, **options).merge_and_unload().eval()


TARGETS = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("q_proj", "o_proj", "down_proj")]


@pytest.mark.parametrize("targets", TARGETS)
class TestAdapters:
    @pytest.mark.parametrize("options", [{}, {"prefill": "exact"}])
    @pytest.mark.parametrize("rotary", ROTARIES)
    @torch.no_grad()
    def test_they_are_active_on_the_compressed_cache(
        self, rotary: str, options: dict, targets: tuple
    ) -> None:
        one, tokens = merged(*targets), tiny_tokens(2, LONG)
        model = adapted(tiny_model("llama"), *targets)
        plan = random_plan(one, rotary=rotary)
        arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        with compressed(one, plan, **options) as new_cache:
            expected = pieces(one, new_cache(), tokens)
            written = one.generate(input_ids=tokens, **arguments)
        without = model(input_ids=tokens).logits
        with compressed(model, plan, **options) as new_cache:
            cache = new_cache()
            assert_equal(pieces(model, cache, tokens), expected)
            assert cache.get_seq_length() == LONG
            assert torch.equal(model.generate(input_ids=tokens, **arguments), written)
        assert torch.equal(model(input_ids=tokens).logits, without)

    def test_bases_are_found_with_them(self, targets: tuple) -> None:
        """As for the merged model, but for rounding; each recipe with one of the adapters."""
        recipe = {TARGETS[0]: "low-rank", TARGETS[1]: "fast", TARGETS[2]: "best"}[targets]
        tokens = tiny_tokens(4, 12)
        one, model = merged(*targets), adapted(tiny_model("llama"), *targets)
        expected = compress(one, tokens, recipe=short(recipe), ratio=0.5)
        plan = compress(model, tokens, recipe=short(recipe), ratio=0.5)
        for found, layer in zip(plan.layers, expected.layers, strict=True):
            for (_, site), (_, other) in zip(found.sites, layer.sites, strict=True):
                assert site.rank == other.rank
                projectors = [s.basis.projector() for s in (site, other)]
                assert torch.allclose(*projectors, atol=1e-6)
        with compressed(model, plan):
            model(input_ids=tokens)

    def test_a_plan_knows_them(self, targets: tuple) -> None:
        base = tiny_model("llama")
        plan, of_merged = random_plan(base), random_plan(merged(*targets))
        model = adapted(base, *targets)
        of_merged.check_model(Decoder.of(model))
        with pytest.raises(PlanError, match="made for other weights"):
            plan.check_model(Decoder.of(model))
        with model.disable_adapter():
            plan.check_model(Decoder.of(model))
        with compressed(model, plan.transferred_to(Decoder.of(model))):
            model(input_ids=tiny_tokens())


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False, use_dora=True),
        peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[], init_ia3_weights=False),
        peft.OFTConfig(target_modules=["o_proj"], oft_block_size=4, init_weights=False),
        peft.LoHaConfig(target_modules=["o_proj"], r=2, init_weights=False),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_the_weight_of_any_adapter_is_that_of_the_merged_layer(config: peft.PeftConfig) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model("llama", torch.float32), config)
    found = linear_weight(attention_of(decoder_layers(unwrapped(model))[0]).o_proj)
    one = model.merge_and_unload()
    expected = attention_of(decoder_layers(one)[0]).o_proj.weight
    assert torch.allclose(found, expected, atol=1e-5)


def test_prefix_tuning_is_refused_and_prompt_tuning_is_not() -> None:
    base, tokens = tiny_model("llama"), tiny_tokens()
    plan = random_plan(base)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with (
        pytest.raises(ModelError, match="take another kind of adapter"),
        compressed(peft.get_peft_model(tiny_model("llama"), prefix), plan),
    ):
        pass
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(base, prompt).eval()
    with compressed(model, plan), torch.no_grad():
        embedded = torch.cat([model.get_prompt(4).double(), base.model.embed_tokens(tokens)], dim=1)
        expected = base(inputs_embeds=embedded).logits
        assert_equal(model(input_ids=tokens).logits, expected)


def test_dropout_of_adapters_is_on_or_off_as_before() -> None:
    model = adapted(tiny_model("llama"), "o_proj").train()
    linear = attention_of(decoder_layers(unwrapped(model))[0]).o_proj
    modes = {name: part.training for name, part in model.named_modules()}
    assert torch.equal(linear_weight(linear), linear_weight(linear))
    assert {name: part.training for name, part in model.named_modules()} == modes
    with pytest.raises(ModelError, match=r"lora_dropout\.default drops elements"):
        compress(model, tiny_tokens(), recipe="eigen-attention")


def test_what_holds_no_model_of_transformers_is_refused() -> None:
    model = tiny_model("llama")
    for wrapped in (nn.Linear(2, 2), nn.Sequential(model), torch.compile(nn.Linear(2, 2))):
        with (
            pytest.raises(ModelError, match="pass the model inside it"),
            compressed(wrapped, random_plan(model)),
        ):
            pass


def test_the_diagnosis_of_adapters() -> None:
    """`layer_errors` reads W_O where an objective does."""
    model = adapted(tiny_model("llama"), "o_proj")
    plan = random_plan(unwrapped(model))
    bases = plan.bases
    found = diagnose(capture(model, tiny_tokens()), bases)
    expected = diagnose(capture(merged("o_proj"), tiny_tokens()), bases)
    assert torch.allclose(
        torch.from_numpy(found.to_numpy(float)), torch.from_numpy(expected.to_numpy(float))
    )
