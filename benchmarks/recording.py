"""What it costs to record a rollout, how fast a dataset fills a buffer, and how much memory a long stream takes.

Run: ``python benchmarks/recording.py``, with ``--stream 1000000`` for the last part, which takes some minutes. Times
are medians of several turns, in processor time, which a busy machine moves less; all of it is done in one thread. Each
part also asserts that what was written is what was given.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_trl_bridge import RolloutRecorder, TorchRLBufferDataset, extend_from_dataset
from torchrl_trl_bridge.tiny import tiny_tokenizer

TURNS = 7
COMPLETIONS = 256
GROUP = 8
TOKENS = 128
ROWS = 10_000


def seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(TURNS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


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


def recording(conversational: bool) -> float:
    """Milliseconds a completion beyond the reward function's own time."""
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(COMPLETIONS))
    recorder = RolloutRecorder(replay_buffer, reward, tokenizer=tiny_tokenizer())
    given = completions(conversational)
    with_recorder, without = seconds(lambda: recorder(**given)), seconds(lambda: reward(**given))
    assert len(replay_buffer) == COMPLETIONS
    assert replay_buffer[0]["tokens"].response.tolist() == given["completion_ids"][0]
    return (with_recorder - without) / COMPLETIONS * 1000


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


def filling(conversational: bool, tokenizer: Any = None) -> float:
    """Rows a second."""
    dataset = table(conversational, ROWS if tokenizer is None and not conversational else ROWS // 5)
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(len(dataset)))
    taken = seconds(lambda: extend_from_dataset(replay_buffer, dataset, tokenizer=tokenizer, progress=False))
    back = TorchRLBufferDataset(replay_buffer, 1, columns="prompt-completion").as_hf_dataset(streaming=False)
    assert back[:100] == dataset[:100]
    return len(dataset) / taken


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", type=int, default=0, help="also stream so many rows through a buffer")
    options = parser.parse_args()
    for conversational, name in ((False, "text"), (True, "conversations")):
        print(f"recording, {name}, {TOKENS} tokens: {recording(conversational):.3f} ms a completion")
    for conversational, name in ((False, "text"), (True, "conversations")):
        print(f"filling from a dataset, {name}: {filling(conversational):,.0f} rows/s")
        print(f"filling from a dataset, {name}, tokenized: {filling(conversational, tiny_tokenizer()):,.0f} rows/s")
    if options.stream:
        streaming(options.stream)


if __name__ == "__main__":
    main()
