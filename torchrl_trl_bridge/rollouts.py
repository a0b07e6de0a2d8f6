"""Reading a batch of rollouts, whatever TorchRL made of it: dense, lazily stacked, ragged, tensor classes, tensors.

A batch is read once into columns. Dense data stays one tensor a column; what is ragged or not a tensor becomes a list
with one value a row. Nothing is stacked, padded or copied here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_trl_bridge.compat.tensordict import (
    is_container,
    is_metadata,
    is_non_tensor_leaf,
    plain_value,
    stacked_rows,
)
from torchrl_trl_bridge.messages import history_to_messages, is_history

Path = tuple[str, ...]

VALUE: Path = ("value",)
"""Where the rows of a buffer without keys go: TorchRL's own word for what a storage holds."""


class FreshRows(Sequence[torch.Tensor]):
    """Rows that are the parts of one flat tensor which was made for this batch: there is no need to copy them again."""

    def __init__(self, flat: torch.Tensor, lengths: list[int]) -> None:
        self.flat = flat
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[torch.Tensor]:
        # Cut when they are asked for: 100,000 tensors weigh 40 MiB, whatever is in them.
        return iter(self.flat.split_with_sizes(self.lengths))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> list[torch.Tensor]:
        # What keeps a copy, such as the state of a stream, knows numbers, strings, lists and tensors.
        return [row.clone() for row in self]


@dataclass
class Column:
    """The values of one leaf for all rows of a batch.

    ``values`` is a tensor whose first dimension runs over the rows, or a list with one value a row, None where a row
    holds nothing. ``metadata`` marks values that belong to the batch, not to a row.
    """

    values: torch.Tensor | list[Any] | FreshRows
    metadata: bool = False


@dataclass
class Wanted:
    """Which leaves to read: all of them, or those on and below some paths."""

    everything: bool
    below: dict[str, Wanted]

    @classmethod
    def paths(cls, paths: Iterable[Path] | None) -> Wanted:
        root = cls(everything=paths is None, below={})
        for path in paths or ():
            node = root
            for name in path:
                node = node.below.setdefault(name, cls(everything=False, below={}))
            node.everything = True
        return root

    def __contains__(self, name: str) -> bool:
        return self.everything or name in self.below

    def __getitem__(self, name: str) -> Wanted:
        return self if self.everything else self.below[name]


def read_columns(batch: Any, paths: Iterable[Path] | None = None) -> dict[Path, Column]:
    """Reads the leaves of a batch.

    Args:
        batch: what a replay buffer samples: a tensordict or tensor class (dense or lazily stacked), a tensor, a pytree
            of tensors, or a list of rows. Its first batch dimension runs over the rows.
        paths: read only these leaves, and all leaves below them. None reads everything.

    Returns:
        A column for each leaf, by path. ``History`` is a leaf: its values are lists of messages. A leaf that is None in
        every row has no column. A batch without keys has the one column ``("value",)``.

    Raises:
        ValueError: if a key holds leaves in some rows and a tensordict in others.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> rows = [TensorDict({"tokens": {"full": torch.arange(n)}, "query": "hi"}) for n in (2, 3)]
        >>> read_columns(lazy_stack(rows), [("tokens", "full")])
        {('tokens', 'full'): Column(values=[tensor([0, 1]), tensor([0, 1, 2])], metadata=False)}
    """
    columns: dict[Path, Column] = {}
    _read_batch(batch, (), Wanted.paths(paths), columns)
    return columns


def _read_batch(batch: Any, path: Path, wanted: Wanted, columns: dict[Path, Column]) -> None:
    """Reads a batch whose first dimension runs over the rows."""
    if is_history(batch):
        columns[path or VALUE] = Column([_conversation(row) for row in stacked_rows(batch) or batch.unbind(0)])
    elif is_container(batch):
        rows = stacked_rows(batch)
        if rows is None and hasattr(batch, "tensordicts"):  # stacked along another dimension
            rows = batch.unbind(0)
        if rows is not None:
            _read_rows(rows, path, wanted, columns)
        else:
            _read_items(batch.items(), path, wanted, columns)
    elif is_non_tensor_leaf(batch):
        values = _rows_of_leaf(batch)
        if _holds_anything(values):
            columns[path or VALUE] = Column(values, metadata=is_metadata(batch))
    elif isinstance(batch, torch.Tensor):
        columns[path or VALUE] = Column(batch)
    elif isinstance(batch, Mapping):
        _read_items(batch.items(), path, wanted, columns)
    elif isinstance(batch, tuple):  # a pytree; a list, by contrast, is one of rows
        _read_items(((str(i), item) for i, item in enumerate(batch)), path, wanted, columns)
    elif isinstance(batch, list) and any(_has_keys(row) for row in batch):
        _read_rows(batch, path, wanted, columns)
    elif isinstance(batch, list):
        _read_field(batch, path or VALUE, wanted, columns)
    else:
        columns[path or VALUE] = Column(list(batch))


