"""The docstrings text source."""

import subprocess
import sys
from itertools import islice

import pytest

from manifoldkv import docstrings
from manifoldkv.docstrings import (
    MINIMUM_CHARACTERS,
    read_docstrings,
    read_pydoc_topics,
    split_of,
)

LONG = "Words about {} that go on. " + "And so on without an end. " * 10


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of 300 functions in three files, with a copy, a test folder and broken source."""

    def function(i):
        return f'def f{i}():\n    """{LONG.format(i)}"""\n'

    for part in range(3):
        source = "".join(function(i) for i in range(100 * part, 100 * part + 100))
        (tmp_path / f"part{part}.py").write_text(source, encoding="utf-8")
    (tmp_path / "copy.py").write_text(function(7), encoding="utf-8")
    (tmp_path / "short.py").write_text('"""Too short."""', encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (", encoding="utf-8")
    (tmp_path / "raises.py").write_text(f'"""{LONG.format("boom")}"""\n1 / 0', encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.py").write_text(function(999), encoding="utf-8")
    monkeypatch.setattr(docstrings, "_roots", lambda: [("package", tmp_path)])
    return tmp_path


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


def test_split_depends_on_words_alone():
    document = LONG.format("x")
    splits = {
        split_of(document),
        split_of(document.replace(" ", "\n   ")),
        split_of(document + " "),
    }
    assert len(splits) == 1


def test_other_files_do_not_move_a_document(package):
    before = {document: split_of(document) for document in read_docstrings()}
    (package / "part1.py").unlink()
    (package / "new.py").write_text(f'"""{LONG.format("new")}"""', encoding="utf-8")
    held_out = set(read_docstrings("held-out"))
    for document in set(read_docstrings()) & set(before):
        assert (document in held_out) == (before[document] == "held-out")


def test_order_is_fixed(package):
    assert list(read_docstrings()) == list(read_docstrings())


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
    assert not any("pydoc_data" in path.parts for path in docstrings._source_files())
