"""The reference models of this repository, by the names studies give them."""

from pathlib import Path

EMBEDDED = {
    name: str(Path(__file__).resolve().parent / "reference_models" / name)
    for name in ("reference-llama", "reference-qwen3")
}
