"""What a trainer trains on, as it comes to each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def seen_by_steps(trainer: Any, read: Callable[[dict[str, torch.Tensor]], Iterable[Any]]) -> list[Any]:
    """What ``read`` gives of the inputs of each step of a trainer: a list that fills while it trains."""
    seen: list[Any] = []
    step = trainer.training_step

    def training_step(model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args: Any) -> Any:
        seen.extend(read(inputs))
        return step(model, inputs, *args)

    trainer.training_step = training_step
    return seen


def texts_seen_by_steps(trainer: Any, tokenizer: Any) -> list[str]:
    """The text of each row of each step; of a pair, those of both."""

    def read(inputs: dict[str, torch.Tensor]) -> list[str]:
        batches = [ids for name, ids in inputs.items() if name in _IDS]
        return [tokenizer.decode(ids, skip_special_tokens=True) for batch in batches for ids in batch]

    return seen_by_steps(trainer, read)


# The latter are names of DPO and KTO before TRL 1.
_IDS = ("input_ids", "chosen_input_ids", "rejected_input_ids", "completion_input_ids")
