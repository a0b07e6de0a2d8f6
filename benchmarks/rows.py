"""Rows per second of a buffer dataset, beside torchrl's own class and beside sampling and unbinding by hand.

Run: ``python benchmarks/rows.py``. All ways are timed in one process, in turns; the figures are medians of the turns,
and the ratios medians of the ratios within a turn, so that a busy machine moves them little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.benchmark import Timer
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.modules.llm.trl_interop import TorchRLBufferDataset as TorchRLsOwn

from torchrl_trl_bridge import TorchRLBufferDataset

TOKENS = 512
ROWS = 4096
TURNS = 9


def filled(storage: type, ragged: bool) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(ROWS))
    if ragged:
        rows = [TensorDict({"input_ids": torch.randint(1000, (TOKENS - i % 64,))}) for i in range(ROWS)]
        replay_buffer.extend(lazy_stack(rows))
    else:
        replay_buffer.extend(TensorDict({"input_ids": torch.randint(1000, (ROWS, TOKENS))}, [ROWS]))
    return replay_buffer


def by_hand(replay_buffer: ReplayBuffer, batch_size: int) -> Any:
    batch = replay_buffer.sample(batch_size)
    if hasattr(batch, "tensordicts"):
        return [row.get("input_ids") for row in batch.unbind(0)]
    return batch.get("input_ids").unbind(0)


def exhaust(dataset: Any) -> None:
    for _ in dataset:
        pass


def ways(replay_buffer: ReplayBuffer, batch_size: int) -> dict[str, Callable[[], Any]]:
    ours = TorchRLBufferDataset(replay_buffer, batch_size)
    stream = ours.as_hf_dataset()
    theirs = TorchRLsOwn(replay_buffer, batch_size)
    return {
        "bridge": lambda: exhaust(ours),
        "bridge, Hugging Face stream": lambda: exhaust(stream),
        "torchrl": lambda: exhaust(theirs),
        "by hand": lambda: by_hand(replay_buffer, batch_size),
        "sample alone": lambda: replay_buffer.sample(batch_size),
    }


def measure(replay_buffer: ReplayBuffer, batch_size: int) -> dict[str, list[float]]:
    """Rows per second of each way, one figure a turn; a way that fails is left out."""
    functions = ways(replay_buffer, batch_size)
    timers = {}
    for name, function in functions.items():
        try:
            function()
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0][:70]}")
            continue
        timers[name] = Timer("run()", globals={"run": function})
    speeds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(TURNS):
        for name, timer in timers.items():
            speeds[name].append(batch_size / timer.blocked_autorange(min_run_time=0.1).median)
    return speeds


def main() -> None:
    torch.manual_seed(0)
    for storage, batch_size, ragged in (
        (LazyTensorStorage, 32, False),
        (LazyTensorStorage, 256, False),
        (ListStorage, 256, False),
        (LazyStackStorage, 256, True),
    ):
        print(f"{storage.__name__}, {'ragged, ' if ragged else ''}batch {batch_size}, {TOKENS} tokens")
        speeds = measure(filled(storage, ragged), batch_size)
        for name, figures in speeds.items():
            ratio = statistics.median(ours / other for ours, other in zip(speeds["bridge"], figures, strict=True))
            print(f"  {name:28} {statistics.median(figures):>10,.0f} rows/s   bridge / it: {ratio:6.2f}")


if __name__ == "__main__":
    main()
