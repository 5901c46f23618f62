"""The docstrings text source."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.text import docstrings
from manifoldkv.text.docstrings import (
    MINIMUM_CHARACTERS,
    read_docstrings,
    read_pydoc_topics,
    split_of,
)

LONG = "Words about {} that go on. " + "And so on without an end. " * 10


def function(i):
    return f'def f{i}():\n    """{LONG.format(i)}"""\n'


def module(*subjects):
    return "".join(map(function, subjects)).encode()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write files (bytes) into an empty package, the only one there is; returns its folder."""

    def write(files, folder="package"):
        for name, content in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        monkeypatch.setattr(docstrings, "_roots", lambda: [("package", tmp_path / folder)])
        return tmp_path / folder

    return write


@pytest.fixture
def package(source):
    """A package of 300 functions in three files, with a copy, a test folder and broken source."""
    files = {f"part{part}.py": module(*range(100 * part, 100 * part + 100)) for part in range(3)}
    raises = f'"""{LONG.format("boom")}"""\n1 / 0'.encode()
    files |= {"copy.py": module(7), "short.py": b'"""Too short."""', "raises.py": raises}
    return source(files | {"broken.py": b"def (", "tests/test.py": module(999)})


def test_every_docstring_is_read_once_and_nothing_is_run(package):
    documents = list(read_docstrings())
    assert len(documents) == len(set(documents)) == 301
    assert not any("999" in document for document in documents)
    assert all(len(document) >= MINIMUM_CHARACTERS for document in documents)


def test_splits_are_disjoint_and_a_fifth_is_held_out(package):
    calibration = set(read_docstrings("calibration"))
    held_out = set(read_docstrings("held-out"))
    assert not calibration & held_out
    assert calibration | held_out == set(read_docstrings())
    assert 0.1 < len(held_out) / 301 < 0.3


@given(st.lists(st.text(min_size=1).filter(str.split), min_size=1, max_size=8), st.data())
def test_white_space_never_moves_a_document(words, data):
    space = st.text(" \n\t", min_size=1, max_size=4)
    assert split_of("".join(word + data.draw(space) for word in words)) == split_of(" ".join(words))


def test_every_word_can_move_a_document():
    assert {split_of(f"{LONG} {word}") for word in range(100)} == {"calibration", "held-out"}


def test_other_files_do_not_move_a_document(package):
    before = {document: split_of(document) for document in read_docstrings()}
    (package / "part1.py").unlink()
    (package / "new.py").write_text(f'"""{LONG.format("new")}"""', encoding="utf-8")
    held_out = set(read_docstrings("held-out"))
    for document in set(read_docstrings()) & set(before):
        assert (document in held_out) == (before[document] == "held-out")


def test_order_is_not_that_of_the_file_system(package, monkeypatch):
    expected, listed = list(read_docstrings()), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *asked: reversed(list(listed(*asked))))
    assert list(read_docstrings()) == expected


def test_order_does_not_depend_on_where_a_package_lies(source):
    files = {f"sub{i % 3}/module{i}.py": module(2 * i, 2 * i + 1) for i in range(40)}
    source(files, "tests/here")  # a folder that is skipped inside a package may lie above it
    here = list(read_docstrings())
    source(files, "elsewhere")
    assert list(read_docstrings()) == here
    assert len(here) == 80
    assert here != sorted(here)


def test_few_files_are_parsed_for_little_text(source, monkeypatch):
    source({f"module{i}.py": module(3 * i, 3 * i + 1, 3 * i + 2) for i in range(40)})
    parsed = []
    parse = docstrings._documents
    monkeypatch.setattr(docstrings, "_documents", lambda path: parsed.append(path) or parse(path))
    assert len(list(islice(read_docstrings(), 7))) == 7
    assert len(parsed) == 3


def test_modules_classes_methods_and_inner_functions_are_read_and_other_strings_are_not(source):
    first, second, third, fourth, other = (f'"""{LONG.format(i)}"""' for i in range(5))
    lines = [
        first,
        "class A:",
        f"    {second}",
        "    def method(self):",
        f"        {third}",
        "        async def inner():",
        f"            {fourth}",
        f"text = {other}",
    ]
    source({"__init__.py": "\n".join(lines).encode()})
    assert sorted(read_docstrings()) == [LONG.format(i) for i in range(4)]


def test_a_copy_with_another_indentation_is_a_copy(source):
    copy = module("x").replace(b" that go", b"\n        that go")
    source({"a.py": module("x"), "b.py": copy})
    assert copy != module("x")
    assert len(list(read_docstrings())) == 1


@pytest.mark.parametrize(("missing", "documents"), [(0, 1), (1, 0)])
def test_shortest_document_has_the_minimum_of_characters(source, missing, documents):
    text = "x" * (MINIMUM_CHARACTERS - missing)
    source({"a.py": f'"""\n    {text}\n    """'.encode()})
    assert list(read_docstrings()) == [text] * documents


@pytest.mark.parametrize(
    "content",
    [b"def (", b'"""\xff\xfe"""', b"\0"],
    ids=["syntax error", "not UTF-8", "null byte"],
)
def test_files_that_cannot_be_parsed_are_passed_over(source, content):
    source({"good.py": module("x"), "odd.py": content})
    assert len(list(read_docstrings())) == 1


def test_invalid_escapes_are_read_in_silence(source):
    source({"odd.py": module("x") + b'"\\d"\n'})
    assert len(list(read_docstrings())) == 1


@pytest.mark.parametrize("folder", ["tests", "a/test", "site-packages/a", "pydoc_data", "idlelib"])
def test_tests_and_other_packages_inside_are_skipped(source, folder):
    source({"a.py": module("x"), f"{folder}/b.py": module("y")})
    assert len(list(read_docstrings())) == 1


def test_installed_packages_are_a_mixture_from_the_start():
    text = "\n".join(islice(read_docstrings(), 400))
    for word in ("tensor", "array", "Parameters"):
        assert word in text


def test_reading_imports_nothing():
    program = (
        "import sys; from itertools import islice;"
        "import importlib.util as u;"
        "spec = u.spec_from_file_location('d', sys.argv[1]); d = u.module_from_spec(spec);"
        "spec.loader.exec_module(d); list(islice(d.read_docstrings(), 50));"
        "print(sorted({'numpy', 'scipy', 'torch', 'sympy', 'pandas'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, docstrings.__file__]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_pydoc_topics_are_prose_outside_the_docstrings():
    topics = list(read_pydoc_topics())
    assert len(topics) > 50
    assert sum(map(len, topics)) > 300_000
    assert not any(
        "pydoc_data" in path.parts for path in docstrings._source_files(tuple(docstrings._roots()))
    )


@pytest.mark.slow
def test_no_pydoc_topic_is_a_docstring_of_the_standard_library(monkeypatch):
    standard_library = next(iter(docstrings._roots()))
    monkeypatch.setattr(docstrings, "_roots", lambda: [standard_library])
    words = {" ".join(document.split()) for document in read_docstrings()}
    assert len(words) > 1000
    assert words.isdisjoint(" ".join(topic.split()) for topic in read_pydoc_topics())
