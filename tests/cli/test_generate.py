"""``manifoldkv generate``."""

from pathlib import Path

import pytest
import torch

from manifoldkv import CompressionPlan
from tests.cli.running import MODEL, facts, lines, run

ASK = ("generate", MODEL, "--prompt", "Return the sum of")


def test_text_on_the_compressed_cache(plan: Path) -> None:
    ask = (*ASK, "--max-new-tokens", 5)
    assert lines(*ask, "--plan", plan).startswith("Return the sum of")
    written = facts(*ask, "--plan", plan)
    tokens = written["tokens"] - 1
    expected = CompressionPlan.load(plan).nbytes(tokens, dtype=torch.float32)
    assert written["cache_bytes"] == expected
    assert "cache_bytes" not in facts(*ask)


def test_sampled_text_depends_on_the_seed_alone(plan: Path) -> None:
    ask = (*ASK, "--plan", plan, "--max-new-tokens", 12, "--temperature", 1)
    first = lines(*ask, "--seed", 1)
    assert lines(*ask, "--seed", 1) == first
    assert lines(*ask, "--seed", 2) != first


def test_the_coldest_and_the_narrowest_sampling_is_greedy() -> None:
    ask = (*ASK, "--max-new-tokens", 8)
    greedy = lines(*ask)
    assert lines(*ask, "--temperature", 1e-300) == greedy
    sampled = (*ask, "--temperature", 1, "--seed", 1)
    assert lines(*sampled, "--top-p", 1e-6) == greedy
    assert lines(*sampled) != greedy


def test_the_answer_of_a_chat_alone_is_printed(plan: Path, tmp_path: Path) -> None:
    for path in Path(MODEL).iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    question, few = "What is it?", ("--max-new-tokens", 6)
    for more in (few, (*few, "--plan", plan)):
        answer = lines("generate", tmp_path, "--chat", "--prompt", question, *more)
        prompt = f"<user>{question}<answer>"
        assert lines("generate", MODEL, "--prompt", prompt, *more) == prompt + answer


class TestStoredCache:
    def test_a_prompt_is_read_once_and_its_cache_from_a_file(
        self, stored: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "prompt.kv"
        prompt = "Return the sum of all elements of an array along a given axis."

        def ask(text: str) -> dict:
            known = ("--plan", stored, "--cache", file, "--max-new-tokens", 8)
            return facts("generate", MODEL, "--prompt", text, *known)

        first, content = ask(prompt), file.read_bytes()
        again = ask(prompt)
        assert first.pop("cached_tokens") == 0
        count = again.pop("cached_tokens")
        assert count > 10
        assert again == first
        assert first["cache_bytes"] == len(content)
        assert file.read_bytes() == content
        # A longer prompt reads the rest and appends it.
        assert ask(prompt + " The default is")["cached_tokens"] == count
        assert file.read_bytes()[112 : len(content)] == content[112:]
        longer = {"cached_tokens": count, "cache_bytes": file.stat().st_size}
        assert ask(prompt) == again | longer
        assert ask("Nothing of the kind, but something else.")["cached_tokens"] == 0
        assert ask(prompt)["text"] == first["text"]

    @pytest.mark.parametrize(
        ("of", "message"),
        [
            ("stored", "letter.txt: not a stored cache (bad magic); take another file as --cache"),
            ("plan", "the plan holds no tables of symbols"),
            (None, "goes with the --plan of recipe stored"),
        ],
    )
    def test_another_file_is_refused_and_not_changed(
        self, of: str | None, message: str, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        file = tmp_path / "letter.txt"
        file.write_text("Dear reader")
        known = () if of is None else ("--plan", request.getfixturevalue(of))
        done = run(*ASK, "--cache", file, *known)
        assert done.code == 2
        assert message in done.err
        assert file.read_text() == "Dear reader"
