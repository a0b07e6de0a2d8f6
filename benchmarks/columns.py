"""What the columns of dataset types cost, beside flattening the same keys."""

from __future__ import annotations

from typing import Any

import torch
from measuring import Report, in_turns, main
from rows import filled, taking
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.data.llm import History

from torchrl_trl_bridge import DatasetType, TorchRLBufferDataset

ROWS = 2048
TOKENS = 512
BATCH = 256

TOKEN_KEYS = [("tokens", "full"), ("tokens", "prompt"), ("masks", "all_attention_mask")]
TEXT_KEYS = [("text", "prompt"), ("text", "response"), ("text", "full")]


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


def compare(report: Report, name: str, replay_buffer: ReplayBuffer, columns: Any, keys: list[Any]) -> None:
    ways = {
        way: taking(TorchRLBufferDataset(replay_buffer, BATCH, num_batches=None, **which), BATCH)
        for way, which in (("columns", {"columns": columns}), ("keys", {"keys": keys}))
    }
    times = in_turns(ways, turns=3 if report.quick else 9)
    speeds = {way: f"{times.speed(way, BATCH):,.0f} rows/s" for way in ways}
    work = f"columns of a dataset type: {name}, batch {BATCH}"
    report.claim(work, times.ratio("columns", "keys"), "× the time of the keys alone", ways=speeds)


def measure(report: Report) -> None:
    torch.manual_seed(0)
    ragged = filled(LazyStackStorage, token_rows(ROWS, ragged=True, padding=0))
    padded = filled(LazyStackStorage, token_rows(ROWS, ragged=True, padding=100))
    dense = filled(LazyTensorStorage, token_rows(ROWS, ragged=False, padding=100))
    text, history = filled(LazyStackStorage, text_rows()), filled(LazyStackStorage, history_rows())
    first = next(iter(TorchRLBufferDataset(padded, BATCH, columns="tokenized")))
    assert len(first["input_ids"]) == len(first["completion_mask"])
    compare(report, "tokenized, ragged", ragged, "tokenized", TOKEN_KEYS)
    compare(report, "tokenized, padded, removed", padded, "tokenized", TOKEN_KEYS)
    compare(report, "tokenized, padded dense, removed", dense, "tokenized", TOKEN_KEYS)
    compare(report, "tokenized, padded dense, labels", dense, DatasetType("tokenized", labels=True), TOKEN_KEYS)
    compare(report, "prompt-completion, text", text, "prompt-completion", TEXT_KEYS)
    compare(report, "language-modeling, text", text, "language-modeling", TEXT_KEYS)
    compare(report, "prompt-completion, history", history, "prompt-completion", [("history", "full")])
    compare(report, "language-modeling, history", history, "language-modeling", [("history", "full")])


if __name__ == "__main__":
    main(__doc__, measure)
