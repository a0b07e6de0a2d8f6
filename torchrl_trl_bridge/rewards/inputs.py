"""Rollouts → right-padded token micro-batches.

Rollouts of any form are read into one flat run of token ids with a length per row. From there on, left padding, right
padding, holes in the mask and ragged rows no longer differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

_SHOWN = 10  # rows that an error lists


@dataclass(frozen=True)
class TokenRows:
    """The tokens that count, row after row, without padding.

    Attributes:
        ids: int64 ``[sum(lengths)]``.
        lengths: int64 ``[N]``, the number of tokens of each row.
        shape: the batch shape; its rows are numbered 0 to N - 1 in row-major order.
        kept: bool ``[N, T]``: where the ids stand in the rollouts, ragged ones padded on the right.
        widths: int64 ``[N]``: the tokens of each rollout, padding included, where they are ragged; None otherwise.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    shape: torch.Size
    kept: torch.Tensor
    widths: torch.Tensor | None = None

    @classmethod
    def ragged(cls, ids: torch.Tensor, lengths: torch.Tensor, shape: torch.Size) -> TokenRows:
        """Rows that were never padded."""
        longest = int(lengths.max()) if len(lengths) else 0
        kept = torch.arange(longest, device=lengths.device) < lengths[:, None]
        return cls(ids, lengths, shape, kept, widths=lengths)

    @property
    def ends(self) -> torch.Tensor:
        """int64 ``[N]``: the position in ``ids`` just after each row."""
        return self.lengths.cumsum(0)

    def to(self, device: torch.device) -> TokenRows:
        return replace(self, ids=self.ids.to(device), lengths=self.lengths.to(device))

    def row_of_id(self) -> torch.Tensor:
        """int64 ``[sum(lengths)]``: the row that each id belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)

    def positions_of(self, chosen: torch.Tensor) -> torch.Tensor:
        """int64: the positions in ``ids`` of some rows, row after row."""
        lengths, ends = self.lengths[chosen], self.ends[chosen]
        return torch.arange(int(lengths.sum()), device=lengths.device) + (ends - lengths.cumsum(0)).repeat_interleave(
            lengths
        )

    def name(self, row: int) -> str:
        """How an error calls a row: by its index in the batch."""
        if not self.shape:
            return "the row"
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(row), self.shape))
        return f"row {index[0] if len(index) == 1 else index}"

    def names(self, chosen: torch.Tensor) -> str:
        """The rows that a boolean ``[N]`` tensor marks, as an error lists them."""
        rows = chosen.nonzero().flatten().tolist()
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        return ", ".join(self.name(row) for row in rows[:_SHOWN]) + more


def read_rows(tensordict: Any, token_key: Any, attention_mask_key: Any, pad_token_id: int | None) -> TokenRows:
    """Reads the tokens of a batch.

    Args:
        tensordict: the rollouts, with any batch size; dense, lazily stacked or ragged.
        token_key: integer ids ``[*batch, T]``, or one ragged run of ids per row.
        attention_mask_key: a mask of the same shape, 1 where an id counts. None: every id counts.
        pad_token_id: without a mask key, this id is stripped from both ends of each row.

    Raises:
        KeyError: if a key is not in the batch.
        TypeError: if the ids are not integers.
        ValueError: if ids and mask differ in shape, or a mask holds anything but 0 and 1.
    """
    ids = _get(tensordict, token_key, "token_key")
    mask = None if attention_mask_key is None else _get(tensordict, attention_mask_key, "attention_mask_key")
    ragged = isinstance(ids, list)
    shape, ids, present = _dense(ids, tensordict.batch_size, "token_key", token_key)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"token_key {token_key!r} holds {ids.dtype} values; token ids must be integers.")
    if mask is not None:
        mask_shape, mask, mask_present = _dense(mask, tensordict.batch_size, "attention_mask_key", attention_mask_key)
        _check_same_shape(token_key, shape, ids, present, attention_mask_key, mask_shape, mask, mask_present)
        if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"attention_mask_key {attention_mask_key!r} holds values other than 0 and 1. "
                "Pass a mask that is 1 (or True) where a token counts."
            )
        kept = present & mask.bool()
    elif pad_token_id is not None:
        counts = present & (ids != pad_token_id)
        # An id counts from the first that is not padding to the last: padding ids in between stay.
        kept = present & (counts.cumsum(1) > 0) & (counts.flip(1).cumsum(1).flip(1) > 0)
    else:
        kept = present
    return TokenRows(ids[kept].long(), kept.sum(1), shape, kept, present.sum(1) if ragged else None)


def _get(tensordict: Any, key: Any, argument: str) -> torch.Tensor | list[torch.Tensor]:
    """The tensor under a key, or one tensor per row (in row-major order) where the rows are ragged."""
    try:
        value = tensordict.get(key, default=None)
    except RuntimeError:  # TorchRL's answer to ragged rows in a lazy stack
        value = [row.get(key, default=None) for row in tensordict.reshape(-1).unbind(0)]
    if value is None or (isinstance(value, list) and any(row is None for row in value)):
        what = "token ids" if argument == "token_key" else "attention mask"
        available = sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True)))
        raise KeyError(
            f"HFRewardModelWrapper has no {what} to read: {argument} {key!r} not found in the input TensorDict, "
            f"whose keys are {', '.join(available) or 'none'}."
        )
    if isinstance(value, list):
        return value
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{argument} {key!r} holds a {type(value).__name__}; name a leaf that holds tensors.")
    return list(value.unbind(0)) if value.is_nested else value


def _dense(
    value: torch.Tensor | list[torch.Tensor], batch_size: torch.Size, argument: str, key: Any
) -> tuple[torch.Size, torch.Tensor, torch.Tensor]:
    """The batch shape, the values as ``[N, T]``, and a boolean ``[N, T]`` that tells values from the filling."""
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            raise ValueError(f"{argument} {key!r} holds a scalar; it needs a last dimension that runs over the tokens.")
        flat = value.reshape(value.shape[:-1].numel(), value.shape[-1])
        return value.shape[:-1], flat, torch.ones_like(flat, dtype=torch.bool)
    if not value:
        nothing = torch.zeros(0, 0, dtype=torch.long)
        return batch_size if batch_size.numel() == 0 else torch.Size([0]), nothing, nothing.bool()
    # A row may have dimensions of its own, beyond those of the batch; nested tensors know but one of the batch's.
    inner = value[0].shape[:-1]
    if any(row.shape[:-1] != inner for row in value):
        raise ValueError(f"{argument} {key!r} has rows that are ragged in more than their last dimension.")
    outer = batch_size if batch_size.numel() == len(value) else torch.Size([len(value)])
    rows = [run for row in value for run in row.reshape(inner.numel(), row.shape[-1])]
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    flat = pad_sequence(rows, batch_first=True)
    present = torch.arange(flat.shape[1], device=flat.device) < lengths[:, None]
    return torch.Size((*outer, *inner)), flat, present


def _check_same_shape(
    token_key: Any,
    shape: torch.Size,
    ids: torch.Tensor,
    present: torch.Tensor,
    mask_key: Any,
    mask_shape: torch.Size,
    mask: torch.Tensor,
    mask_present: torch.Tensor,
) -> None:
    full, mask_full = (*shape, ids.shape[1]), (*mask_shape, mask.shape[1])
    if full != mask_full:
        raise ValueError(
            f"token_key {token_key!r} has shape {full} and attention_mask_key {mask_key!r} has shape {mask_full}. "
            "The mask needs one entry for each token id."
        )
    lengths, mask_lengths = present.sum(1), mask_present.sum(1)
    if not torch.equal(lengths, mask_lengths):
        row = int((lengths != mask_lengths).nonzero()[0])
        name = TokenRows(ids, lengths, shape, present).name(row)
        raise ValueError(
            f"{name}: token_key {token_key!r} has shape {(int(lengths[row]),)} and attention_mask_key {mask_key!r} "
            f"has shape {(int(mask_lengths[row]),)}. The mask needs one entry for each token id."
        )


def keep_last(rows: TokenRows, max_length: int) -> TokenRows:
    """Cuts each row to its last ``max_length`` tokens."""
    if not (rows.lengths > max_length).any():
        return rows
    positions_to_end = rows.ends.repeat_interleave(rows.lengths) - torch.arange(
        len(rows.ids), device=rows.lengths.device
    )
    return replace(
        rows,
        ids=rows.ids[positions_to_end <= max_length],
        lengths=rows.lengths.clamp(max=max_length),
        kept=rows.kept & (rows.kept.flip(1).cumsum(1).flip(1) <= max_length),
    )


def check_rows(
    rows: TokenRows, *, vocab_size: int | None, positions: int | None, end_token: int | None, max_tokens: int | None
) -> None:
    """Refuses rows that the model cannot score.

    Args:
        rows: the rows.
        vocab_size: number of ids that the model knows, if known.
        positions: number of positions that the model has embeddings for, if it is bounded.
        end_token: an id that the model needs in each row, if it does.
        max_tokens: the bound on the padded tokens of one forward call.

    Raises:
        ValueError: names the rows, and the argument to pass.
    """
    empty = rows.lengths == 0
    if empty.any():
        raise ValueError(
            f"{rows.names(empty)}: no token to score (no ids, or a mask of zeros only). Leave such rows out of the "
            "batch, or pass the attention_mask_key= that marks their tokens."
        )
    for limit, reason in ((positions, "the model has {} positions"), (max_tokens, "max_tokens={} bounds a call")):
        if limit is not None and (too_long := rows.lengths > limit).any():
            raise ValueError(
                f"{rows.names(too_long)}: up to {int(rows.lengths.max())} tokens, but {reason.format(limit)}. "
                f"Pass max_length={limit} to score the last {limit} tokens of each row"
                + (", or raise max_tokens=." if limit is max_tokens else ".")
            )
    if vocab_size is not None:
        unknown = (rows.ids < 0) | (rows.ids >= vocab_size)
        if unknown.any():
            first = int(unknown.nonzero()[0])
            raise ValueError(
                f"{rows.names(_any_per_row(rows, unknown))}: token id {int(rows.ids[first])} is outside the model's "
                f"vocabulary of {vocab_size}. Pass ids of the reward model's own tokenizer; if it is padding, "
                "mask it with attention_mask_key= or strip it with attention_mask_key=None and pad_token_id=."
            )
    if end_token is not None:
        lacking = ~_any_per_row(rows, rows.ids == end_token)
        if lacking.any():
            raise ValueError(
                f"{rows.names(lacking)}: the model reads its score at the end token (id {end_token}), which is not "
                "there. Append it to each row before scoring."
            )


def _any_per_row(rows: TokenRows, marked: torch.Tensor) -> torch.Tensor:
    return count_per_row(rows, marked) > 0


def count_per_row(rows: TokenRows, marked: torch.Tensor) -> torch.Tensor:
    """int64 ``[N]``: how many ids of each row a boolean tensor over ``rows.ids`` marks."""
    return torch.zeros_like(rows.lengths).index_add_(0, rows.row_of_id(), marked.long())


def plan_micro_batches(
    lengths: Sequence[int],
    groups: Sequence[int] | None = None,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Splits rows into micro-batches of similar lengths.

    Args:
        lengths: tokens per row.
        groups: rows of different groups share no micro-batch.
        micro_batch_size: most rows of a micro-batch.
        max_tokens: most padded tokens (rows times the longest row) of a micro-batch.

    Returns:
        The row numbers of each micro-batch.

    Examples:
        >>> plan_micro_batches([3, 9, 2, 8])
        [[0, 1, 2, 3]]
        >>> plan_micro_batches([3, 9, 2, 8], micro_batch_size=2)
        [[1, 3], [0, 2]]
        >>> plan_micro_batches([3, 9, 2, 8], max_tokens=9)
        [[1], [3], [0, 2]]
    """
    group = groups if groups is not None else [0] * len(lengths)
    # The longest first, so that running out of memory shows at the first call.
    order = sorted(range(len(lengths)), key=lambda row: (group[row], -lengths[row]))
    batches: list[list[int]] = []
    for row in order:
        batch = batches[-1] if batches else []
        fits = (
            bool(batch)
            and group[batch[0]] == group[row]
            and (micro_batch_size is None or len(batch) < micro_batch_size)
            and (max_tokens is None or (len(batch) + 1) * lengths[batch[0]] <= max_tokens)
        )
        if fits:
            batch.append(row)
        else:
            batches.append([row])
    return [sorted(batch) for batch in batches]  # in the caller's order, so that one batch of all is the batch itself


def pad_right(rows: TokenRows, chosen: torch.Tensor, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen rows as ids and mask, both int64 ``[len(chosen), longest]``, filled on the right with ``fill``."""
    lengths, ends = rows.lengths[chosen], rows.ends[chosen]
    columns = torch.arange(int(lengths.max()), device=lengths.device)
    mask = columns < lengths[:, None]
    positions = (ends - lengths)[:, None] + columns
    ids = rows.ids[positions.clamp(max=len(rows.ids) - 1)].masked_fill(~mask, fill)
    return ids, mask.long()
