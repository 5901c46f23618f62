"""Assertions shared by suites."""

from __future__ import annotations

import json
from typing import Any

import torch

from manifoldkv.core.basis import Basis


def assert_describable(description: dict[str, Any]) -> None:
    """Fail unless a method's name and fields survive JSON, as a plan stores them."""
    assert isinstance(description["name"], str)
    assert list(json.loads(json.dumps(description))) == list(description)


def assert_orthonormal(basis: Basis, tolerance: float = 1e-8) -> None:
    """Fail unless the columns are orthonormal to `tolerance`."""
    columns = basis.down
    identity = torch.eye(columns.shape[-1], dtype=columns.dtype).expand_as(columns.mT @ columns)
    torch.testing.assert_close(columns.mT @ columns, identity, rtol=0, atol=tolerance)
