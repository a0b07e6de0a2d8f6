"""Columns of a batch ↔ one tensor of bytes: what goes from one rank to the others."""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import Any

import torch

from torchrl_trl_bridge.rollouts import Column, FreshRows

_ATTRIBUTES = attrgetter("dtype"), attrgetter("device"), attrgetter("ndim")
_ALIGNMENT = 16  # bytes; no dtype needs more

_WORTH_A_LOOK = 1024  # integers

FIRST_FRAME = 4096  # bytes
_LARGEST_FRAME = 4 * 2**20  # bytes: small messages may come in it, too


def pack(head: dict[str, Any], columns: dict[str, Column] | None = None, room: int = 0) -> torch.Tensor:
    """One message: any Python values, and columns, whose tensors come out as they are.

    A ragged column that had to be joined for this is kept joined in ``columns``: nobody need copy its rows again.
    The message takes at least ``room`` bytes.

    Python values are pickled, as by `torch.distributed.broadcast_object_list`: ranks of one run trust each other.
    """
    parts: list[torch.Tensor] = []
    described = None
    if columns is not None:
        columns.update({name: _joined(column) for name, column in columns.items()})
        described = [_pack_column(name, column, parts) for name, column in columns.items()]
    info = pickle.dumps((head, described), protocol=pickle.HIGHEST_PROTOCOL)
    parts.insert(0, torch.frombuffer(bytearray(info), dtype=torch.uint8))
    starts, end = [], _ALIGNMENT
    for part in parts:
        starts.append(end)
        end += -(-part.numel() // _ALIGNMENT) * _ALIGNMENT
    message = torch.empty(max(end, room), dtype=torch.uint8)
    message[:8].view(torch.int64)[0] = len(info)
    for start, part in zip(starts, parts, strict=True):
        message[start : start + part.numel()] = part
    return message


def unpack(message: torch.Tensor) -> tuple[dict[str, Any], dict[str, Column] | None]:
    """What `pack` was given. The tensors of the columns share memory with nothing but the message."""
    size = int(message[:8].view(torch.int64)[0])
    head, described = pickle.loads(message[_ALIGNMENT : _ALIGNMENT + size].numpy().tobytes())
    if described is None:
        return head, None
    start = _ALIGNMENT + -(-size // _ALIGNMENT) * _ALIGNMENT
    columns: dict[str, Column] = {}
    for name, metadata, bytes_, sent, dtype, shape, lengths, values in described:
        if dtype is not None:
            tensor = message[start : start + bytes_].view(sent).to(dtype)
            start += -(-bytes_ // _ALIGNMENT) * _ALIGNMENT
            values = tensor.view(shape) if lengths is None else FreshRows(tensor, lengths)
        columns[name] = Column(values, metadata)
    return head, columns


def framed(message: torch.Tensor, frame_size: int) -> list[torch.Tensor]:
    """What is sent to one who waits for a frame: the message; where it is larger, a frame that says so, and then it."""
    if message.numel() == frame_size:
        return [message]
    frame = torch.empty(frame_size, dtype=torch.uint8)
    frame[:8].view(torch.int64)[0] = -message.numel()
    return [frame, message]


def too_large(frame: torch.Tensor) -> int:
    """The size of the message that comes after the frame; 0 if it is in the frame."""
    return max(-int(frame[:8].view(torch.int64)[0]), 0)


def next_frame_size(frame_size: int, message_size: int) -> int:
    """The size of the frame after a message: with room for one like it, for one transmission is quicker than two."""
    if frame_size < message_size <= _LARGEST_FRAME:
        return message_size + message_size // 8
    return frame_size


def _pack_column(name: str, column: Column, parts: list[torch.Tensor]) -> tuple[Any, ...]:
    values = column.values
    if isinstance(values, (torch.Tensor, FreshRows)):
        tensor = values.flat if isinstance(values, FreshRows) else values
        sent = _narrowed(tensor.detach().cpu().contiguous().reshape(-1))
        parts.append(sent.view(torch.uint8))
        form = (None, values.lengths) if isinstance(values, FreshRows) else (values.shape, None)
        return name, column.metadata, parts[-1].numel(), sent.dtype, tensor.dtype, *form, None
    values = [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in values]
    return name, column.metadata, 0, None, None, None, None, values


def _joined(column: Column) -> Column:
    """The column, its rows joined if they are vectors of one dtype on one device."""
    values = column.values
    if isinstance(values, torch.Tensor) and values.is_nested:
        values = list(values.unbind())
    if not isinstance(values, list) or not values or not all(isinstance(value, torch.Tensor) for value in values):
        return column
    if any(len(set(map(attribute, values))) > 1 for attribute in _ATTRIBUTES) or values[0].ndim != 1:
        return Column(values, column.metadata)
    return Column(FreshRows(torch.cat(values), list(map(torch.Tensor.numel, values))), column.metadata)


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Token ids and the like in half or a quarter of their bytes, where they fit: looking is quicker than sending."""
    if tensor.dtype != torch.int64 or tensor.numel() < _WORTH_A_LOOK:
        return tensor
    low, high = map(int, torch.aminmax(tensor))
    for dtype in (torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return tensor.to(dtype)
    return tensor
