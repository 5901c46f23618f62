"""The files of a plan: safetensors and JSON, of which nothing is executed."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from manifoldkv.core.basis import Rotary
from manifoldkv.core.errors import ManifoldKVError, PlanError, RunError
from manifoldkv.core.files import write_together
from manifoldkv.core.modes import in_own_modes
from manifoldkv.plan.compute import AttentionShape
from manifoldkv.plan.formats.quantizer import LARGEST_INTEGER
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.provenance import Provenance
from manifoldkv.plan.site import SitePlan

FORMAT = 10
TENSORS = "plan.safetensors"
DESCRIPTION = "plan.json"
READS, PAUSE = 5, 0.05
"""How often files that do not belong together are read, and seconds between two readings."""
WRITES = 10
"""How often both files are written while other plans are written to the same folder."""


class _MixedError(PlanError):
    """The two files of a plan do not belong together."""


class PlanContents(NamedTuple):
    """The fields of a `CompressionPlan`."""

    layers: tuple[LayerPlan, ...]
    rotary: Rotary
    config_hash: str
    fingerprint: Tensor
    shape: AttentionShape
    provenance: Provenance
    sinks: int


def check_context(context: int) -> None:
    """Raise `PlanError` if a plan for a context could not be read again."""
    if not 1 <= context <= LARGEST_INTEGER:
        raise PlanError(
            f"a plan cannot be made for a context of {context:,} tokens, only for 1 to "
            f"{LARGEST_INTEGER:,}"
        )


def payload_of(contents: PlanContents) -> bytes:
    """Return all tensors of a plan as a safetensors file."""
    tensors: dict[str, Tensor] = {"fingerprint": contents.fingerprint.contiguous()}
    for index, layer in enumerate(contents.layers):
        for site, planned in layer.sites:
            for part, tensor in planned.tensors().items():
                tensors[f"layers.{index}.{site}.{part}"] = tensor.contiguous()
    return save_tensors(tensors)


def write(folder: str | Path, contents: PlanContents, summary: dict[str, Any]) -> None:
    """Write both files of a plan.

    Parameters
    ----------
    folder : str or Path
        Folder, created if it does not exist.
    contents : PlanContents
        Fields of the plan.
    summary : dict
        Further fields of the description, for its readers.

    Raises
    ------
    RunError
        If the folder cannot be written to.
    """
    if not str(folder):
        raise RunError("the name of the plan's folder is empty")
    payload = payload_of(contents)
    described = signed(summary | _description(contents, payload))
    description = json.dumps(described, indent=2, sort_keys=True) + "\n"
    try:
        _write_both(Path(folder), payload, description.encode())
    except OSError as error:
        raise RunError(f"cannot write plan to {folder}: {error.strerror}") from error


def signed(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a plan with the SHA-256 of all its other fields."""
    fields = {name: value for name, value in description.items() if name != "sha256"}
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return fields | {"sha256": hashlib.sha256(canonical.encode()).hexdigest()}


def _write_both(folder: Path, payload: bytes, description: bytes) -> None:
    """Write both files so that the last of several writers leaves a matching pair.

    Every writer replaces the tensors first. If the tensors are those of another writer once the
    description is written, the pair does not match, and both are written again.
    """
    tensors, described = folder / TENSORS, folder / DESCRIPTION
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(WRITES):
        write_together({tensors: payload, described: description})
        if tensors.read_bytes() == payload or described.read_bytes() != description:
            return
    raise RunError(f"cannot write plan to {folder}: others are written there at the same time")


@in_own_modes
def read(folder: str | Path) -> PlanContents:
    """Read the files of a plan. Nothing in them is executed.

    Files that do not belong together are read again, in case they are being replaced.

    Raises
    ------
    PlanError
        If a file is missing, truncated, damaged or edited, has the format of another version, or
        describes something impossible.
    """
    if not str(folder):
        raise PlanError("the name of the plan's folder is empty")
    for _ in range(READS - 1):
        with suppress(_MixedError):
            return _read_both(Path(folder))
        time.sleep(PAUSE)
    return _read_both(Path(folder))


