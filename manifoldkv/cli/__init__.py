"""The command ``manifoldkv``."""

from manifoldkv.cli.process import main

__all__ = ["main"]
