"""Plans of the reference model, made once."""

import json
from pathlib import Path

import pytest
import torch

from manifoldkv import compress, load_model
from tests.cli.running import EIGHT, FEW, MODEL, Done, run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Half the cache by recipe eigen-attention: its folder, and what the command said."""
    folder = tmp_path_factory.mktemp("cli") / "plan"
    done = run("compress", MODEL, "--recipe", "eigen-attention", "--out", folder, *FEW)
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture(scope="session")
def plan(made: tuple[Path, Done]) -> Path:
    return made[0]


@pytest.fixture(scope="session")
def best(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A fifth of the cache by the default recipe: its folder, and what the command said."""
    folder = tmp_path_factory.mktemp("cli") / "best"
    done = run("compress", MODEL, "--ratio", 0.2, "--out", folder, *EIGHT)
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of recipe stored."""
    folder = tmp_path_factory.mktemp("cli") / "stored"
    tokens = torch.randint(1, 4000, (4, 64), generator=torch.Generator().manual_seed(0))
    model, _ = load_model(MODEL)
    compress(model, tokens, recipe="stored", ratio=0.25, context=400).save(folder)
    return folder


@pytest.fixture
def short_model(tmp_path: Path) -> Path:
    """The reference model with 40 positions; plans of the one fit the other."""
    folder = tmp_path / "short"
    folder.mkdir()
    for path in Path(MODEL).iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 40}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
