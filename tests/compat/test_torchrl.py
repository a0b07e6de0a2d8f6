"""``ReplayBuffer.as_dataset``, which no release has yet: a stand-in with the form that is announced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_trl_bridge import TorchRLBufferDataset


class _Own(IterableDataset[Any]):
    def __init__(self, replay_buffer: ReplayBuffer, num_batches: int | None) -> None:
        self.replay_buffer, self.num_batches = replay_buffer, num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.num_batches or 10**9):
            self.replay_buffer.iterated += 1
            yield self.replay_buffer.sample()


class Announced(ReplayBuffer):  # type: ignore[misc]
    iterated = 0

    def as_dataset(self, num_batches: int | None = None) -> IterableDataset[Any]:
        return _Own(self, num_batches)


class Other(ReplayBuffer):  # type: ignore[misc]
    """A method of that name with another meaning."""

    def as_dataset(self, path: str) -> None:
        pytest.fail("called")


def filled(cls: type, **kwargs: Any) -> Any:
    replay_buffer = cls(storage=LazyTensorStorage(20), **kwargs)
    replay_buffer.extend(TensorDict({"x": torch.arange(20)}, [20]))
    return replay_buffer


def values(rows: Any) -> list[int]:
    return [int(row["x"]) for row in rows]


def test_the_buffers_own_dataset_draws_what_the_buffer_would_have() -> None:
    own, plain = filled(Announced, batch_size=4), filled(ReplayBuffer, batch_size=4)
    torch.manual_seed(1)
    rows = values(TorchRLBufferDataset(own, 4, num_batches=3))
    torch.manual_seed(1)
    assert rows == values(TorchRLBufferDataset(plain, 4, num_batches=3))
    assert own.iterated == 3


@pytest.mark.parametrize(
    ("buffer_kwargs", "dataset_kwargs"),
    [({"batch_size": 5}, {}), ({}, {}), ({"batch_size": 4}, {"seed": 1})],
    ids=["another batch size", "no batch size", "a seed"],
)
def test_where_it_is_not_right_the_bridge_draws(buffer_kwargs: Any, dataset_kwargs: Any) -> None:
    own = filled(Announced, **buffer_kwargs)
    assert len(values(TorchRLBufferDataset(own, 4, num_batches=2, **dataset_kwargs))) == 8
    assert own.iterated == 0


def _draws(batch: list[Any]) -> list[Any]:
    return batch


def test_workers_share_the_batches_all_the_same() -> None:
    own = filled(Announced, batch_size=4)
    loader = DataLoader(TorchRLBufferDataset(own, 4, num_batches=4), batch_size=4, num_workers=2, collate_fn=_draws)
    assert sum(len(batch) for batch in loader) == 16


def test_a_method_of_that_name_with_another_meaning_is_left_alone() -> None:
    assert len(values(TorchRLBufferDataset(filled(Other, batch_size=4), 4))) == 4
