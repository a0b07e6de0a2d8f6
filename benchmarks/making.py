"""What it costs to make a Hugging Face stream of buffers of 0.4 GB and 4 GB, and a snapshot of 100,000 rows.

Each is made in a process of its own, so that its memory is new. A stream's columns are asked for, too, as a trainer
does first: that reads 16 rows. Beside the snapshot stands ``datasets.Dataset.from_list`` of the rows as lists. That
takes so long, and so much memory, that it is given a twentieth of the rows, and its time multiplied; making the lists
is not timed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from measuring import Figure, Report, alone, in_turns, main, peak_memory
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from torchrl.modules.llm.trl_interop import TorchRLBufferDataset as TorchRLsOwn

from torchrl_trl_bridge import TorchRLBufferDataset

TOKENS = 512
REPEATS = 5


def filled(gigabytes: float, folder: str | None = None) -> ReplayBuffer:
    """A buffer of so many bytes, in memory or memory-mapped, every row of it written."""
    rows = int(gigabytes * 1e9 / (TOKENS * 8))
    storage = LazyTensorStorage(rows) if folder is None else LazyMemmapStorage(rows, scratch_dir=folder)
    replay_buffer = ReplayBuffer(storage=storage)
    written = TensorDict({"input_ids": torch.ones(10_000, TOKENS, dtype=torch.long)}, [10_000])
    while len(replay_buffer) < rows:
        replay_buffer.extend(written[: rows - len(replay_buffer)])
    return replay_buffer


def make(replay_buffer: ReplayBuffer) -> dict[str, float]:
    TorchRLBufferDataset(small(), 8).as_hf_dataset().column_names  # noqa: B018  # so that imports are not measured
    times = []

    def measured() -> Any:
        started = time.perf_counter()
        stream = TorchRLBufferDataset(replay_buffer, 256).as_hf_dataset()
        assert stream.column_names == ["input_ids"]
        times.append(time.perf_counter() - started)
        return stream

    memory = peak_memory(measured)
    first = times[0]
    for _ in range(REPEATS):
        measured()
    return {"first": first, "again": statistics.median(times[1:]), "memory": memory}


def make_theirs(replay_buffer: ReplayBuffer) -> dict[str, float]:
    list(TorchRLsOwn(small(), 8).as_hf_dataset())
    started = time.perf_counter()
    memory = peak_memory(TorchRLsOwn(replay_buffer, 256).as_hf_dataset)
    return {"first": time.perf_counter() - started, "memory": memory}


def small() -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    replay_buffer.extend(TensorDict({"input_ids": torch.ones(8, TOKENS, dtype=torch.long)}, [8]))
    return replay_buffer


def snapshot(rows: int) -> dict[str, Any]:
    import datasets

    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(rows))
    replay_buffer.extend(TensorDict({"input_ids": torch.randint(1000, (rows, TOKENS))}, [rows]))
    dataset = TorchRLBufferDataset(replay_buffer, 256)
    few = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in replay_buffer[:100]["input_ids"]])
    assert dataset.as_hf_dataset(streaming=False)[:100] == few[:]

    part = rows // 20  # from_list takes so long, and so much memory, that it is given a part
    lists = [{"input_ids": row.tolist()} for row in replay_buffer[:part]["input_ids"]]
    ways = {
        "bridge": lambda: dataset.as_hf_dataset(streaming=False),
        "from_list": lambda: datasets.Dataset.from_list(lists),
    }
    times = in_turns(ways, turns=3, run_time=0.01)
    lists.clear()
    return {**times.turns, "part": part, "memory": peak_memory(ways["bridge"]) / (rows * TOKENS * 8)}


def measure(report: Report) -> None:
    small, large = (0.04, 0.4) if report.quick else (0.4, 4.0)
    made = {f"{size:g} GB": alone(__file__, "make", str(size)) for size in (small, large)}
    made[f"{small:g} GB, memory-mapped"] = alone(__file__, "memmap", str(small))
    for name, figures in made.items():
        work = f"making the Hugging Face stream, {name}"
        ways = {"first": f"{figures['first'] * 1e3:.2f} ms", "again": f"{figures['again'] * 1e3:.2f} ms"}
        report.claim(work, figures["first"] * 1e3, "ms", at_most=50, ways=ways)
        report.claim(work, figures["memory"] / 1e6, "MB of new memory", at_most=20)
    again = made[f"{large:g} GB"]["again"] / made[f"{small:g} GB"]["again"]
    report.claim(f"making the Hugging Face stream, {large:g} GB", again, f"× the time of {small:g} GB")
    ours, theirs = made[f"{small:g} GB"], alone(__file__, "theirs", str(small))
    both = {"bridge": ours, "torchrl's class": theirs}
    ways = {name: f"{way['first'] * 1e3:.1f} ms, {way['memory'] / 1e6:.1f} MB" for name, way in both.items()}
    work = f"making the Hugging Face stream, {small:g} GB"
    report.claim(work, theirs["first"] / ours["first"], "× torchrl's class", ways=ways)

    rows = 5_000 if report.quick else 100_000
    figures = alone(__file__, "snapshot", str(rows))
    share = rows / figures["part"]
    ratio = Figure.of(a * share / b for a, b in zip(figures["from_list"], figures["bridge"], strict=True))
    ways = {
        way: f"{statistics.median(figures[way]) * factor:.2f} s"
        for way, factor in (("bridge", 1), ("from_list", share))
    }
    work = f"snapshot, {rows:,} rows of {TOKENS} tokens"
    report.claim(work, ratio, "× from_list", at_least=5, ways=ways)
    report.claim(work, figures["memory"], "× the data in new memory, at most")


def part() -> Any:
    way, size = sys.argv[1], float(sys.argv[2])
    if way == "snapshot":
        return snapshot(int(size))
    if way == "memmap":
        with tempfile.TemporaryDirectory() as folder:
            return make(filled(size, folder))
    return (make if way == "make" else make_theirs)(filled(size))


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ("make", "theirs", "memmap", "snapshot"):
        torch.set_num_threads(1)
        print(json.dumps(part()))
    else:
        main(__doc__, measure)
