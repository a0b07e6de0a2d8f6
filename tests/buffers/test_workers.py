"""Data-loader workers: each row once, whatever the start method."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.data.replay_buffers import RandomSampler

from tests.features import needs, sampler_class
from torchrl_trl_bridge import TorchRLBufferDataset

ConsumingSampler = sampler_class("ConsumingSampler")

STORAGES = [ListStorage, LazyStackStorage, LazyTensorStorage, LazyMemmapStorage]


def buffer_of(rows: int = 1000, storage: type = LazyTensorStorage, **kwargs: Any) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(rows), **kwargs)
    replay_buffer.extend(TensorDict({"x": torch.arange(rows)}, [rows]))
    return replay_buffer


def values(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch["x"]]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("seed", [None, 1])
def test_each_row_once(storage: type, workers: int, seed: int | None) -> None:
    dataset = TorchRLBufferDataset(
        buffer_of(storage=storage, sampler=SamplerWithoutReplacement()), 5, num_batches=12, seed=seed
    )
    for source in (dataset, dataset.as_hf_dataset(), dataset.as_hf_dataset().map(lambda row: row)):
        seen = values(DataLoader(source, batch_size=4, num_workers=workers))
        assert len(seen) == len(set(seen)) == 60


def test_batches_come_worker_by_worker() -> None:
    dataset = TorchRLBufferDataset(buffer_of(), 4, num_batches=6, seed=1)
    alone = [int(row["x"]) for row in dataset]
    shared = values(DataLoader(dataset, batch_size=4, num_workers=2))
    assert shared == alone, "replay batch i is from worker i % 2, and the loader asks them in turn"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_start_methods(method: str, storage: type) -> None:
    dataset = TorchRLBufferDataset(buffer_of(storage=storage, prefetch=2, batch_size=5), 5, num_batches=4, seed=1)
    dataset.replay_buffer.sample()
    loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context=method)
    assert sorted(values(loader)) == sorted(int(row["x"]) for row in dataset)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_storages_that_stay_in_their_process_are_named(method: str, storage: type) -> None:
    loader = DataLoader(
        TorchRLBufferDataset(buffer_of(storage=storage), 5), num_workers=1, multiprocessing_context=method
    )
    with pytest.raises(RuntimeError, match=rf"{storage.__name__} cannot be sent.*num_workers=0.*LazyTensorStorage"):
        next(iter(loader))


def test_parts_that_stay_in_their_process_are_named() -> None:
    class Local(RandomSampler):
        pass

    loader = DataLoader(
        TorchRLBufferDataset(buffer_of(sampler=Local()), 5), num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.raises(RuntimeError, match=r"the sampler of the replay buffer \(Local\) cannot be sent"):
        next(iter(loader))


def test_what_is_sent_holds_no_drawn_batches() -> None:
    rows = 4000
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(rows), prefetch=3, batch_size=1000)
    replay_buffer.extend(TensorDict({"x": torch.zeros(rows, 10)}, [rows]))
    dataset = TorchRLBufferDataset(replay_buffer, 1000, num_batches=3)
    before = len(pickle.dumps(dataset))
    next(iter(dataset))
    assert replay_buffer._prefetch_queue
    assert len(pickle.dumps(dataset)) < before + 1000


@needs("ConsumingSampler")
def test_a_consuming_sampler_is_refused() -> None:
    loader = DataLoader(TorchRLBufferDataset(buffer_of(sampler=ConsumingSampler()), 5), num_workers=1)
    with pytest.raises(RuntimeError, match=r"consumes the rows.*num_workers=0"):
        next(iter(loader))


# The start method


def test_only_loaders_of_this_package_are_forked() -> None:
    dataset = TorchRLBufferDataset(buffer_of(10), 5)
    assert multiprocessing.get_start_method() == "spawn", "as torchrl sets it"

    class Wrapped(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.dataset = dataset.as_hf_dataset().map(lambda row: row)

        def __iter__(self) -> Any:
            return iter(self.dataset)

    for source in (dataset, dataset.as_hf_dataset(), Wrapped()):
        context = DataLoader(source, num_workers=1).multiprocessing_context
        assert context.get_start_method() == "fork"
        assert DataLoader(source).multiprocessing_context is None
        told = DataLoader(source, num_workers=1, multiprocessing_context="spawn").multiprocessing_context
        assert told.get_start_method() == "spawn"
    assert DataLoader([1, 2], num_workers=1).multiprocessing_context is None  # type: ignore[arg-type]
    assert multiprocessing.get_start_method() == "spawn"


# Epochs


@pytest.mark.parametrize("streaming", [False, True])
def test_an_epoch_reaches_persistent_workers(streaming: bool) -> None:
    dataset = TorchRLBufferDataset(buffer_of(), 5, num_batches=4, seed=1)
    source: Any = dataset.as_hf_dataset() if streaming else dataset
    loader = DataLoader(source, batch_size=5, num_workers=1, persistent_workers=True)
    found = []
    for epoch in (0, 1, 0):
        source.set_epoch(epoch)
        found.append(values(loader))
    assert found[0] == found[2]
    assert found[0] != found[1]
    dataset.set_epoch(1)
    assert found[1] == [int(row["x"]) for row in dataset]


def test_persistent_workers_without_a_seed_draw_anew() -> None:
    loader = DataLoader(
        TorchRLBufferDataset(buffer_of(), 5, num_batches=4), batch_size=5, num_workers=2, persistent_workers=True
    )
    first, second = values(loader), values(loader)
    assert len(first) == len(second) == 20
    assert first != second


# Beside a writer


def _version(rows: int, version: int) -> TensorDict:
    data = {f"f{i}": torch.full((rows, 8), version) for i in range(4)}
    return TensorDict(data | {"n": {"g": torch.full((rows, 8), version)}}, [rows])


SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "0.8"))
"""How long a reader runs beside a writer; ``SOAK_SECONDS=60 pytest -s -k reader_beside`` prints what came of it."""


@pytest.mark.parametrize("storage", STORAGES)
def test_a_reader_beside_a_writer_sees_whole_rows(storage: type) -> None:
    # Forked workers share the files with the writer, for which TorchRL has a lock of all processes.
    replay_buffer = ReplayBuffer(storage=storage(64), shared=storage is LazyMemmapStorage)
    replay_buffer.extend(_version(64, 0))
    stop = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        for version in itertools.count(1):
            if stop.is_set():
                return
            batch = _version(16, version)
            replay_buffer.extend(batch if version % 2 else lazy_stack(list(batch.unbind(0))))
            written += 16

    def resources() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def is_torn(row: dict[str, torch.Tensor]) -> bool:
        return len({int(x) for value in row.values() for x in value}) > 1

    before = resources()
    writer = threading.Thread(target=write)
    writer.start()
    seen: Counter[int] = Counter()
    torn = passes = from_workers = 0
    try:
        deadline = time.monotonic() + SOAK_SECONDS
        while time.monotonic() < deadline:
            dataset = TorchRLBufferDataset(replay_buffer, 16, num_batches=8)
            other = iter(dataset)
            for row in dataset:
                next(other)
                torn += is_torn(row)
                seen[int(row["f0"][0])] += 1
                if sum(seen.values()) % 37 == 0:
                    break
            if passes % 500 == 0:
                short = TorchRLBufferDataset(replay_buffer, 16, num_batches=4)
                for row in DataLoader(short, batch_size=None, num_workers=2):
                    torn += is_torn(row)
                    from_workers += 1
            passes += 1
    finally:
        stop.set()
        writer.join(10)
    assert not writer.is_alive()
    assert torn == 0, "all fields of a row come from one write"
    assert len(seen) > 3
    assert from_workers
    del dataset, other, row, short
    after = resources()
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 2
    print(
        f"{storage.__name__}: {sum(seen.values()):,} rows read in {passes:,} passes, {from_workers} by workers, "
        f"{written:,} written; {torn} torn; threads {before[0]} to {after[0]}, file handles {before[1]} to {after[1]}"
    )
