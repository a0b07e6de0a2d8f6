"""What TorchRL stored otherwise than the user meant, found before it is passed on as data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from torchrl_trl_bridge.buffers.flattening import flat_name
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.rollouts import Column, Path, read_columns

SCANNED_ROWS = 10_000
"""How many rows of a buffer are read to tell a column stored whole from a list that rows share."""


def check_stored_columns(replay_buffer: Any, columns: dict[Path, Column]) -> None:
    """Checks the Python values among the columns of a stream's first batch.

    Raises:
        ValueError: for a column of a storage that keeps the first row's value for all rows, and for one whose rows each
            hold the whole column.
    """
    python_valued = [path for path, column in columns.items() if _holds_python(column)]
    if not python_valued:
        return
    if compat.shares_strings_between_rows(replay_buffer):
        names = [flat_name(path) for path in python_valued]
        raise ValueError(
            f"columns {names} hold Python values in a LazyMemmapStorage, which keeps the first row's value for every "
            "row: the others are lost. Store such rows in a LazyStackStorage, ListStorage or LazyTensorStorage, or "
            "leave these columns out with keys=[...]."
        )
    for path in python_valued:
        if _rows_share_a_list(columns[path].values) and compat.run_beside(replay_buffer, _is_stored_whole, path):
            raise ValueError(
                f"each row of column {flat_name(path)!r} holds the whole column: it was written as "
                "NonTensorData(list, batch_size=[N]), which gives every row the same list. Write "
                "NonTensorStack(*list) instead, or the list itself, for one item a row; or a tuple, if each row is to "
                "hold all items."
            )


def _holds_python(column: Column) -> bool:
    values = column.values
    if isinstance(values, torch.Tensor) or column.metadata or set(map(type, values)) == {torch.Tensor}:
        return False
    return not all(value is None or isinstance(value, torch.Tensor) for value in values)


def _rows_share_a_list(values: Any) -> bool:
    shared = Counter(_content(value) for value in values if _may_be_a_column(value))
    return any(count > 1 for count in shared.values())


def _may_be_a_column(value: Any) -> bool:
    # Rows often share a list of dictionaries, such as tools. A tuple is meant for the row that holds it.
    return isinstance(value, list) and len(value) > 1 and not isinstance(value[0], dict)


def _content(value: Any) -> tuple[Any, ...]:
    # A few of its items: each of 5,000 rows may hold all 5,000 items.
    return len(value), *(repr(value[place * (len(value) - 1) // 7]) for place in range(8))


def _object(value: Any) -> tuple[Any, ...]:
    return len(value), id(value)


def _is_stored_whole(replay_buffer: Any, path: Path) -> bool:
    """Whether as many rows share one list as it has items. A storage that copies lists leaves but their content."""
    buffers = compat.members(replay_buffer)
    if buffers is not None:
        return any(_is_stored_whole(buffer, path) for buffer in buffers)
    rows = compat.read_rows(replay_buffer, torch.arange(min(len(replay_buffer), SCANNED_ROWS)))
    column = read_columns(rows, [path]).get(path)
    identity = _object if compat.keeps_objects(replay_buffer) else _content
    holders = Counter(identity(value) for value in (column.values if column else ()) if _may_be_a_column(value))
    # Of a column longer than the rows that are read, all rows that are read hold it.
    return any(count == min(length, SCANNED_ROWS) for (length, *_), count in holders.items())
