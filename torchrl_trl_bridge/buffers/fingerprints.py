"""What must not differ between the datasets of the ranks of one run, and where it does."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from torchrl_trl_bridge.buffers.flattening import flat_name
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.rollouts import read_columns

COMPARED_ROWS = 8
"""How many rows of a buffer, spread over it, are compared."""


def describe(replay_buffer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """What a rank's dataset is made of: its settings, its buffer's place or size, and digests of some rows."""
    place = compat.place(replay_buffer)
    rows = compat.row_count(replay_buffer)
    digests: dict[int, dict[str, str]] = {}
    if place is None and rows:
        indices = torch.linspace(0, rows - 1, min(rows, COMPARED_ROWS)).long().tolist()
        for index, row in zip(indices, compat.stored_rows(replay_buffer, indices), strict=False):
            columns = read_columns([row])
            digests[index] = {flat_name(path): _digest(column.values[0]) for path, column in columns.items()}
    return {"settings": settings, "place": place, "rows": rows, "digests": digests}


def difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str | None:
    """Where the dataset of a rank differs from that of rank 0, in words; None where it does not.

    A buffer without rows does not differ from any: only rank 0's is read. Buffers at one place, a Ray actor or the same
    files, are one.
    """
    for name, value in first["settings"].items():
        theirs = other["settings"].get(name)
        if theirs != value:
            return f"{name} is {value!r} on rank 0 and {theirs!r} on rank {rank}"
    if not other["rows"] or (first["place"] is not None and first["place"] == other["place"]):
        return None
    if first["rows"] != other["rows"]:
        return f"the replay buffer holds {first['rows']} rows on rank 0 and {other['rows']} on rank {rank}"
    for index, digests in first["digests"].items():
        theirs = other["digests"].get(index, {})
        for name in [*digests, *theirs]:
            if digests.get(name) != theirs.get(name):
                return f"row {index} of the replay buffer holds another {name!r} on rank {rank} than on rank 0"
    return None


def _digest(value: Any) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (list, tuple)):
        hasher.update(f"[{len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, dict):
        hasher.update(f"{{{len(value)}".encode())
        for key, item in value.items():
            hasher.update(repr(key).encode())
            _feed(hasher, item)
    elif isinstance(value, (str, int, float, bool, bytes, type(None))):
        hasher.update(repr(value).encode())
    else:  # the repr of other objects may hold their address
        hasher.update(type(value).__qualname__.encode())
