"""Refused and served configurations of packed pages in vLLM, in a process of its own."""

import json
import sys
from pathlib import Path

import torch

from manifoldkv import CompressionPlan, compressed
from tests.families import tiny_model, tiny_tokens
from tests.plans import designed_plan

NEW = 12


def expected_texts(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Save a model and a plan, and return the greedy texts of transformers on the plan."""
    model = tiny_model("llama", torch.float32, max_position_embeddings=96)
    model.save_pretrained(folder / "model")
    plan = designed_plan(model, "own keys", ratio=0.55)
    plan.save(folder / "plan")
    other = tiny_model("llama", torch.float32, seed=1, max_position_embeddings=96)
    designed_plan(other, "own keys").save(folder / "other")
    texts = []
    with compressed(model, CompressionPlan.load(folder / "plan")) as new_cache:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=new_cache(),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            texts.append(output[0, len(prompt) :].tolist())
    return texts


def main(folder: Path) -> None:
    """Print what was refused, and two runs of all texts beside those expected."""
    from vllm import LLM, SamplingParams

    row = tiny_tokens(1, 90)[0].tolist()
    prompts = [row[:60], row[5:65], row[9:69], row[:3], [*row[:40], 5, 6, 7]]
    found: dict[str, list[object]] = {"expected": expected_texts(folder, prompts), "refused": []}

    def engine(plan: str, **options: object) -> LLM:
        return LLM(
            str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=96,
            disable_log_stats=False,
            attention_backend="CUSTOM",
            additional_config={"manifoldkv_plan": str(folder / plan)} if plan else {},
            **options,
        )

    refused = [("", {}), ("other", {}), ("plan", {"tensor_parallel_size": 2})]
    refused += [("plan", {"block_size": 1024}), ("plan", {"kv_cache_dtype": "fp8"})]
    for plan, options in refused:
        try:
            engine(plan, **options)
        except ValueError as error:
            found["refused"].append(str(error))
    # Chunks of 16 tokens, and five pages, of which a text takes up to three: some are preempted.
    served = engine(
        "plan", block_size=32, max_num_batched_tokens=16, max_num_seqs=4, num_gpu_blocks_override=6
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    for name in ("together", "again"):
        outputs = served.generate(inputs, greedy, use_tqdm=False)
        found[name] = [list(output.outputs[0].token_ids) for output in outputs]
    alone = [served.generate([one], greedy, use_tqdm=False)[0] for one in inputs]
    found["alone"] = [list(output.outputs[0].token_ids) for output in alone]
    found["preemptions"] = [
        metric.value for metric in served.get_metrics() if metric.name == "vllm:num_preemptions"
    ]
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
