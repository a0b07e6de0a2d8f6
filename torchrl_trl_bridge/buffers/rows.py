"""Rows as a TorchRL ``LLMCollector`` writes them, from plain values."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.modules.llm.policies import ChatHistory, Masks, Text, Tokens

from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.compat.tensordict import MetaData, non_tensor
from torchrl_trl_bridge.messages import join_histories, messages_to_history

RESERVED = frozenset(
    {"done", "group_id", "history", "log_probs", "masks", "next", "policy_version", "query", "rewards"}
    | {"terminated", "text", "tokens", "truncated"}
)
"""The keys of a rollout that no column of a dataset may take."""


def text(**parts: str | None) -> Any:
    """A ``Text`` of the parts ``prompt``, ``response`` and ``full``; what is None is left out."""
    return Text.from_tensordict(
        TensorDict({name: non_tensor(part) for name, part in parts.items() if part is not None})
    )


def history(*, prompt: Any = None, response: Any = None, full: Any = None, cut_off: bool = False) -> Any:
    """A ``ChatHistory`` of conversations, each a list of messages; prompt and response make the full one.

    ``cut_off`` tells that the last message of the response was not ended.
    """
    histories = {}
    if prompt is not None:
        histories["prompt"] = messages_to_history(prompt)
    if response is not None:
        histories["response"] = messages_to_history(response, is_complete=not cut_off)
        histories["full"] = join_histories(*histories.values())
    if full is not None:
        histories["full"] = messages_to_history(full)
    return ChatHistory.from_tensordict(TensorDict(histories))


def next_history(before: Any) -> Any:
    """The ``ChatHistory`` after a step, whose prompt is the whole conversation so far."""
    return ChatHistory.from_tensordict(TensorDict({"prompt": join_histories(before.full)}))


def tokens(
    *, prompt: list[int] | None = None, response: list[int] | None = None, full: list[int] | None = None
) -> dict[str, Any]:
    """``tokens`` and ``masks`` of token ids (int64 and bool, without padding); what is None is left out.

    Prompt and response make the full row, which has the mask.
    """
    if prompt is not None and response is not None:
        full = [*prompt, *response]
    parts = {"prompt": prompt, "response": response, "full": full}
    leaves: dict[str, Any] = {
        name: torch.tensor(part, dtype=torch.long) for name, part in parts.items() if part is not None
    }
    # `padded` tells how a batch was written; it is no value of a row.
    made = {"tokens": Tokens.from_tensordict(TensorDict({**leaves, "padded": MetaData(False)}))}
    if full is not None:
        mask = torch.ones(len(full), dtype=torch.bool)
        made["masks"] = Masks.from_tensordict(TensorDict({"all_attention_mask": mask, "padded": MetaData(False)}))
    return made


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """Pauses Python's garbage collector while rows are made that all go into the buffer.

    It would look through the growing buffer again and again, and find nothing: half of the time that filling one takes.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_storage(replay_buffer: Any) -> None:
    """Raises ValueError where the storage keeps one row's strings for all rows, or takes rows of one shape only."""
    if compat.shares_strings_between_rows(replay_buffer):
        raise ValueError(
            "the buffer has a LazyMemmapStorage, which keeps the first row's strings and messages for every row: the "
            "others would be lost. Use a LazyStackStorage or a ListStorage."
        )
    storage = compat.storage_of_one_shape(replay_buffer)
    if storage is not None:
        raise ValueError(
            f"the buffer has a {storage}, which takes rows of one shape, and these differ in length. Use a "
            "LazyStackStorage or a ListStorage."
        )


def leaf(value: Any) -> Any:
    """A value of a dataset's own column: numbers and booleans as tensors, as a collector has them, others as they are.

    Numbers keep their precision (int64, float64).
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return torch.tensor(value, dtype=torch.long)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return non_tensor(value)
