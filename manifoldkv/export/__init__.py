"""Plans multiplied into weights: plain checkpoints with a smaller cache."""

from manifoldkv.export.checkpoint import Exported, export_checkpoint

__all__ = ["Exported", "export_checkpoint"]
