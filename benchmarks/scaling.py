"""How cost grows with the batch, the length of a row, the number of keys and the buffer: by a straight line.

Rows a second of the bridge, and of ``sample`` and ``unbind`` by hand; beside the bridge's points stands what the
straight line through them gives: the time of a batch as ``a + b * x``. For each point, too, the most memory that a
process whose memory is new takes for a pass of a few batches, beside the size of a batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measuring import Report, alone, in_turns, main, peak_memory
from rows import taking
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

from torchrl_trl_bridge import TorchRLBufferDataset

DEFAULTS = {"batch": 256, "length": 512, "keys": 1, "rows": 2048}
LENGTH_IN_FILES = 64
"""Tokens a row of a memory-mapped buffer: a million rows are 0.5 GB."""

POINTS = {
    "batch": ("rows a batch", [8, 32, 128, 512, 2048, 4096]),
    "length": ("tokens a row", [16, 64, 256, 1024, 4096, 8192]),
    "keys": ("keys", [1, 2, 4, 8, 16, 32, 64]),
    "rows": ("rows of a memory-mapped buffer", [1_000, 10_000, 100_000, 1_000_000]),
}


def filled(sizes: dict[str, int], folder: str | None) -> ReplayBuffer:
    names = [f"key{i}" for i in range(sizes["keys"])]
    rows = sizes["rows"]
    storage = LazyTensorStorage(rows) if folder is None else LazyMemmapStorage(rows, scratch_dir=folder)
    replay_buffer = ReplayBuffer(storage=storage)
    for start in range(0, rows, 50_000):
        shape = (min(50_000, rows - start), sizes["length"])
        replay_buffer.extend(TensorDict({name: torch.randint(1000, shape) for name in names}, shape[:1]))
    return replay_buffer


def cases(what: str, points: list[int]) -> Iterator[tuple[int, dict[str, int], bool]]:
    for point in points:
        sizes = {**DEFAULTS, what: point}
        if what == "rows":
            sizes["length"] = LENGTH_IN_FILES
        if what == "length":
            sizes["rows"] = 512
        yield point, sizes, what == "rows"


def speeds(sizes: dict[str, int], memmap: bool) -> tuple[float, float]:
    size = sizes["batch"]
    with tempfile.TemporaryDirectory() as folder:
        replay_buffer = filled(sizes, folder if memmap else None)

        def by_hand() -> Any:
            batch = replay_buffer.sample(size)
            return [values.unbind(0) for values in batch.values()]

        ours = TorchRLBufferDataset(replay_buffer, size, num_batches=None)
        torch.manual_seed(0)
        rows = list(TorchRLBufferDataset(replay_buffer, size))
        torch.manual_seed(0)
        for column, name in zip(by_hand(), rows[0], strict=True):
            assert all(torch.equal(row[name], value) for row, value in zip(rows, column, strict=True))
        del rows, column
        times = in_turns({"bridge": taking(ours, size), "by hand": by_hand}, turns=3, run_time=0.05)
        return times.speed("bridge", size), times.speed("by hand", size)


def memory(sizes: dict[str, int], memmap: bool) -> float:
    """Bytes; what is read of a memory-mapped buffer is the system's to take back, and counts all the same."""
    with tempfile.TemporaryDirectory() as folder:
        replay_buffer = filled(sizes, folder if memmap else None)
        dataset = TorchRLBufferDataset(replay_buffer, sizes["batch"], num_batches=4)
        next(iter(TorchRLBufferDataset(replay_buffer, 2)))
        return peak_memory(taking(dataset, 4 * sizes["batch"]))


def straight(points: list[tuple[int, float]], rows_of: Callable[[int], int]) -> list[tuple[int, float]]:
    """The speeds of the straight line, of the least relative error, through the times of a batch."""
    x = torch.tensor([point for point, _ in points], dtype=torch.double)
    seconds = torch.tensor([rows_of(point) / speed for point, speed in points], dtype=torch.double)
    terms = torch.stack([torch.ones_like(x), x], 1) / seconds[:, None]
    line = torch.linalg.lstsq(terms, torch.ones(len(x), 1, dtype=torch.double)).solution
    fitted = (terms @ line)[:, 0] * seconds
    return [(point, rows_of(point) / float(time)) for (point, _), time in zip(points, fitted, strict=True)]


def measure(report: Report) -> None:
    torch.manual_seed(0)
    for what, (axis, points) in POINTS.items():
        chosen = points[:2] if report.quick else points
        ours, by_hand, peaks, batches = [], [], [], []
        for point, sizes, memmap in cases(what, chosen):
            fast, faster = speeds(sizes, memmap)
            ours.append((point, fast))
            by_hand.append((point, faster))
            peaks.append((point, alone(__file__, "memory", json.dumps(sizes), str(int(memmap))) / 1e6))
            batches.append((point, 8e-6 * sizes["batch"] * sizes["length"] * sizes["keys"]))
        line = straight(ours, lambda point, what=what: point if what == "batch" else DEFAULTS["batch"])
        off = max(abs(fitted / speed - 1) for (_, fitted), (_, speed) in zip(line, ours, strict=True))
        report.claim(f"speed by {axis}: the farthest point from a straight line", 100 * off, "%")
        lines = {"bridge": ours, "sample + unbind": by_hand, "straight line": line}
        report.curve(f"speed-{what}", f"Speed by {axis}", axis, "rows a second", lines)
        lines = {"bridge, peak": peaks, "one batch": batches}
        report.curve(f"memory-{what}", f"Memory by {axis}", axis, "MB", lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        torch.set_num_threads(1)
        print(json.dumps(memory(json.loads(sys.argv[2]), sys.argv[3] == "1")))
    else:
        main(__doc__, measure)
