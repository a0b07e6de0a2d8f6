"""Model output → one float per row, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_USUAL_NAMES = ("logits", "rewards")

Output = str | Callable[[Any], torch.Tensor]


def read_rewards(
    output: Any, rows: int, *, select: Output | None = None, label: int | None = None, labels: list[str] | None = None
) -> torch.Tensor:
    """The rewards in what a model returned.

    Args:
        output: a ``ModelOutput``, mapping or other object with ``logits`` or ``rewards``, a tuple that starts with
            them, or the tensor itself; ``[rows]``, ``[rows, 1]`` or, with a label, ``[rows, labels]``.
        rows: number of rows that the model was given.
        select: the name of the rewards in the output, or a callable that picks them from it.
        label: column of a head with several labels.
        labels: names of the columns, for errors.

    Returns:
        float32 ``[rows]``.

    Raises:
        RuntimeError: if the output holds no tensor to read, or not one reward per row.
    """
    return _one_per_row(_scores(output, select), rows, label, labels).float()


def read_token_rewards(
    output: Any,
    rows: int,
    width: int,
    *,
    select: Output | None = None,
    label: int | None = None,
    labels: list[str] | None = None,
) -> torch.Tensor:
    """The process rewards in what a model returned: as :func:`read_rewards`, with one reward for each token.

    Args:
        output: as for :func:`read_rewards`; the scores are ``[rows, width]``, ``[rows, width, 1]`` or, with a label,
            ``[rows, width, labels]``.
        rows: number of rows that the model was given.
        width: number of tokens of a row, padding included.
        select: as for :func:`read_rewards`.
        label: as for :func:`read_rewards`.
        labels: as for :func:`read_rewards`.

    Returns:
        float32 ``[rows, width]``.

    Raises:
        RuntimeError: if the output holds no tensor to read, or not one reward per token.
    """
    rewards = _scores(output, select)
    shape = tuple(rewards.shape)
    if shape[:2] != (rows, width) or rewards.ndim > 3:
        raise RuntimeError(
            f"HFRewardModelWrapper expected one reward per token, of shape {(rows, width)} or {(rows, width, 1)}, got "
            f"{shape}. Load the model with AutoModelForTokenClassification, or drop per_token=True for a model that "
            "gives one reward per row."
        )
    if rewards.ndim == 2:
        if label is not None:
            raise RuntimeError(f"label={label} picks a column, but the model's scores have shape {shape}: drop label=.")
        return rewards.float()
    return _one_per_row(rewards.flatten(0, 1), rows * width, label, labels).reshape(rows, width).float()


def _scores(output: Any, select: Output | None) -> torch.Tensor:
    rewards = select(output) if callable(select) else _named(output, select)
    if not isinstance(rewards, torch.Tensor):
        place = "what output= picked" if select is not None else "'logits' or 'rewards'"
        raise RuntimeError(
            f"HFRewardModelWrapper could not extract reward tensors from {type(output).__name__}: {place} is "
            f"{type(rewards).__name__}, not a tensor. The output has {_contents(output)}. Pass output= with the "
            "name of the rewards or a callable that picks them."
        )
    return rewards


def _named(output: Any, name: str | None) -> Any:
    if name is None and isinstance(output, torch.Tensor):
        return output
    if name is None and isinstance(output, tuple) and not hasattr(output, "_fields"):
        return output[0] if output else None  # `return_dict=False` puts the logits first when there are no labels
    for candidate in _USUAL_NAMES if name is None else (name,):
        value = output.get(candidate) if isinstance(output, Mapping) else getattr(output, candidate, None)
        if value is not None:
            return value
    return None


def _contents(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"the keys {', '.join(map(repr, output)) or 'none'}"
    if isinstance(output, (tuple, list)):
        return f"{len(output)} elements"
    names = [name for name in vars(output) if not name.startswith("_")] if hasattr(output, "__dict__") else []
    return f"the attributes {', '.join(map(repr, names)) or 'none'}"


def _one_per_row(rewards: torch.Tensor, rows: int, label: int | None, labels: list[str] | None) -> torch.Tensor:
    shape = tuple(rewards.shape)
    if rewards.ndim == 3 and len(rewards) == rows:
        raise RuntimeError(
            f"HFRewardModelWrapper expected one scalar reward per row, got scores of shape {shape}: one vector per "
            "token, as a language model gives. Load the model with AutoModelForSequenceClassification, pass a "
            "callable output= that picks one number per row, or pass per_token=True if each token has its reward."
        )
    if rewards.ndim == 2 and len(rewards) == rows:
        columns = shape[1]
        if label is not None:
            if label >= columns:
                raise RuntimeError(f"label={label} is not among the {columns} columns of the model's scores {shape}.")
            return rewards[:, label]
        if columns == 1:
            return rewards[:, 0]
        names = labels if labels is not None and len(labels) == columns else list(map(str, range(columns)))
        raise RuntimeError(
            f"HFRewardModelWrapper expected one scalar reward per row, got scores of shape {shape}, with the labels "
            f"{', '.join(names)}. Pass label= with the name or index of the one that is the reward."
        )
    if shape == (rows,):
        if label is not None:
            raise RuntimeError(f"label={label} picks a column, but the model's scores have shape {shape}: drop label=.")
        return rewards
    raise RuntimeError(
        f"HFRewardModelWrapper expected one scalar reward per row, of shape {(rows,)} or {(rows, 1)}, got {shape}. "
        "Pass output= with the name of the rewards in the model's output, or a callable that picks them."
    )
