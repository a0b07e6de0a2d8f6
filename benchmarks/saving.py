"""A buffer of 100,000 rows of 512 tokens is saved, and loaded, in seconds; it is checked that each row came back."""

from __future__ import annotations

import tempfile

import torch
from measuring import Figure, Report, main, on_the_clock
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer

from torchrl_trl_bridge import load_buffer, save_buffer

TOKENS = 512
SECONDS = 5


def dense(rows: int) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(rows))
    replay_buffer.extend(TensorDict({"tokens": torch.randint(1000, (rows, TOKENS))}, [rows]))
    return replay_buffer


def ragged(rows: int) -> ReplayBuffer:
    """Rows like a collector's: a string, and tokens of 449 to 512."""
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(rows))
    tokens = torch.randint(1000, (rows, TOKENS))
    replay_buffer.extend(
        lazy_stack([TensorDict({"tokens": tokens[n, n % 64 :].clone(), "text": f"row {n}"}) for n in range(rows)])
    )
    return replay_buffer


def measure(report: Report) -> None:
    rows = 10_000 if report.quick else 100_000
    for name, make in {
        "one length, LazyTensorStorage": dense,
        "ragged with a string, LazyStackStorage": ragged,
    }.items():
        replay_buffer = make(rows)
        restored = ReplayBuffer(storage=type(replay_buffer.storage)(rows))
        saving, loading = [], []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(1 if report.quick else 3):
                saving.append(on_the_clock(save_buffer, replay_buffer, folder))
                loading.append(on_the_clock(load_buffer, restored, folder))
        for row in range(0, rows, 997):
            assert torch.equal(restored[row]["tokens"], replay_buffer[row]["tokens"])
            assert restored[row].get("text", None) == replay_buffer[row].get("text", None)
        for work, measured in (("saving", saving), ("loading", loading)):
            report.claim(f"{work} {rows:,} rows of {TOKENS} tokens, {name}", Figure.of(measured), "s", at_most=SECONDS)


if __name__ == "__main__":
    main(__doc__, measure)
