"""Process rewards: one float per token → the places in the rollouts that the tokens came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict
from tensordict.utils import NestedKey

from torchrl_trl_bridge.rewards.inputs import TokenRows


def mask_key_of(reward_key: NestedKey) -> NestedKey:
    """Where the mask of process rewards goes by default: beside them.

    >>> mask_key_of("reward"), mask_key_of(("next", "steps"))
    ('reward_mask', ('next', 'steps_mask'))
    """
    if isinstance(reward_key, str):
        return f"{reward_key}_mask"
    return (*reward_key[:-1], f"{reward_key[-1]}_mask")


def rewarded(rows: TokenRows, step_token_id: int | None) -> torch.Tensor:
    """bool ``[sum(lengths)]``: the tokens whose score is a reward: all of them, or the ends of steps."""
    return torch.ones_like(rows.ids, dtype=torch.bool) if step_token_id is None else rows.ids == step_token_id


def write_per_token(tensordict: Any, key: NestedKey, values: torch.Tensor, rows: TokenRows) -> None:
    """Writes one value per token where the token stands, 0 beside it.

    Args:
        tensordict: the rollouts.
        key: where the values go: ``[*batch, T]`` in the layout of the token ids, ragged where these are ragged.
        values: ``[sum(lengths)]``.
        rows: the tokens.

    Raises:
        ValueError: if the rows are ragged and the batch, of several dimensions, is not a lazy stack.
    """
    placed = torch.zeros(rows.kept.shape, dtype=values.dtype, device=values.device).masked_scatter(rows.kept, values)
    if rows.widths is None:
        tensordict.set(key, placed.reshape(*rows.shape, placed.shape[1]))
        return
    ragged = [row[:width] for row, width in zip(placed, rows.widths.tolist(), strict=True)]
    if isinstance(tensordict, LazyStackedTensorDict):
        _write_rows(tensordict, key, iter(ragged))
    elif not rows.shape:
        tensordict.set(key, ragged[0])
    elif len(rows.shape) == 1:
        tensordict.set(key, torch.nested.nested_tensor_from_jagged(torch.cat(ragged), _offsets(rows.widths)))
    else:
        raise ValueError(
            f"rewards of ragged rows cannot be stored in a dense batch of shape {tuple(rows.shape)}: pass "
            "rollouts.reshape(-1)."
        )


def _offsets(widths: torch.Tensor) -> torch.Tensor:
    return torch.cat([widths.new_zeros(1), widths.cumsum(0)])


def _write_rows(tensordict: Any, key: NestedKey, rows: Iterator[torch.Tensor]) -> None:
    if not tensordict.batch_size:
        tensordict.set(key, next(rows))
        return
    for row in tensordict.unbind(0):
        _write_rows(row, key, rows)
