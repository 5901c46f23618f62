"""Everything manifoldkv raises on purpose."""


class ManifoldKVError(Exception):
    """Base class: one clear line that names the value and the way out."""


class TextError(ManifoldKVError):
    """A text source is missing, unreadable, empty or too short."""


class ModelError(ManifoldKVError):
    """A model cannot be loaded."""


class UnsupportedModelError(ModelError):
    """A model loads but has an attention that cannot be compressed."""


class RankError(ManifoldKVError):
    """A rank, rank ratio or head grouping does not fit the model."""


class UnknownNameError(ManifoldKVError):
    """No objective or solver is registered under this name."""


class UnsolvableError(ManifoldKVError):
    """A solver cannot solve the problem of an objective."""


class DivergenceError(ManifoldKVError):
    """A solve met a loss that is not finite."""


class OutputError(ManifoldKVError):
    """A result cannot be written."""


class SeedError(ManifoldKVError):
    """A seed is not an integer of 64 bits."""


class PlanError(ManifoldKVError):
    """A compression plan is damaged, impossible, or made for another model."""


class CacheError(ManifoldKVError):
    """A cache is used where it does not belong, or asked for what it cannot do."""


class CodecError(ManifoldKVError):
    """A stored cache is damaged or foreign, or a cache cannot be stored."""


class ExecutorError(ManifoldKVError):
    """Tasks cannot be run where they were to be run."""
