"""Counts of what code does, which are the same on any machine: calls, operations on tensors, and what they make."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import RandomSampler

import torchrl_trl_bridge

PACKAGE = torchrl_trl_bridge.__path__[0]


def calls_in_package(run: Callable[[], Any]) -> int:
    """How many Python functions of the package are entered, a generator each time that it goes on."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Operations on tensors, by name; the bytes of the new memory that they made; and moves to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()
        self.new_bytes = 0
        self.moves = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.names[operation.overloadpacket.__name__] += 1
        known = {place for leaf in tree_leaves((args, kwargs)) for place in _places(leaf)}
        made = {place: leaf for leaf in tree_leaves(result) for place in _places(leaf) if place not in known}
        self.new_bytes += sum(leaf.untyped_storage().nbytes() for leaf in made.values())
        if isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            self.moves += result.device != args[0].device
        return result


def _places(leaf: Any) -> list[int]:
    return [leaf.untyped_storage()._cdata] if isinstance(leaf, torch.Tensor) else []


def operations(run: Callable[[], Any]) -> Operations:
    """What ``run`` does to tensors."""
    with Operations() as counted:
        run()
    return counted


class CountingSampler(RandomSampler):
    """Notes how often it was drawn from, and how many rows were."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = self.rows = 0

    def sample(self, storage: Any, batch_size: int) -> Any:
        self.draws += 1
        self.rows += batch_size
        return super().sample(storage, batch_size)
