"""A replay buffer in a Ray actor."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyMemmapStorage, LazyStackStorage, RayReplayBuffer, SamplerWithoutReplacement

from tests.features import needs
from torchrl_trl_bridge import TorchRLBufferDataset


@pytest.fixture(scope="module")
def remote() -> Iterator[functools.partial[RayReplayBuffer]]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield functools.partial(RayReplayBuffer, remote_config={"num_cpus": 0})
    ray.shutdown()


@pytest.fixture(scope="module")
def filled(remote: functools.partial[RayReplayBuffer]) -> Iterator[RayReplayBuffer]:
    replay_buffer = remote(
        storage=functools.partial(LazyStackStorage, 100), sampler=SamplerWithoutReplacement, batch_size=4
    )
    replay_buffer.extend(lazy_stack([TensorDict({"x": torch.arange(n), "s": str(n)}) for n in range(1, 13)]))
    yield replay_buffer
    replay_buffer.close()


def names(dataset: TorchRLBufferDataset) -> list[str]:
    return [row["s"] for row in dataset]


def test_rows_come_whole(filled: RayReplayBuffer) -> None:
    clients = [filled.client()] if hasattr(filled, "client") else []  # from torchrl 0.14 on
    for replay_buffer in [filled, *clients]:
        rows = list(TorchRLBufferDataset(replay_buffer, 4, num_batches=3))
        assert sorted(int(row["s"]) for row in rows) == list(range(1, 13))
        assert all(row["x"].tolist() == list(range(int(row["s"]))) for row in rows)


def test_a_seed_fixes_the_rows(filled: RayReplayBuffer) -> None:
    first = names(TorchRLBufferDataset(filled, 4, num_batches=3, seed=1))
    filled.sample(3)
    assert names(TorchRLBufferDataset(filled, 4, num_batches=3, seed=1)) == first
    assert names(TorchRLBufferDataset(filled, 4, num_batches=3, seed=2)) != first
    assert len(set(first)) == 12


def test_stream_and_snapshot(filled: RayReplayBuffer) -> None:
    dataset = TorchRLBufferDataset(filled, 4)
    assert dataset.as_hf_dataset().column_names == ["x", "s"]
    assert len(list(dataset.as_hf_dataset())) == 4
    assert list(dataset.as_hf_dataset(streaming=False)["s"]) == [str(n) for n in range(1, 13)]


@needs("clients of Ray buffers")
def test_a_dataset_can_be_sent_to_other_processes(filled: RayReplayBuffer) -> None:
    sent = pickle.loads(pickle.dumps(TorchRLBufferDataset(filled, 4, num_batches=3, seed=1)))
    assert names(sent) == names(TorchRLBufferDataset(filled, 4, num_batches=3, seed=1))


def test_a_dead_actor_is_an_error(remote: functools.partial[RayReplayBuffer]) -> None:
    ray = pytest.importorskip("ray")
    replay_buffer = remote(storage=functools.partial(LazyStackStorage, 100), batch_size=2)
    replay_buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
    endless = TorchRLBufferDataset(replay_buffer, 2, num_batches=None, timeout=60)
    rows = iter(endless)
    next(rows)
    ray.kill(replay_buffer._rb)
    with pytest.raises(RuntimeError, match=r"\(RayReplayBuffer\) is gone.*save_buffer"):
        list(rows)
    for read in (
        lambda: next(iter(endless)),
        lambda: next(iter(TorchRLBufferDataset(replay_buffer, 2, seed=1))),
        lambda: TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset().column_names,
        lambda: TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False),
    ):
        with pytest.raises(RuntimeError, match=r"\(RayReplayBuffer\) is gone"):
            read()


def test_empty_and_lossy_buffers_are_named(remote: functools.partial[RayReplayBuffer]) -> None:
    replay_buffer = remote(storage=functools.partial(LazyMemmapStorage, 100), batch_size=2)
    with pytest.raises(RuntimeError, match=r"\(RayReplayBuffer\) is empty"):
        next(iter(TorchRLBufferDataset(replay_buffer, 2)))
    replay_buffer.extend(TensorDict({"s": ["a", "b"], "x": torch.arange(2)}, [2]))
    with pytest.raises(ValueError, match="LazyMemmapStorage"):
        next(iter(TorchRLBufferDataset(replay_buffer, 2)))
    replay_buffer.close()