def _read_both(folder: Path) -> PlanContents:
    payload = _read(folder / TENSORS)
    try:
        description = json.loads(_read(folder / DESCRIPTION), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{folder / DESCRIPTION} is damaged: {error}") from error
    try:
        tensors = load_tensors(payload)
    except SafetensorError as error:
        raise PlanError(f"{folder / TENSORS} is damaged: {error}") from error
    with named(folder):
        return _contents(description, tensors, payload)


@contextmanager
def named(folder: str | Path) -> Iterator[None]:
    """Name the folder in every error of the block."""
    folder = Path(folder)
    try:
        yield
    except PlanError as error:
        raise type(error)(f"plan {folder}: {error}") from error
    except (
        *(KeyError, TypeError, ValueError, AttributeError, RecursionError),
        ManifoldKVError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PlanError(f"{folder / DESCRIPTION} is damaged: {reason}") from error


def _description(contents: PlanContents, payload: bytes) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "tensors_sha256": hashlib.sha256(payload).hexdigest(),
        "config_hash": contents.config_hash,
        "rotary": contents.rotary,
        "sinks": contents.sinks,
        "attention": asdict(contents.shape),
        "provenance": asdict(contents.provenance),
        "layers": [layer_description(layer) for layer in contents.layers],
    }


def layer_description(layer: LayerPlan) -> dict[str, Any]:
    """Return all of a layer's plan that is no tensor."""
    sizes = {"kv_heads": layer.key.grouping.heads, "head_dim": layer.key.head_dim}
    sites = {site: planned.describe() for site, planned in layer.sites}
    return sizes | {"window": layer.window} | sites


def _contents(
    description: dict[str, Any], tensors: dict[str, Tensor], payload: bytes
) -> PlanContents:
    if description["format"] != FORMAT:
        raise PlanError(
            f"{DESCRIPTION} has format {description['format']!r}, this version of manifoldkv reads "
            f"format {FORMAT}: make the plan again"
        )
    if description["sha256"] != signed(description)["sha256"]:
        raise PlanError(
            f"{DESCRIPTION} was changed after it was saved: restore the file, or make the plan "
            "again"
        )
    if hashlib.sha256(payload).hexdigest() != description["tensors_sha256"]:
        raise _MixedError(
            f"{TENSORS} is not the file that {DESCRIPTION} describes: restore the file, or make "
            "the plan again"
        )
    if not isinstance(description["config_hash"], str):
        raise PlanError("config_hash is not a string")
    of_weights = tensors.pop("fingerprint")
    layers = tuple(
        _layer(layer, index, tensors) for index, layer in enumerate(description["layers"])
    )
    if tensors:
        raise PlanError(f"{TENSORS} holds {sorted(tensors)[0]}, which nothing refers to")
    return PlanContents(
        layers,
        description["rotary"],
        description["config_hash"],
        of_weights,
        _shape(description["attention"]),
        _provenance(description["provenance"]),
        _integer(description, "sinks"),
    )


def _provenance(fields: dict[str, Any]) -> Provenance:
    integers = ("sequences", "length", "context", "threads", "tuning_steps", "predicted_tokens")
    found = Provenance(**fields | {name: _integer(fields, name) for name in integers})
    for part in ("objective", "solver", "ranks"):
        found.method(part)
    for name in ("predicted_nats", "measured_nats", "measured_error"):
        number = getattr(found, name)
        if number is not None and not (isinstance(number, float) and math.isfinite(number)):
            raise PlanError(f"{name} {number!r} is no number")
    return found


def _shape(fields: dict[str, Any]) -> AttentionShape:
    return AttentionShape(_integer(fields, "query_heads"), _integer(fields, "rotary_dim"))


def _integer(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int or not 0 <= value <= LARGEST_INTEGER:
        raise PlanError(f"{name} {value!r} is not an integer between 0 and {LARGEST_INTEGER}")
    return value


def _layer(description: dict[str, Any], index: int, tensors: dict[str, Tensor]) -> LayerPlan:
    """Return the plan of a layer, and take its tensors out of `tensors`."""
    name = f"layer {index}"
    heads = _integer(description, "kv_heads")
    window = None if description["window"] is None else _integer(description, "window")
    sites = []
    for site in ("key", "value"):
        prefix = f"layers.{index}.{site}."
        names = [full for full in tensors if full.startswith(prefix)]
        own = {full.removeprefix(prefix): tensors.pop(full) for full in names}
        sites.append(SitePlan.of_parts(description[site], own, heads))
        if own:
            raise PlanError(f"{TENSORS} holds {prefix}{sorted(own)[0]}, which nothing refers to")
    layer = LayerPlan(sites[0], sites[1], window)
    layer.check(name)
    if layer_description(layer) != description:
        raise PlanError(f"{name}: {DESCRIPTION} does not describe the tensors in {TENSORS}")
    return layer


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, refused if a key appears twice: readers differ in which one counts."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r} appears twice")
        found[name] = value
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
