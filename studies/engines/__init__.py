"""Engines that `serving` drives: each on an original checkpoint and on an exported one."""
