"""Checkpoints, executors and files of long runs."""
