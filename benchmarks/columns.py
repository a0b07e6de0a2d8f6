"""What the columns of dataset types cost, beside flattening the same keys, and a snapshot of 100,000 tokenized rows.

Run: ``python benchmarks/columns.py``. Both ways are timed in turns in one process, by its processor time, so that a
busy machine moves the figures little; a figure is the best of its turns. Each snapshot is made in a process of its own,
so that its memory is new.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.data.llm import History

from torchrl_trl_bridge import DatasetType, TorchRLBufferDataset

ROWS = 2048
TOKENS = 512
BATCH = 256
TURNS = 9
SNAPSHOT_ROWS = 100_000

TOKEN_KEYS = [("tokens", "full"), ("tokens", "prompt"), ("masks", "all_attention_mask")]
TEXT_KEYS = [("text", "prompt"), ("text", "response"), ("text", "full")]


def filled(storage: type, rows: Any) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(len(rows)))
    replay_buffer.extend(rows)
    return replay_buffer


def token_rows(size: int, *, ragged: bool, padding: int) -> Any:
    """Rollouts of about 512 tokens, half of them prompt, with up to ``padding`` on the left."""
    rows = []
    for i in range(size):
        length = TOKENS - (i % 64 if ragged else 0)
        ids, mask = torch.randint(1000, (length,)), torch.ones(length, dtype=torch.bool)
        mask[: i % (padding + 1)] = False
        tokens = {"full": ids, "prompt": ids[: length // 2].clone()}
        rows.append(TensorDict({"tokens": tokens, "masks": {"all_attention_mask": mask}}))
    return lazy_stack(rows) if ragged else torch.stack(rows)


def text_rows() -> Any:
    text = {"prompt": "p" * 300, "response": "r" * 300, "full": "p" * 300 + "r" * 300}
    return lazy_stack([TensorDict({"text": text}) for _ in range(ROWS)])


def history_rows() -> Any:
    chat = [{"role": role, "content": "c" * 200} for role in ("system", "user", "assistant")]
    histories = History.from_chats([chat] * ROWS)
    return lazy_stack([TensorDict({"history": {"full": histories[i]}}) for i in range(ROWS)])


def seconds_per_row(rows: Any) -> float:
    started = time.process_time()
    for _ in range(8 * BATCH):
        next(rows)
    return (time.process_time() - started) / (8 * BATCH)


def compare(name: str, replay_buffer: ReplayBuffer, columns: Any, keys: list[Any]) -> None:
    ways = [{"columns": columns}, {"keys": keys}]
    streams = [iter(TorchRLBufferDataset(replay_buffer, BATCH, num_batches=None, **way)) for way in ways]
    times = [[seconds_per_row(stream) for stream in streams] for _ in range(TURNS)]
    ours, flat = (min(turn[way] for turn in times[1:]) for way in range(2))
    print(f"{name:<42}{1 / ours:>12,.0f}{1 / flat:>12,.0f}{ours / flat - 1:>+9.0%}")


def resident() -> float:
    """MiB of memory that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def snapshot(name: str, replay_buffer: ReplayBuffer) -> None:
    dataset = TorchRLBufferDataset(replay_buffer, BATCH, columns="tokenized")
    dataset.as_hf_dataset().column_names  # noqa: B018  # so that imports are not timed
    before, peak, done = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    started, worked = time.perf_counter(), time.process_time()
    table = dataset.as_hf_dataset(streaming=False)
    elapsed, worked = time.perf_counter() - started, time.process_time() - worked
    done.set()
    thread.join()
    size = table.data.nbytes / 2**20
    new = max(peak[0], resident()) - before
    print(
        f"{name:<18}{elapsed:>6.2f} s ({worked:.2f} s of a processor), at most {new:,.0f} MiB of new memory for "
        f"{size:,.0f} MiB of data: {new / size:.2f} times"
    )


def main() -> None:
    print(f"{'rows per second, batches of ' + str(BATCH):<42}{'columns':>12}{'keys':>12}{'cost':>9}")
    ragged = filled(LazyStackStorage, token_rows(ROWS, ragged=True, padding=0))
    padded = filled(LazyStackStorage, token_rows(ROWS, ragged=True, padding=100))
    dense = filled(LazyTensorStorage, token_rows(ROWS, ragged=False, padding=100))
    text, history = filled(LazyStackStorage, text_rows()), filled(LazyStackStorage, history_rows())
    compare("tokenized, ragged", ragged, "tokenized", TOKEN_KEYS)
    compare("tokenized, padded, removed", padded, "tokenized", TOKEN_KEYS)
    compare("tokenized, padded dense, removed", dense, "tokenized", TOKEN_KEYS)
    compare("tokenized, padded dense, with labels", dense, DatasetType("tokenized", labels=True), TOKEN_KEYS)
    compare("prompt-completion, text", text, "prompt-completion", TEXT_KEYS)
    compare("language-modeling, text", text, "language-modeling", TEXT_KEYS)
    compare("prompt-completion, history", history, "prompt-completion", [("history", "full")])
    compare("language-modeling, history", history, "language-modeling", [("history", "full")])
    del ragged, padded, dense, text, history
    print(f"\nsnapshot of {SNAPSHOT_ROWS:,} tokenized rows of {TOKENS}", flush=True)
    for padding in (0, 100):
        subprocess.run([sys.executable, __file__, str(padding)], check=True)


def snapshot_alone(padding: int) -> None:
    ids = torch.randint(1000, (SNAPSHOT_ROWS, TOKENS))
    mask = torch.arange(TOKENS) >= torch.randint(padding + 1, (SNAPSHOT_ROWS, 1))
    tokens = {"full": ids, "prompt": ids[:, : TOKENS // 2].contiguous()}
    rows = TensorDict({"tokens": tokens, "masks": {"all_attention_mask": mask}}, [SNAPSHOT_ROWS])
    snapshot("padded, removed" if padding else "without padding", filled(LazyTensorStorage, rows))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        snapshot_alone(int(sys.argv[1]))
    else:
        main()
