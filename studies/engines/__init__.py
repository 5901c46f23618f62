"""Engines that studies start."""
