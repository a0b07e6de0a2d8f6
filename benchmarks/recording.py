"""What it costs to record a rollout, how fast a dataset fills a buffer, and how much memory a long stream takes.

``python benchmarks/recording.py --stream 1000000`` passes so many rows through a buffer, which takes some minutes. Each
part also asserts that what was written is what was given.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from measuring import Figure, Report, in_turns, main
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_trl_bridge import RolloutRecorder, TorchRLBufferDataset, extend_from_dataset
from torchrl_trl_bridge.tiny import tiny_tokenizer

TURNS = 5
COMPLETIONS = 256
GROUP = 8
TOKENS = 128
ROWS = 10_000


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def completions(conversational: bool) -> dict[str, list[Any]]:
    text = "x" * TOKENS
    questions = [f"question {i // GROUP}" for i in range(COMPLETIONS)]
    if not conversational:
        return {"prompts": questions, "completions": [text] * COMPLETIONS, "completion_ids": ids()}
    return {
        "prompts": [[{"role": "user", "content": question}] for question in questions],
        "completions": [[{"role": "assistant", "content": text}]] * COMPLETIONS,
        "completion_ids": ids(),
    }


def ids() -> list[list[int]]:
    return torch.randint(1, 200, (COMPLETIONS, TOKENS)).tolist()


def recording(report: Report, conversational: bool) -> None:
    """What a recorder adds to the reward function by itself."""
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(COMPLETIONS))
    recorder = RolloutRecorder(replay_buffer, reward, tokenizer=tiny_tokenizer())
    given = completions(conversational)
    recorder(**given)
    assert len(replay_buffer) == COMPLETIONS
    assert replay_buffer[0]["tokens"].response.tolist() == given["completion_ids"][0]
    times = in_turns({"recorder": lambda: recorder(**given), "function": lambda: reward(**given)}, turns=TURNS)
    added = times.difference("recorder", "function")
    work = f"recording a completion, {name_of(conversational)}, {TOKENS} tokens"
    report.claim(work, added.scaled(1e3 / COMPLETIONS), "ms")


def name_of(conversational: bool) -> str:
    return "conversation" if conversational else "text"


def table(conversational: bool, rows: int = ROWS) -> datasets.Dataset:
    prompts, answers = [f"What is {i} + {i}?" for i in range(rows)], [str(i + i) for i in range(rows)]
    if not conversational:
        return datasets.Dataset.from_dict({"prompt": prompts, "completion": answers})
    return datasets.Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": prompt}] for prompt in prompts],
            "completion": [[{"role": "assistant", "content": answer}] for answer in answers],
        }
    )


def filling(report: Report, conversational: bool, tokenizer: Any = None) -> None:
    rows = ROWS // 5 if report.quick or conversational or tokenizer is not None else ROWS
    dataset = table(conversational, rows)
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(rows))

    def fill() -> None:
        extend_from_dataset(replay_buffer, dataset, tokenizer=tokenizer, progress=False)

    seconds = in_turns({"fill": fill}, turns=TURNS).seconds("fill")
    back = TorchRLBufferDataset(replay_buffer, 1, columns="prompt-completion").as_hf_dataset(streaming=False)
    assert back[:100] == dataset[:100]
    figure = Figure(rows / seconds.median, rows / seconds.high, rows / seconds.low)
    tokenized = "" if tokenizer is None else ", tokenized"
    report.claim(f"filling a buffer from a dataset, {name_of(conversational)}{tokenized}", figure, "rows/s")


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def streaming(rows: int) -> None:
    """Reports the memory of the process while a stream passes through a buffer of 10,000 rows."""
    every = max(rows // 10, 1)
    measured: list[float] = []

    def generate() -> Iterator[dict[str, str]]:
        for i in range(rows):
            if i % every == 0:
                measured.append(resident_mib())
            yield {"prompt": f"What is {i} + {i}?", "completion": str(i + i)}

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(ROWS))
    start = time.process_time()
    written = extend_from_dataset(replay_buffer, datasets.IterableDataset.from_generator(generate), progress=False)
    taken = time.process_time() - start
    assert written == rows
    print(f"stream of {rows:,} rows through a buffer of {ROWS:,}: {rows / taken:,.0f} rows/s; MiB after each tenth:")
    print("  " + " ".join(f"{mib:.0f}" for mib in [*measured[1:], resident_mib()]))


def measure(report: Report) -> None:
    for conversational in (False, True):
        recording(report, conversational)
        filling(report, conversational)
        filling(report, conversational, tiny_tokenizer())


if __name__ == "__main__":
    if "--stream" in sys.argv[1:2]:
        streaming(int(sys.argv[2]))
    else:
        main(__doc__, measure)
