"""Where the time of a batch goes: one batch's way through the bridge, by file.

The process is looked at each millisecond of its processor time (``signal.setitimer``): the file whose code then runs,
or has called the C function that runs, gets it. ``cProfile`` counts each call instead, and what that takes would be
charged to the files that are entered once a row.
"""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from measuring import Report, main
from rows import dense, filled, nested, ragged, taking
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage

import torchrl_trl_bridge
from torchrl_trl_bridge import TorchRLBufferDataset

PACKAGE = Path(torchrl_trl_bridge.__path__[0])
OTHERS = ("torchrl", "tensordict", "torch", "datasets")
BATCH = 256


def name_of(file: str) -> str:
    """A file of the package by its name; other files by their library; this script's own are the consumer."""
    path = Path(file)
    if path.is_relative_to(PACKAGE):
        return str(path.relative_to(PACKAGE))
    parts = path.parts[path.parts.index("site-packages") + 1 :] if "site-packages" in path.parts else ()
    return next((f"{library}" for library in OTHERS if library in parts[:1]), "the consumer")


def looked_at(run: Callable[[], Any], seconds: float) -> tuple[collections.Counter[str], float]:
    """How often each file was at work, and the seconds a call."""
    seen: collections.Counter[str] = collections.Counter()

    def look(number: int, frame: FrameType | None) -> None:
        if frame is not None:
            seen[name_of(frame.f_code.co_filename)] += 1

    before = signal.signal(signal.SIGPROF, look)
    started, calls = time.process_time(), 0
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        while time.process_time() - started < seconds:
            run()
            calls += 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return seen, (time.process_time() - started) / calls


def measure(report: Report) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases: list[Any] = [
        ("LazyTensorStorage, 512 tokens", filled(LazyTensorStorage, dense())),
        ("ListStorage, 512 tokens", filled(ListStorage, dense())),
        ("LazyStackStorage, ragged", filled(LazyStackStorage, ragged())),
        ("LazyTensorStorage, 14 leaves", filled(LazyTensorStorage, nested())),
    ]
    for name, replay_buffer in cases:
        dataset = TorchRLBufferDataset(replay_buffer, BATCH, num_batches=None)
        for form, rows in (("", dataset), (", Hugging Face stream", dataset.as_hf_dataset())):
            take = taking(rows, BATCH)
            take()
            seen, seconds = looked_at(take, 0.5 if report.quick else 2.0)
            looks = sum(seen.values())
            ways = {file: f"{count / looks:.0%}" for file, count in seen.most_common() if count > looks / 200}
            report.claim(f"one batch of {BATCH} by file, {name}{form}", seconds * 1e6, "us", ways=ways)


if __name__ == "__main__":
    main(__doc__, measure)
