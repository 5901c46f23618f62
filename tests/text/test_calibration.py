"""Text sources and the sampler."""

import io
import json
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from manifoldkv import Quantization, compress, quantize, tune
from manifoldkv.activations.capture import capture
from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation import perplexity
from manifoldkv.text import sources
from manifoldkv.text import tokens as tokens_module
from manifoldkv.text.sources import TextSource, open_text
from manifoldkv.text.tokens import sample_tokens
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.short_recipes import short

END = 100


@pytest.fixture
def tokenizer():
    """The words 0 to 99, and an end-of-sequence token 100."""
    vocabulary = {str(i): i for i in range(100)} | {"<eos>": END}
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


def write_jsonl(path, lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def source_of(*documents):
    return TextSource("given", lambda split: iter(documents))


DOCUMENTS = ("1 2 3", " ", "4 5", "6 7 8 9", "", "10")
STREAM = [1, 2, 3, END, 4, 5, END, 6, 7, 8, 9, END, 10, END]


@pytest.mark.parametrize("sequences", [1, 2, 3, 14])
@pytest.mark.parametrize("length", [1, 2, 5, 7, 14, 15])
def test_windows_are_the_start_of_the_joined_text_or_what_is_possible_is_said(
    tokenizer, sequences, length
):
    source = source_of(*DOCUMENTS)
    if sequences * length <= len(STREAM):
        tokens = sample_tokens(source, tokenizer, sequences=sequences, length=length)
        assert tokens.dtype == torch.int64
        assert tokens.shape == (sequences, length)
        assert tokens.flatten().tolist() == STREAM[: sequences * length]
    else:
        held = len(STREAM) // length
        said = rf"holds {held} sequences of {length} tokens \(14 tokens\), not {sequences}: "
        none = rf"has 14 tokens, too few for even one sequence of {length}: .* of at most 14 tokens"
        message = rf"^the text given ({said}ask for fewer or shorter sequences|{none})$"
        with pytest.raises(ArgumentError, match=message):
            sample_tokens(source, tokenizer, sequences=sequences, length=length)


def test_without_an_end_token_documents_are_joined_by_nothing(tokenizer):
    tokenizer.eos_token = None
    tokens = sample_tokens(source_of(*DOCUMENTS), tokenizer, sequences=2, length=5)
    assert tokens.flatten().tolist() == list(range(1, 11))


def test_a_start_token_of_the_tokenizer_stands_instead_of_the_end_token(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="0 $A", special_tokens=[("0", 0)]
    )
    assert tokenizer("1 2")["input_ids"] == [0, 1, 2]
    tokens = sample_tokens(source_of("1 2", "3 4"), tokenizer, sequences=2, length=3)
    assert tokens.tolist() == [[0, 1, 2], [0, 3, 4]]


@pytest.mark.parametrize(("split", "documents"), [("calibration", 40), ("held-out", 10)])
def test_windows_come_from_the_split_asked_for(tmp_path, tokenizer, split, documents):
    lines = [json.dumps({"text": str(i)}) for i in range(50)]
    source = open_text(str(write_jsonl(tmp_path / "text.jsonl", lines)))
    tokens = sample_tokens(source, tokenizer, sequences=documents, length=2, split=split)
    expected = [i for i in range(50) if (i % 5 == 4) == (split == "held-out")]
    assert tokens[:, 0].tolist() == expected
    message = f"the {split} part of text .* holds {documents} sequences of 2 tokens"
    with pytest.raises(ArgumentError, match=message):
        sample_tokens(source, tokenizer, sequences=documents + 1, length=2, split=split)


def test_no_more_is_read_than_needed(tokenizer):
    def endless(split):
        yield "1 2 3 4"
        yield "5 6 7 8"
        raise AssertionError("read on")

    tokens = sample_tokens(TextSource("endless", endless), tokenizer, sequences=2, length=4)
    assert tokens.shape == (2, 4)


def test_a_jsonl_file_is_read_no_further_than_needed(tmp_path, tokenizer):
    source = open_text(str(write_jsonl(tmp_path / "text.jsonl", ['{"text": "1 2 3"}', "{broken"])))
    tokens = sample_tokens(source, tokenizer, sequences=2, length=2)
    assert tokens.tolist() == [[1, 2], [3, END]]
    with pytest.raises(ArgumentError, match="line 2"):
        sample_tokens(source, tokenizer, sequences=5, length=1)


def test_sequences_are_counted_while_a_text_is_read(tokenizer, monkeypatch):
    counted = []

    class Bar(tqdm):
        def update(self, n=1):
            counted.append((self.n + n, self.total))
            super().update(n)

    monkeypatch.setattr(tokens_module, "tqdm", partial(Bar, file=io.StringIO()))
    sample_tokens(source_of(*DOCUMENTS), tokenizer, sequences=3, length=4)
    # Documents end behind 4, 7 and 12 tokens; an empty one counts nothing.
    assert counted == [(1, 3), (1, 3), (1, 3), (3, 3)]


@pytest.mark.parametrize("recipe", ["best", "stored", "low-rank"])
def test_nothing_is_read_for_a_run_that_is_refused(recipe):
    """Sequences too long for the model, or a ratio too small for the recipe."""
    model = tiny_model("llama")
    long = "sequences of 1,000 tokens are longer than the 64 positions of the model"
    for settings, message in (({"length": 1000}, long), ({"ratio": 1e-4}, None)):
        with pytest.raises(ArgumentError, match=message):
            compress(model, TextSource("unread", None), recipe=recipe, **settings)


@pytest.mark.parametrize(("sequences", "length"), [(0, 4), (4, 0), (-1, -4)])
def test_no_tokens_are_refused(tokenizer, sequences, length):
    with pytest.raises(ArgumentError, match=r"(sequences|length) must be >= 1, got (0|-4)"):
        sample_tokens(source_of(*DOCUMENTS), tokenizer, sequences=sequences, length=length)


def test_a_text_without_a_name_is_refused():
    with pytest.raises(ArgumentError, match=r"^the name of the text is empty; a text is a \.txt f"):
        open_text("")


ENTRIES = {
    "compress": lambda model, tokens: compress(model, tokens, recipe="eigen-attention"),
    "tune": lambda model, tokens: tune(model, random_plan(model), tokens),
    "quantize": lambda model, tokens: quantize(random_plan(model), model, tokens, Quantization(4)),
    "perplexity": lambda model, tokens: perplexity(model, tokens),
    "capture": lambda model, tokens: next(iter(capture(model, tokens))),
}


class TestTokensOfAModel:
    """Ids that a model cannot read are refused by name, wherever they come in."""

    LLAMA = "the model's, which are 0 to 63: read the text with the tokenizer of this model"

    @pytest.mark.parametrize("entry", ENTRIES)
    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ([[1, 2, 3]], r"must be a tensor of shape \(sequences, length.*\), not list: torch\.t"),
            (Path("text.txt"), "not PosixPath"),
            (torch.ones(2, 5), r"must be integers of shape .*, not torch\.float32 \(2, 5\)"),
            (torch.ones(2, 5, dtype=torch.bool), r"not torch\.bool \(2, 5\)"),
            (torch.ones(5, dtype=torch.int64), r"not torch\.int64 \(5,\)"),
            (torch.tensor([[1, 64, 2]]), f"^token id 64 is not one of {LLAMA}"),
            (torch.tensor([[1, -1, 2]]), f"^token id -1 is not one of {LLAMA}"),
            (torch.ones(1, 65, dtype=torch.int64), "of 65 tokens are longer than the 64 positions"),
        ],
    )
    def test_what_it_cannot_read_is_named(self, entry, tokens, message):
        with pytest.raises(ArgumentError, match=message):
            ENTRIES[entry](tiny_model("llama"), tokens)

    @pytest.mark.parametrize(
        ("dtype", "recipe"),
        [(torch.uint8, "eigen-attention"), (torch.int16, "low-rank"), (torch.int32, "bits")],
    )
    def test_every_integer_is_an_id(self, dtype, recipe):
        model, tokens = tiny_model("llama"), tiny_tokens()
        assert perplexity(model, tokens.to(dtype)) == perplexity(model, tokens)
        found, expected = (
            compress(model, ids, recipe=short(recipe)) for ids in (tokens.to(dtype), tokens)
        )
        assert found == expected


