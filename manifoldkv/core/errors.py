"""Exceptions that manifoldkv raises on purpose.

Each is also a builtin exception, and is one line that names the value and the fix.
"""


class ManifoldKVError(Exception):
    """Base class of all exceptions of the package."""


class ArgumentError(ManifoldKVError, ValueError):
    """An argument, a name or a text cannot be used."""


class ModelError(ManifoldKVError, ValueError):
    """A model cannot be loaded, or its attention is not supported."""


class PlanError(ManifoldKVError, ValueError):
    """A compression plan is damaged, impossible, or made for another model."""


class CacheError(ManifoldKVError, ValueError):
    """A cache, in memory or stored, is damaged, foreign, or asked for an impossible operation."""


class CodecError(CacheError):
    """A stored cache is damaged, foreign, or of another format."""


class RunError(ManifoldKVError, RuntimeError):
    """A run cannot go on: a result cannot be written, a loss is not finite, a task is lost."""


def first_line(error: Exception) -> str:
    """Return the first line of the message of another library, or the name of its exception."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
