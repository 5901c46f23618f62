"""`train_codebooks.py` as a user runs it, on few samples."""

from pathlib import Path

from safetensors.torch import load_file

from manifoldkv.coding.trellis import GAUSSIAN_DISTORTION, codebooks
from tests.studies.running import finished


def test_codebooks_are_written_and_those_of_the_package_are_no_worse(tmp_path: Path) -> None:
    out = tmp_path / "codebooks.safetensors"
    few = ("--samples", 4096, "--steps", 2, "--starts", 1)
    done = finished("train_codebooks", *few, "--out", out)
    found = load_file(out)["codebooks"]
    assert found.shape == codebooks().shape
    assert found[1:].any(dim=1).all()
    lines = [line for line in done.out.splitlines() if "distortion" in line]
    distortions = [float(line.split()[-1]) for line in lines]
    assert len(distortions) == 8
    for bits in range(1, 5):  # of more bits the few samples say too little
        assert distortions[bits - 1] > 0.95 * GAUSSIAN_DISTORTION[bits]
    assert distortions == sorted(distortions, reverse=True)
