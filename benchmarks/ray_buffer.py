"""A dataset on a Ray buffer gives rows about as fast as the buffer gives batches."""

from __future__ import annotations

import functools

import ray
import torch
from measuring import Report, Times, main, on_the_clock
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, RayReplayBuffer

from torchrl_trl_bridge import TorchRLBufferDataset

ROWS, TOKENS, BATCH, BATCHES = 4096, 512, 256, 10


def filled(storage: type) -> RayReplayBuffer:
    replay_buffer = RayReplayBuffer(
        storage=functools.partial(storage, ROWS), batch_size=BATCH, remote_config={"num_cpus": 0}
    )
    tokens = torch.randint(1000, (ROWS, TOKENS))
    rows = torch.arange(ROWS)
    if storage is LazyTensorStorage:
        replay_buffer.extend(TensorDict({"input_ids": tokens, "row": rows}, [ROWS]))
    else:
        data = [TensorDict({"input_ids": tokens[n, n % 64 :].clone(), "row": rows[n]}) for n in range(ROWS)]
        replay_buffer.extend(lazy_stack(data))
    row = next(iter(TorchRLBufferDataset(replay_buffer, BATCH)))
    stored = tokens[row["row"]]
    assert torch.equal(row["input_ids"], stored[TOKENS - len(row["input_ids"]) :]), "a row comes as it was written"
    return replay_buffer


def sample(replay_buffer: RayReplayBuffer) -> None:
    for _ in range(BATCHES):
        replay_buffer.sample(BATCH)


def exhaust(dataset: TorchRLBufferDataset) -> None:
    for _ in dataset:
        pass


def measure(report: Report) -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        for storage in (LazyTensorStorage, LazyStackStorage):
            replay_buffer = filled(storage)
            ways = {
                "sample alone": functools.partial(sample, replay_buffer),
                "bridge": functools.partial(exhaust, TorchRLBufferDataset(replay_buffer, BATCH, num_batches=BATCHES)),
            }
            turns: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(4 if report.quick else 10):
                for name, run in ways.items():
                    measured = on_the_clock(run)
                    if turn:  # the first warms up
                        turns[name].append(measured)
            times = Times(turns)
            report.claim(
                f"rows of {TOKENS} tokens from a Ray buffer, {storage.__name__}, batches of {BATCH}",
                times.ratio("sample alone", "bridge"),
                "× RayReplayBuffer.sample",
                at_least=0.6,
                ways={name: f"{times.speed(name, BATCH * BATCHES):,.0f} rows/s" for name in ways},
            )
            replay_buffer.close()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(__doc__, measure)
