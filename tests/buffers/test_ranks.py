"""Ranks of a process group: one stream for all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  # once, before the ranks are forked
import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)

from tests.counting import CountingSampler
from tests.features import needs, sampler_class
from tests.processes import run_ranks
from torchrl_trl_bridge import TorchRLBufferDataset
from torchrl_trl_bridge.buffers.packing import pack, unpack
from torchrl_trl_bridge.buffers.ranks import MESSAGES_AHEAD
from torchrl_trl_bridge.rollouts import Column

ConsumingSampler = sampler_class("ConsumingSampler")


def buffer_of(rows: int, first: int = 0, **kwargs: Any) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(1000), **kwargs)
    for n in range(first, first + rows):
        chat = NonTensorData([{"role": "user", "content": str(n)}])
        replay_buffer.add(TensorDict({"ids": torch.arange(n % 7 + 1), "n": torch.tensor(n), "s": str(n), "chat": chat}))
    return replay_buffer


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def error_of(function: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


# The same rows


def _same_rows(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, replay_buffer in {
        "on rank 0 only": buffer_of(50 if rank == 0 else 0),
        "on each rank": buffer_of(50),
        "without replacement": buffer_of(50 if rank == 0 else 0, sampler=SamplerWithoutReplacement()),
    }.items():
        for seed in (None, 3):
            dataset = TorchRLBufferDataset(replay_buffer, 6, num_batches=4, seed=seed)
            found[f"{name}, {seed}"] = [plain(row) for row in dataset]
    storage = LazyMemmapStorage(50, scratch_dir=folder, existsok=True)
    shared = ReplayBuffer(storage=storage)
    if rank == 0:
        shared.extend(TensorDict({"n": torch.arange(50)}, [50]))
    dist.barrier()
    found["in shared files"] = [plain(row) for row in TorchRLBufferDataset(shared, 6, num_batches=4)]
    dense = ReplayBuffer(storage=LazyTensorStorage(50))
    if rank == 0:
        data = {"h": torch.rand(50, 3, 2).bfloat16(), "b": torch.rand(50) > 0.5, "e": torch.zeros(50, 0)}
        dense.extend(TensorDict(data, [50]))
    row = next(iter(TorchRLBufferDataset(dense, 6)))
    found["dense"] = {name: (str(value.dtype), value.float().tolist()) for name, value in row.items()}
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_see_the_same_rows(size: int, tmp_path: Path) -> None:
    first, *others = run_ranks(_same_rows, size, str(tmp_path))
    assert all(found == first for found in others)
    assert all(len(rows) == 24 for name, rows in first.items() if name != "dense")
    for name, rows in first.items():
        if name.startswith("on"):
            assert all(row["ids"] == list(range(row["n"] % 7 + 1)) and row["s"] == str(row["n"]) for row in rows)
    assert len({row["n"] for row in first["without replacement, None"]}) == 24
    assert first["dense"]["h"][0] == "torch.bfloat16"


def _look_first(rank: int) -> Any:
    """Rank 0 looks at the data before the others may, as in `main_process_first`."""
    sampler = CountingSampler()
    stream = TorchRLBufferDataset(buffer_of(50 if rank == 0 else 0, sampler=sampler), 4, num_batches=3).as_hf_dataset()
    mapped = stream.map(lambda rows: rows, batched=True, batch_size=4 * 3)
    looks = []
    for source in (stream, mapped, stream):
        if rank:
            dist.barrier()
        looks.append(plain(next(iter(source))))
        looks.append(source.column_names)
        if not rank:
            dist.barrier()
    return looks, [plain(row) for row in stream], sampler.rows


def test_rank_0_may_look_before_the_others() -> None:
    (looks, rows, draws), (their_looks, their_rows, their_draws) = run_ranks(_look_first, 2)
    assert (looks, rows) == (their_looks, their_rows)
    assert looks[1] == ["ids", "n", "s", "chat"]
    assert len(rows) == 12
    assert draws == (1 + 3 + 1 + 3) * 4
    assert their_draws == 0


def _look_at_consumed(rank: int) -> Any:
    replay_buffer = buffer_of(12 if rank == 0 else 0, sampler=ConsumingSampler())
    stream = TorchRLBufferDataset(replay_buffer, 4, num_batches=3).as_hf_dataset()
    for _ in range(3):
        next(iter(stream))
    return [row["s"] for row in stream]


@needs("ConsumingSampler")
def test_a_look_loses_no_row() -> None:
    first, second = run_ranks(_look_at_consumed, 2)
    assert first == second
    assert sorted(first, key=int) == [str(n) for n in range(12)]


def _features(rank: int) -> Any:
    replay_buffer = buffer_of(0)
    stream = TorchRLBufferDataset(replay_buffer, 4).as_hf_dataset()
    before = stream.column_names
    if rank == 0:
        replay_buffer.extend(buffer_of(5)[:])
    after = stream.column_names
    snapshot = TorchRLBufferDataset(replay_buffer, 4).as_hf_dataset(streaming=False)
    return before, after, str(stream.features), list(snapshot["s"]), str(snapshot.features)


def test_columns_and_snapshots_are_those_of_rank_0() -> None:
    first, second = run_ranks(_features, 2)
    assert first == second
    assert first[:2] == (None, ["ids", "n", "s", "chat"])
    assert first[3] == list("01234")


def test_alone_nothing_is_told() -> None:
    dataset = TorchRLBufferDataset(buffer_of(5), 4)
    list(dataset)
    assert dataset.stream._ranks._ranks is None


# Disagreement


def _disagree(rank: int) -> Any:
    def iterate(replay_buffer: ReplayBuffer, batch_size: int = 4, **kwargs: Any) -> Callable[[], Any]:
        return lambda: list(TorchRLBufferDataset(replay_buffer, batch_size, **{"num_batches": 3, **kwargs}))

    other = buffer_of(9)
    other.storage._storage[4]["s"] = str(rank)
    return [
        error_of(attempt)
        for attempt in (
            iterate(buffer_of(9 + rank)),
            iterate(other),
            iterate(buffer_of(9), batch_size=4 + rank),
            iterate(buffer_of(9), num_batches=3 + rank),
            iterate(buffer_of(9), seed=rank),
            iterate(buffer_of(9), keys=["s", "n"][: 1 + rank]),
        )
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_disagree_are_told_so(size: int) -> None:
    words = [
        "holds 9 rows on rank 0 and 1",
        "row 4 of the replay buffer holds another 's' on rank",
        "batch_size is 4 on rank 0 and",
        "num_batches is 3 on rank 0 and",
        "seed is 0 on rank 0 and",
        "keys is",
    ]
    for errors in run_ranks(_disagree, size, timeout=60):
        for (kind, message, seconds), expected in zip(errors, words, strict=True):
            assert kind == "RuntimeError"
            assert expected in message
            assert seconds < 30


def _errors_of_rank_0(rank: int) -> Any:
    return [
        error_of(attempt)[:2]
        for attempt in (
            lambda: list(TorchRLBufferDataset(buffer_of(0), 4)),
            lambda: list(TorchRLBufferDataset(buffer_of(0), 4, timeout=0.2)),
            lambda: list(TorchRLBufferDataset(buffer_of(5 if rank == 0 else 0), 4, keys=["nn"])),
            lambda: TorchRLBufferDataset(buffer_of(0), 4).as_hf_dataset(streaming=False),
        )
    ]


def test_errors_of_rank_0_reach_all() -> None:
    first, second = run_ranks(_errors_of_rank_0, 2)
    assert first == second
    assert [kind for kind, _ in first] == ["RuntimeError", "TimeoutError", "KeyError", "RuntimeError"]
    assert "is empty" in first[0][1]


# Stopping early


def _stop(rank: int, stopping: int, batches: int) -> Any:
    dataset = TorchRLBufferDataset(buffer_of(9), 4, num_batches=batches)

    def iterate() -> None:
        for position, _ in enumerate(dataset):
            if rank == stopping and position == 9:
                return

    return error_of(iterate)


@pytest.mark.parametrize("stopping", [0, 1])
@pytest.mark.parametrize("batches", [5, 3 * MESSAGES_AHEAD])
def test_a_rank_that_stops_early_ends_the_others(stopping: int, batches: int) -> None:
    answers = run_ranks(_stop, 2, stopping, batches)
    assert answers[stopping][0] == ""
    kind, message, seconds = answers[1 - stopping]
    assert kind == "RuntimeError"
    assert f"rank {stopping} has stopped iterating after 3 batches" in message
    assert seconds < 20


def _die(rank: int, dying: int) -> Any:
    dataset = TorchRLBufferDataset(buffer_of(9), 4, num_batches=None)

    def iterate() -> None:
        for position, _ in enumerate(dataset):
            if rank == dying and position == 9:
                os.kill(os.getpid(), signal.SIGKILL)

    return error_of(iterate)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_ends_the_others(dying: int) -> None:
    kind, message, seconds = run_ranks(_die, 2, dying, dying=dying)[1 - dying]
    assert kind == "RuntimeError"
    assert "died" in message
    assert seconds < 20


def _absent(rank: int) -> Any:
    return error_of(lambda: list(TorchRLBufferDataset(buffer_of(9), 4, num_batches=2))) if rank == 0 else None


def test_a_rank_that_does_not_iterate_is_missed() -> None:
    kind, message, seconds = run_ranks(_absent, 2, timeout=3)[0]
    assert kind == "RuntimeError"
    assert "every rank has to iterate alike" in message
    assert seconds < 20


def _workers(rank: int) -> Any:
    loader = torch.utils.data.DataLoader(TorchRLBufferDataset(buffer_of(9), 4, seed=0), num_workers=1)
    return error_of(lambda: list(loader))


def test_data_loader_workers_are_refused() -> None:
    for kind, message, _ in run_ranks(_workers, 2):
        assert kind == "RuntimeError"
        assert "num_workers=0" in message


# Messages


def test_columns_are_packed_as_they_are() -> None:
    columns = {
        "dense": Column(torch.rand(3, 2).bfloat16()),
        "empty": Column(torch.zeros(3, 0)),
        "ragged": Column([torch.arange(n) for n in (0, 3, 1)]),
        "matrices": Column([torch.ones(n, 2) for n in (1, 2, 0)]),
        "mixed": Column([None, torch.tensor(1), "s"]),
        "text": Column(["ü", None, {"k": [1]}], metadata=True),
        "flags": Column(torch.tensor([True, False, True])),
    }
    for name, most in {"ids": 2**15, "many": 2**31, "all": 2**63}.items():
        columns[name] = Column(torch.tensor([[-most, most - 1], [0, 1]]).repeat(1, 600))
        columns[f"one too many {name}"] = Column(torch.tensor([[min(most, 2**63 - 1), 1]]).repeat(3, 600))
        columns[f"one too few {name}"] = Column(torch.tensor([[max(-most - 1, -(2**63)), 1]]).repeat(3, 600))
    head, found = unpack(pack({"k": 1}, columns))
    assert head == {"k": 1}
    assert found is not None
    assert list(found) == list(columns)
    for name, column in columns.items():
        assert found[name].metadata == column.metadata
        for mine, theirs in zip(column.values, found[name].values, strict=True):
            if isinstance(mine, torch.Tensor):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)
            else:
                assert mine == theirs


def test_ragged_columns_of_a_batch_go_as_one_tensor() -> None:
    rows = lazy_stack([TensorDict({"x": torch.arange(n)}) for n in range(1, 200)])
    message = pack({}, {"x": Column([row["x"] for row in rows.unbind(0)])})
    assert message.numel() < 2 * sum(range(1, 200)) + 3000, "of small integers, two bytes each"
