"""The share of an SFT step that is spent in the bridge: a small model, batches of 8, on one thread.

The steps are those of TRL's trainer, its loader and its collator included, from the end of one to the end of the next;
the bridge's part of them is what the same stream takes to give 8 rows, timed by itself.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import Figure, Report, in_turns, main
from rows import filled, ragged, taking
from torchrl.data import LazyStackStorage
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from torchrl_trl_bridge import TorchRLBufferDataset
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer

BATCH = 8


class Steps(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.process_time())


def share(report: Report, name: str, steps: int, at_most: float | None, **config: Any) -> None:
    dataset = TorchRLBufferDataset(filled(LazyStackStorage, ragged(1024)), 64, num_batches=None)
    noted, tokenizer = Steps(), tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_causal_lm(Path(folder, "model"), tokenizer, vocab_size=1000, **config)
        arguments = SFTConfig(
            str(Path(folder, "out")),
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        stream = dataset.as_hf_dataset()
        trainer = SFTTrainer(model, arguments, train_dataset=stream, processing_class=tokenizer, callbacks=[noted])
        trainer.train()
    times = in_turns({"bridge": taking(dataset.as_hf_dataset(), BATCH)}, turns=9)
    step = Figure.of(after - before for before, after in zip(noted.ends[1:], noted.ends[2:], strict=False))
    rows = statistics.median(times.turns["bridge"])
    figure = Figure(*(100 * rows / seconds for seconds in (step.median, step.high, step.low)))
    ways = {"a step": f"{step.median * 1e3:.0f} ms", "its rows": f"{rows * 1e6:.0f} us"}
    report.claim(f"share of an SFT step, {name}, batch {BATCH}, 512 tokens", figure, "%", at_most=at_most, ways=ways)


def measure(report: Report) -> None:
    torch.manual_seed(0)
    steps = 4 if report.quick else 12
    small = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    share(report, "4 layers of 128", steps, 3, **small)
    share(report, "2 layers of 16", steps, None, hidden_size=16, num_hidden_layers=2)


if __name__ == "__main__":
    main(__doc__, measure)
