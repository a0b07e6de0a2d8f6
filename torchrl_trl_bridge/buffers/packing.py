"""Columns of a batch ↔ one tensor of bytes: what goes from one rank to the others."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from torchrl_trl_bridge.rollouts import Column, FreshRows

_ALIGNMENT = 16  # bytes; no dtype needs more


def pack(head: dict[str, Any], columns: dict[str, Column] | None = None) -> torch.Tensor:
    """One message: any Python values, and columns, whose tensors are copied once and as they are.

    Python values are pickled, as by `torch.distributed.broadcast_object_list`: ranks of one run trust each other.
    """
    parts: list[torch.Tensor] = []
    described = None if columns is None else [_pack_column(name, column, parts) for name, column in columns.items()]
    info = pickle.dumps((head, described), protocol=pickle.HIGHEST_PROTOCOL)
    parts.insert(0, torch.frombuffer(bytearray(info), dtype=torch.uint8))
    starts, end = [], _ALIGNMENT
    for part in parts:
        starts.append(end)
        end += -(-part.numel() // _ALIGNMENT) * _ALIGNMENT
    message = torch.empty(end, dtype=torch.uint8)
    message[:8].view(torch.int64)[0] = len(info)
    for start, part in zip(starts, parts, strict=True):
        message[start : start + part.numel()] = part
    return message


def unpack(message: torch.Tensor) -> tuple[dict[str, Any], dict[str, Column] | None]:
    """What `pack` was given. The tensors of the columns are views of the message."""
    size = int(message[:8].view(torch.int64)[0])
    head, described = pickle.loads(message[_ALIGNMENT : _ALIGNMENT + size].numpy().tobytes())
    if described is None:
        return head, None
    start = _ALIGNMENT + -(-size // _ALIGNMENT) * _ALIGNMENT
    columns: dict[str, Column] = {}
    for name, metadata, bytes_, dtype, shape, lengths, values in described:
        if dtype is not None:
            tensor = message[start : start + bytes_].view(dtype)
            start += -(-bytes_ // _ALIGNMENT) * _ALIGNMENT
            values = tensor.view(shape) if lengths is None else list(tensor.split_with_sizes(lengths))
        columns[name] = Column(values, metadata)
    return head, columns


def _pack_column(name: str, column: Column, parts: list[torch.Tensor]) -> tuple[Any, ...]:
    values = list(column.values) if isinstance(column.values, FreshRows) else column.values
    if isinstance(values, torch.Tensor) and values.is_nested:
        values = list(values.unbind())
    if isinstance(values, torch.Tensor):
        parts.append(_bytes_of(values))
        return name, column.metadata, parts[-1].numel(), values.dtype, values.shape, None, None
    if _is_ragged(values):
        parts.append(_bytes_of(torch.cat(values)))
        return name, column.metadata, parts[-1].numel(), values[0].dtype, None, [len(v) for v in values], None
    values = [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in values]
    return name, column.metadata, 0, None, None, None, values


def _is_ragged(values: list[Any]) -> bool:
    return (
        bool(values)
        and all(isinstance(value, torch.Tensor) and value.dim() == 1 for value in values)
        and len({(value.dtype, value.device) for value in values}) == 1
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
