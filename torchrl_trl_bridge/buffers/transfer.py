"""Columns of a batch → rows: copied once, moved to a device once, a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from torchrl_trl_bridge.buffers.flattening import own
from torchrl_trl_bridge.rollouts import Column, FreshRows

_DTYPE, _DEVICE, _NDIM = attrgetter("dtype"), attrgetter("device"), attrgetter("ndim")


def to_rows(
    columns: dict[str, Column], *, device: torch.device | None, scalars: bool = False, copy: bool = False
) -> list[dict[str, Any]]:
    """Turns the columns of one batch into rows that share nothing with the buffer.

    Args:
        columns: the columns by name.
        device: where tensors go; None leaves them where they are. One transfer a column.
        scalars: give 0-d tensors as Python numbers and booleans.
        copy: also copy dense columns, which the buffer made for this batch.

    Returns:
        One dict a row. Tensors of a column are views of one tensor made for this batch.

    Raises:
        TypeError: for a value that cannot be copied; it names the column.
    """
    values = []
    for name, column in columns.items():
        try:
            values.append(_row_values(column.values, device, scalars, copy))
        except TypeError as error:
            raise TypeError(f"column {name!r} holds {error}: leave it out with keys=[...].") from error
    if not values:
        return []
    # Column by column: 0.05 us a value, against 0.3 us a row and the same a value for `dict(zip(columns, row))`.
    first, *others = columns
    rows = [{first: value} for value in values[0]]
    for name, column_values in zip(others, values[1:], strict=True):
        for row, value in zip(rows, column_values, strict=True):
            row[name] = value
    return rows


def _row_values(
    values: torch.Tensor | list[Any] | FreshRows, device: torch.device | None, scalars: bool, copy: bool
) -> Sequence[Any]:
    if isinstance(values, torch.Tensor):
        return _split((values.clone() if copy else _dense(values)).to(device=device), scalars)
    if isinstance(values, FreshRows) and not copy and device is None:
        return list(values)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values):
        return _join(tensors, device, scalars)
    if not tensors:
        return [own(value) for value in values]
    joined = iter(_join(tensors, device, scalars))
    return [next(joined) if isinstance(value, torch.Tensor) else own(value) for value in values]


def _dense(values: torch.Tensor) -> torch.Tensor:
    # Rows of an expanded tensor share their memory: an edit of one would show in the others.
    return values if values.is_contiguous() or values.is_nested else values.contiguous()


def _split(values: torch.Tensor, scalars: bool) -> Sequence[Any]:
    if scalars and values.dim() == 1:
        return list(values.tolist())
    return values.unbind(0)


def _join(tensors: list[torch.Tensor], device: torch.device | None, scalars: bool) -> Sequence[Any]:
    """Copies the tensors of a ragged column, and moves them, in one go."""
    if any(len(set(map(attribute, tensors))) > 1 for attribute in (_DTYPE, _DEVICE)):
        return [_split(tensor[None].clone().to(device=device), scalars)[0] for tensor in tensors]
    dims = set(map(_NDIM, tensors))
    if dims - {0, 1} and any(tensor.is_nested for tensor in tensors):
        raise TypeError("nested tensors, one in a row (store their parts padded, or as a list)")
    if dims == {0}:
        return _split(torch.stack(tensors).to(device=device), scalars)
    flat = tensors if dims == {1} else [tensor.reshape(-1) for tensor in tensors]
    parts = torch.cat(flat).to(device=device).split_with_sizes([tensor.numel() for tensor in flat])
    if dims == {1}:
        return parts
    return [
        part.item() if scalars and not tensor.dim() else part.view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