def _read_items(items: Iterable[tuple[Any, Any]], path: Path, wanted: Wanted, columns: dict[Path, Column]) -> None:
    for key, value in items:
        name = str(key)
        if name in wanted and value is not None:
            _read_batch(value, (*path, name), wanted[name], columns)


def _rows_of_leaf(leaf: Any) -> list[Any]:
    value = plain_value(leaf)
    return [value] * leaf.batch_size[0] if is_metadata(leaf) else value


def _read_rows(rows: list[Any], path: Path, wanted: Wanted, columns: dict[Path, Column]) -> None:
    """Reads a batch given as rows, which may differ in their keys."""
    fields: dict[Any, list[Any] | None] = {}  # None: not wanted
    for i, row in enumerate(rows):
        for key, value in _items_of_row(row) if row is not None else ():
            if key not in fields:
                fields[key] = [None] * len(rows) if str(key) in wanted else None
            column = fields[key]
            if column is not None:
                column[i] = value
    for key, values in fields.items():
        if values is not None:
            _read_field(values, (*path, str(key)), wanted[str(key)], columns)


def _has_keys(row: Any) -> bool:
    return isinstance(row, Mapping) or (is_container(row) and not is_history(row))


def _items_of_row(row: Any) -> Iterable[tuple[Any, Any]]:
    if type(row) is TensorDict or getattr(row, "tensordicts", None) is None:
        return row.items()  # type: ignore[no-any-return]
    # A row of several steps, ragged among themselves: read it as a batch of steps, one list (or tensor) a leaf.
    return _nest((leaf, column.values) for leaf, column in read_columns(row).items()).items()


def _nest(leaves: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in leaves:
        node = nested
        for name in path[:-1]:
            node = node.setdefault(name, _Nested())
        node[path[-1]] = value
    return nested


class _Nested(dict[str, Any]):
    """Leaves of a row of several steps. Unlike a dict that a user stored, it is not a value."""


def _read_field(values: list[Any], path: Path, wanted: Wanted, columns: dict[Path, Column]) -> None:
    """Reads the values that the rows of a batch hold under one key."""
    if set(map(type, values)) == {torch.Tensor}:  # the usual case, at a tenth of the cost of the questions below
        columns[path] = Column(values)
        return
    first = next((value for value in values if value is not None), None)
    if first is None:
        return
    nested = _is_nested(first)
    if any(value is not None and _is_nested(value) != nested for value in values):
        raise ValueError(
            f"{'.'.join(path)!r} holds a tensordict in some rows and a leaf in others. "
            "Write rows of one kind under a key, or leave the key out with keys=[...]."
        )
    if nested:
        _read_rows(values, path, wanted, columns)
    elif any(map(is_history, {type(value): value for value in values}.values())):
        columns[path] = Column([_messages(value) for value in values])
    elif any(is_non_tensor_leaf(value) for value in values):
        plain = [plain_value(value) if is_non_tensor_leaf(value) else value for value in values]
        if _holds_anything(plain):
            columns[path] = Column(plain, metadata=is_metadata(first))
    else:
        columns[path] = Column(values)


def _holds_anything(values: list[Any]) -> bool:
    return not values or any(value is not None for value in values)


def _messages(value: Any) -> Any:
    """A conversation, which other rows may hold as plain messages."""
    if is_history(value):
        return _conversation(value)
    return plain_value(value) if is_non_tensor_leaf(value) else value


def _conversation(history: Any) -> Any:
    messages = history_to_messages(history)
    return [messages] if isinstance(messages, dict) else messages  # a turn that stands alone


def _is_nested(value: Any) -> bool:
    return isinstance(value, _Nested) or (is_container(value) and not is_history(value))
