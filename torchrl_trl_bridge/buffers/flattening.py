"""Leaves of a tensordict → flat names and plain values."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from torchrl_trl_bridge.compat.tensordict import is_container
from torchrl_trl_bridge.rollouts import Path, read_columns

_IMMUTABLE = (str, int, float, bool, type(None), bytes, complex)


def flat_name(path: Path) -> str:
    """The column name of a leaf: its keys joined by dots."""
    return ".".join(path)


class KeySelection:
    """The keys that a user named, against the leaves that a buffer holds.

    Args:
        keys: the keys as given: strings, tuples or lists of strings. A string with dots is taken as it stands when the
            buffer has a key of that name, else as the nested key that it spells. A key of a sub-tensordict means all
            leaves below it. None selects everything.
    """

    def __init__(self, keys: Sequence[Any] | None) -> None:
        if isinstance(keys, str):
            raise TypeError(f"keys must be a list of nested keys, got the string {keys!r}: write keys=[{keys!r}].")
        self.readings = None if keys is None else [_readings(key) for key in keys]

    @property
    def paths(self) -> list[Path] | None:
        """All paths that the keys could mean: what has to be read from a batch."""
        return None if self.readings is None else [path for readings in self.readings for path in readings]

    def select(self, leaves: Iterable[Path]) -> list[Path]:
        """The leaves that the keys mean, in the order of the keys."""
        leaves = list(leaves)
        if self.readings is None:
            return leaves
        return list(dict.fromkeys(leaf for readings in self.readings for leaf in _meant(readings, leaves)))

    def missing(self, leaves: Iterable[Path]) -> list[Path]:
        """The keys that mean none of the leaves."""
        leaves = list(leaves)
        return [readings[0] for readings in self.readings or () if not _meant(readings, leaves)]


def _meant(readings: list[Path], leaves: list[Path]) -> list[Path]:
    for path in readings:
        below = [leaf for leaf in leaves if leaf[: len(path)] == path]
        if below:
            return below
    return []


def _readings(key: Any) -> list[Path]:
    if isinstance(key, str):
        return [(key,)] if "." not in key else [(key,), tuple(key.split("."))]
    if isinstance(key, (tuple, list)) and key and all(isinstance(part, str) for part in key):
        return [tuple(key)]
    raise TypeError(f"a key must be a string or a tuple of strings, got {key!r}.")


def describe_missing(path: Path, leaves: Iterable[Path]) -> str:
    """What to tell a user whose key holds nothing: the available ones, close matches first."""
    name = flat_name(path)
    names = [flat_name(leaf) for leaf in leaves]
    close = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=0.6)
    ordered = close + [other for other in names if other not in close]
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"key {name!r} holds nothing in the sampled rows.{hint} Available keys: {ordered}."


def check_names(leaves: Iterable[Path]) -> None:
    """Raises ValueError where two leaves would get one column name."""
    seen: dict[str, Path] = {}
    for leaf in leaves:
        other = seen.setdefault(flat_name(leaf), leaf)
        if other != leaf:
            raise ValueError(
                f"keys {other!r} and {leaf!r} both flatten to the column {flat_name(leaf)!r}. "
                "Rename one of them in the buffer, or pick one with keys=[...], written as a tuple."
            )


def own(value: Any) -> Any:
    """A plain copy of a non-tensor value: what is done to it does not reach the buffer.

    Tuples become lists, NumPy scalars Python numbers, NumPy arrays tensors (lists, where they hold no numbers),
    tensordicts inside a value dicts.

    Raises:
        TypeError: for an object that cannot be copied.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, (list, tuple)):
        return [own(item) for item in value]
    if isinstance(value, dict):
        return {key: own(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biufc" else own(value.tolist())
    if is_container(value):
        return {flat_name(path): own(column.values[0]) for path, column in read_columns([value]).items()}
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise TypeError(f"a {kind.__name__} that cannot be copied ({error})") from error