def test_empty_text_is_refused(tokenizer):
    with pytest.raises(ArgumentError, match="the held-out part of text given is empty"):
        sample_tokens(source_of(" "), tokenizer, sequences=1, length=1, split="held-out")


@given(st.lists(st.text("ab é", max_size=20), min_size=5, max_size=40))
def test_txt_is_cut_at_the_last_line_of_the_first_four_fifths(tmp_path_factory, lines):
    text = "x\n" + "".join(line + "\n" for line in lines)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text, encoding="utf-8")
    source = open_text(str(path))
    parts = [list(source.documents(split)) for split in (None, "calibration", "held-out")]
    (whole,), (first,), (last,) = parts
    assert whole == first + last == text
    assert first.endswith("\n")
    assert len(first) <= round(0.8 * len(text)) <= len(first) + max(map(len, lines)) + 1


def test_txt_without_lines_is_split_too(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x" * 100, encoding="utf-8")
    source = open_text(str(path))
    assert [len(*source.documents(split)) for split in ("calibration", "held-out")] == [80, 20]


@given(st.lists(st.sampled_from(["", " ", "some", "more words"]), min_size=1, max_size=30))
def test_blank_documents_do_not_count(tmp_path_factory, texts):
    documents = ["first", *(f"{text}{i}" if text.strip() else text for i, text in enumerate(texts))]
    lines = [json.dumps({"text": document, "other": 1}) for document in documents]
    source = open_text(str(write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", lines)))
    everything = [document for document in documents if document.strip()]
    assert list(source.documents(None)) == everything
    assert list(source.documents("held-out")) == everything[4::5]
    calibration_part = [d for i, d in enumerate(everything) if i % 5 != 4]
    assert list(source.documents("calibration")) == calibration_part


@pytest.mark.parametrize(
    "line",
    [
        *("{broken", '{"body": "x"}', "[1]", "3"),
        pytest.param("[" * 200_000, id="brackets"),
        pytest.param(f'{{"text": {"1" * 5000}}}', id="digits"),
    ],
)
def test_line_without_text_is_named(tmp_path, line):
    path = write_jsonl(tmp_path / "text.jsonl", ['{"text": "fine"}', line])
    with pytest.raises(ArgumentError, match=r"text\.jsonl, line 2: no JSON with a 'text' field"):
        list(open_text(str(path)).documents(None))


@pytest.mark.parametrize(("half", "named"), [("\\ud800", "ud800"), ("a\\uDFFFb", "udfff")])
def test_half_a_character_is_named(tmp_path, half, named):
    path = write_jsonl(tmp_path / "text.jsonl", ['{"text": "fine \\ud83d\\ude00"}'])
    assert list(open_text(str(path)).documents(None)) == ["fine \U0001f600"]
    write_jsonl(path, ['{"text": "fine"}', f'{{"text": "{half}"}}'])
    with pytest.raises(
        ArgumentError, match=rf"text\.jsonl, line 2: 'text' holds \\{named}, half of"
    ):
        list(open_text(str(path)).documents(None))


def test_text_that_is_no_string_is_named(tmp_path):
    path = write_jsonl(tmp_path / "text.jsonl", ['{"text": 3}'])
    with pytest.raises(ArgumentError, match="line 1: 'text' is not a string"):
        list(open_text(str(path)).documents(None))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_unreadable_files_are_refused_at_once(tmp_path, suffix):
    missing, empty, binary = (
        tmp_path / f"{name}{suffix}" for name in ("missing", "empty", "binary")
    )
    empty.write_text("\n \n", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\x00 text")
    with pytest.raises(ArgumentError, match=f"cannot read text .*missing{suffix}: No such file"):
        open_text(str(missing))
    with pytest.raises(ArgumentError, match=f"empty{suffix} is empty"):
        open_text(str(empty))
    with pytest.raises(ArgumentError, match=f"binary{suffix}: not UTF-8"):
        open_text(str(binary))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_bytes_that_are_no_text_are_named_however_late_they_come(tmp_path, suffix):
    path = tmp_path / f"late{suffix}"
    path.write_bytes(b'{"text": "a"}\n' * 20_000 + b"\xff")
    source = open_text(str(path))
    with pytest.raises(ArgumentError, match=f"cannot read text .*late{suffix}: not UTF-8"):
        list(source.documents(None))


@pytest.mark.parametrize("suffix", ["", ".txt", ".jsonl"])
def test_a_folder_is_refused(tmp_path, suffix):
    folder = tmp_path / f"folder{suffix}"
    folder.mkdir()
    with pytest.raises(ArgumentError, match=f"folder{suffix}"):
        open_text(str(folder))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "text.pdf"
    path.touch()
    with pytest.raises(ArgumentError, match=r"neither a \.txt nor a \.jsonl"):
        open_text(str(path))


def test_named_sources_are_read(monkeypatch):
    monkeypatch.setattr(sources, "read_docstrings", lambda split: iter([f"docs {split}"]))
    monkeypatch.setattr(sources, "read_pydoc_topics", lambda: iter(["topic"]))
    assert list(open_text("docstrings").documents("held-out")) == ["docs held-out"]
    assert list(open_text("pydoc-topics").documents(None)) == ["topic"]


@pytest.fixture
def hub(monkeypatch):
    """Let the Hub answer with rows; returns the list of what it was asked for."""
    requests = []

    def answer(rows):
        def load_dataset(path, config, *, split, streaming):
            assert streaming
            requests.append((path, config, split))
            if isinstance(rows, Exception):
                raise rows
            return rows

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return requests

    return answer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/named:config", ("owner/named", "config", "train")),
        ("allenai/c4:en:validation", ("allenai/c4", "en", "validation")),
        ("owner/plain", ("owner/plain", None, "train")),
    ],
)
def test_hub_names_are_read_as_streams_and_not_before(hub, name, expected):
    requests = hub([{"text": "first"}, {"text": ""}, {"text": "second"}])
    source = open_text(name)
    assert not requests
    assert list(source.documents(None)) == ["first", "second"]
    assert requests == [expected]


def test_lines_of_wikitext_are_one_text(hub):
    hub([{"text": line} for line in ["= Title =", "", "A line.", "Another.", "Held out."]])
    source = open_text("wikitext:wikitext-2-raw-v1:test")
    whole = "= Title =\n\n\n\nA line.\n\nAnother.\n\nHeld out."
    assert list(source.documents(None)) == [whole]
    calibration, held_out = (next(source.documents(s)) for s in ("calibration", "held-out"))
    assert calibration + held_out == whole
    assert held_out == "Held out."


def test_hub_rows_are_read_no_further_than_needed(hub, tokenizer):
    rows = iter([{"text": "1 2 3"}] * 10)
    hub(rows)
    sample_tokens(open_text("owner/name"), tokenizer, sequences=2, length=4)
    assert len(list(rows)) == 8


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (OSError(), "cannot read data set owner/name from the Hub: OSError; a text is"),
        (ConnectionError("no route\nat all"), "from the Hub: no route; a text is"),
        (ValueError("no config"), "from the Hub: no config; a text is"),
        ([{"body": "x"}], "^data set owner/name has no column 'text'$"),
    ],
)
def test_hub_out_of_reach_and_data_without_text_are_one_line(hub, rows, message):
    hub(rows)
    with pytest.raises(ArgumentError, match=message) as caught:
        list(open_text("owner/name").documents(None))
    assert "\n" not in str(caught.value)
