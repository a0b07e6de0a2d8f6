"""Rollouts → prompts, completions and columns, as TRL's trainers pass them to reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_trl_bridge.compat.tensordict import is_non_tensor_leaf
from torchrl_trl_bridge.rewards.text import path_of
from torchrl_trl_bridge.rollouts import Column, Path, read_columns

# On the top level of a rollout, and no column of the dataset: TorchRL's own, and the names that TRL reserves.
_NOT_COLUMNS = frozenset(
    {
        *("collector", "done", "history", "is_init", "log_probs", "masks", "next", "reward", "rewards", "step_count"),
        *("terminated", "text", "tokens", "truncated"),
        *("prompt", "prompts", "completion", "completions", "completion_ids"),
    }
)

_PARTS: tuple[Path, ...] = tuple(
    (kind, part) for kind in ("history", "text", "tokens") for part in ("prompt", "response", "full")
)
_MASK: Path = ("masks", "all_attention_mask")


@dataclass(frozen=True)
class Completions:
    """``B`` prompts and completions: conversations or strings; token ids, if known; columns of ``B`` plain values."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]] | None
    columns: dict[str, list[Any]]


def read_completions(
    rollouts: TensorDictBase, columns: Mapping[str, NestedKey] | None = None, tokenizer: Any = None
) -> Completions:
    """Reads what reward functions are given.

    Args:
        rollouts: of any batch size; ``B`` in number.
        columns: the key of each column; looked for in the rollouts, then in their ``"next"``. By default every leaf on
            the top level that is a column of the dataset.
        tokenizer: of the policy; decodes completions that are strings from their token ids, without special tokens.

    Raises:
        KeyError: if a column, or every form of prompt and response, is not there.
    """
    batch = rollouts.reshape(-1)
    keys = (
        {key: (key,) for key in map(str, batch.keys()) if key not in _NOT_COLUMNS}
        if columns is None
        else {name: path_of(key) for name, key in columns.items()}
    )
    after = [("next", *path) for path in keys.values()]
    read = read_columns(batch, [*_PARTS, _MASK, *keys.values(), *after])
    ids = _completion_ids(read)
    prompts, completions = _texts(read, ids, tokenizer)
    values = {}
    for name, path in keys.items():
        column = read.get(path) or read.get(("next", *path))
        if column is not None:
            values[name] = _plain(column)
        elif any(is_non_tensor_leaf(batch.get(place, None)) for place in (path, ("next", *path))):
            values[name] = [None] * len(prompts)  # there, and None in all rows
        elif columns is not None:
            raise KeyError(
                f"columns={{{name!r}: {columns[name]!r}}}: that key is not in the rollouts, whose keys are "
                f"{', '.join(sorted('.'.join(path) for path in read_columns(batch)))}."
            )
    return Completions(prompts, completions, ids, values)


def _plain(column: Column) -> list[Any]:
    values = column.values
    if isinstance(values, torch.Tensor):
        return values.tolist()
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]


def _completion_ids(read: Mapping[Path, Column]) -> list[list[int]] | None:
    ids = read.get(("tokens", "response"))
    if ids is None:
        return None
    mask = read.get(_MASK)
    if mask is None:
        return _plain(ids)
    # The mask is that of the whole sequence, whose end the response is; a padded row has padding at both ends.
    return [
        row[kept[len(kept) - len(row) :].bool()].tolist() for row, kept in zip(ids.values, mask.values, strict=True)
    ]


def _texts(read: Mapping[Path, Column], ids: list[list[int]] | None, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    for kind in ("history", "text"):
        prompt, response, full = (read.get((kind, part)) for part in ("prompt", "response", "full"))
        if prompt is None:
            continue
        prompts = list(prompt.values)
        if response is not None:
            completions = list(response.values)
        elif full is not None:  # all that an environment requires of a policy
            completions = [_continuation(*pair) for pair in zip(prompts, full.values, strict=True)]
        else:
            continue
        if kind == "text" and tokenizer is not None and ids is not None:
            completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return prompts, completions
    prompt = read.get(("tokens", "prompt"))
    if prompt is None or ids is None:
        raise KeyError(
            "the rollouts hold no prompt with its response, in none of 'history', 'text' and 'tokens'. Their keys are "
            f"{', '.join(sorted('.'.join(path) for path in read)) or 'none'}."
        )
    if tokenizer is None:
        raise ValueError("the rollouts hold token ids only: pass processing_class= with the policy's tokenizer.")
    return tokenizer.batch_decode(_plain(prompt)), tokenizer.batch_decode(ids, skip_special_tokens=True)


def _continuation(prompt: Any, full: Any) -> Any:
    """What follows the prompt. A whole that does not begin with the prompt is taken for the completion."""
    return full[len(prompt) :] if full[: len(prompt)] == prompt else full
