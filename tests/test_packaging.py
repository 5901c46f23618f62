"""What `pip install manifoldkv` would bring."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from manifoldkv import CompressionPlan

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "studies" / "reference_models" / "reference-llama"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a sdist, made from a copy so that nothing is left behind."""
    folder = tmp_path_factory.mktemp("built")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    source = folder / "source"
    for name in filter(None, tracked.stdout.decode().split("\0")):
        if name.startswith(("manifoldkv/", "studies/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-W", "ignore", "-m", "build", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", folder, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def names_in_wheel(built: Path) -> list[str]:
    (wheel,) = built.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = names_in_wheel(built)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"manifoldkv"}
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "manifoldkv").rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".md", ".typed")
    }
    assert {name for name in names if "dist-info" not in name} == expected
    (wheel,) = built.glob("*.whl")
    assert wheel.stat().st_size < 500_000


def test_the_source_archive_holds_no_models(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    assert not [name for name in names if name.endswith(".safetensors")]
    assert any(name.endswith("manifoldkv/py.typed") for name in names)


def test_the_installed_wheel_compresses_a_model(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # what pip does with a wheel of pure Python
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from manifoldkv.cli import main; main()"

    def manifoldkv(*arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, "-I", "-c", code, *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "compress" in manifoldkv("--help")
    few = ("--sequences", 2, "--length", 32, "--recipe", "eigen-attention")
    said = manifoldkv("compress", MODEL, *few, "--out", "plan")
    assert "ratio 0.5" in said
    assert CompressionPlan.load(tmp_path / "plan").ratio == 0.5
    few = few[:4]
    manifoldkv("report", MODEL, *few, "--plan", "plan", "--out", "r.html")
    assert "Perplexity" in (tmp_path / "r.html").read_text(encoding="utf-8")
