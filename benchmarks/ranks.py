"""What a second rank adds to a batch: rank 0 draws it, and tells the other; both get the same rows."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from measuring import Figure, Report, main
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer

from torchrl_trl_bridge import TorchRLBufferDataset

ROWS, TOKENS, BATCH = 4096, 512, 256


def filled(storage: type) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(ROWS))
    tokens = torch.randint(1000, (ROWS, TOKENS))
    if storage is LazyTensorStorage:
        replay_buffer.extend(TensorDict({"input_ids": tokens}, [ROWS]))
    else:
        replay_buffer.extend(lazy_stack([TensorDict({"input_ids": tokens[n, n % 64 :].clone()}) for n in range(ROWS)]))
    return replay_buffer


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """As if this process were in no group."""
    with mock.patch("torchrl_trl_bridge.buffers.ranks.world", return_value=None):
        yield


def digest(dataset: TorchRLBufferDataset) -> list[int]:
    return [int(row["input_ids"].sum()) for row in dataset]


def exhaust(dataset: TorchRLBufferDataset) -> None:
    for _ in dataset:
        pass


def milliseconds(run: Any, batches: int) -> tuple[float, float]:
    """Of a batch: processor time of this rank with all its threads, and on the clock, until all ranks have it."""
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    run()
    processor = time.process_time() - processor
    dist.barrier()
    return processor / batches * 1000, (time.perf_counter() - start) / batches * 1000


def rank_of(rank: int, port: int, batches: int, turns: int, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    for storage in (LazyTensorStorage, LazyStackStorage):
        replay_buffer = filled(storage) if rank == 0 else ReplayBuffer(storage=storage(ROWS))
        dataset = TorchRLBufferDataset(replay_buffer, BATCH, num_batches=batches)
        mine: list[Any] = digest(TorchRLBufferDataset(replay_buffer, BATCH, num_batches=3))
        all_ranks: list[Any] = [None, None]
        dist.all_gather_object(all_ranks, mine)
        assert all_ranks[0] == all_ranks[1], "both ranks see the same rows"

        def sample(replay_buffer: ReplayBuffer = replay_buffer) -> None:
            for _ in range(batches if rank == 0 else 0):
                replay_buffer.sample(BATCH)

        def by_itself(dataset: TorchRLBufferDataset = dataset) -> None:
            with alone():
                exhaust(dataset) if rank == 0 else None

        ways = {"sample": sample, "alone": by_itself, "ranks": lambda dataset=dataset: exhaust(dataset)}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, run in ways.items():
                times[name].append(milliseconds(run, batches))
        if rank == 0:
            answers.put((storage.__name__, times))
    dist.barrier()
    dist.destroy_process_group()


def measure(report: Report) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    batches, turns = (20, 3) if report.quick else (100, 9)
    context = multiprocessing.spawn(rank_of, (port, batches, turns, answers), nprocs=2, join=False)
    results = [answers.get() for _ in range(2)]
    while not context.join():
        pass
    for storage, times in results:
        # On the clock the ranks need a processor each, and whatever else runs on the machine counts: no target.
        for clock, name, target in ((0, "processor time of rank 0", 3.0), (1, "on the clock", None)):
            sample, by_itself, ranks = ([turn[clock] for turn in times[way]] for way in ("sample", "alone", "ranks"))
            report.claim(
                f"a second rank: added to a batch of {BATCH} rows of {TOKENS} tokens, {storage}, {name}",
                Figure.of((b - a) / one for one, a, b in zip(sample, by_itself, ranks, strict=True)),
                "× sampling the batch",
                at_most=target,
                ways={way: f"{Figure.of(turn[clock] for turn in times[way]).median:.2f} ms" for way in times},
            )


if __name__ == "__main__":
    main(__doc__, measure)
