"""Token ids of the rows of a batch without stored padding, and the masks that go with them.

Vectorised over the batch, with NumPy where the data is on the CPU: its selection by a mask and its sums over segments
are four to eight times as fast there as PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchrl_trl_bridge.buffers.flattening import flat_name
from torchrl_trl_bridge.rollouts import Column, FreshRows, Path

Values = torch.Tensor | list[Any] | FreshRows

IGNORED_LABEL = -100
"""The label of a token that is not trained on, throughout Hugging Face and PyTorch."""


def select(flat: torch.Tensor, kept: np.ndarray[Any, Any]) -> torch.Tensor:
    """The kept elements of a flat tensor."""
    if flat.device.type == "cpu":
        return torch.from_numpy(flat.detach().numpy()[kept])
    return flat[torch.from_numpy(kept).to(flat.device)]


def flat_of(values: Values) -> torch.Tensor:
    """All rows of a column, one after the other."""
    if isinstance(values, FreshRows):
        return values.flat
    return values.reshape(-1) if isinstance(values, torch.Tensor) else torch.cat(values)


def lengths_of(values: Values) -> list[int]:
    """The number of elements of each row."""
    if isinstance(values, torch.Tensor):
        return [values.shape[1]] * len(values)
    if isinstance(values, FreshRows):
        return values.lengths
    return list(map(len, values))


class Tokens:
    """The token ids of a batch without padding.

    Args:
        ids: the column of ids, of shape ``[B, T]`` or one tensor a row.
        ids_path: its key, for errors.
        mask: the attention mask, alike; None if nothing is padded.
        mask_path: its key.

    Raises:
        ValueError: if a row has no mask, or one of another length.
    """

    def __init__(self, ids: Column, ids_path: Path, mask: Column | None, mask_path: Path) -> None:
        self.stored = _tensors(ids.values)
        self.path = ids_path
        self.widths = lengths_of(self.stored)
        self.kept: np.ndarray[Any, Any] | None = None
        if mask is not None:
            kept = flat_of(self.beside(mask, mask_path)).bool().cpu().numpy()
            self.kept = None if kept.all() else kept
        self.lengths = self.widths if self.kept is None else _segment_sums(self.kept, self.widths)
        self.ids = self.keep(self.stored)

    def beside(self, column: Column, path: Path) -> Values:
        """The values of a column that holds one value for each stored token."""
        values = column.values
        if isinstance(values, list):
            for i, value in enumerate(values):
                if value is None:
                    raise ValueError(f"row {i} of the batch has no {flat_name(path)!r}, which other rows have.")
            values = _tensors(values)
        lengths = lengths_of(values)
        if lengths != self.widths:
            i = next(i for i, (ours, theirs) in enumerate(zip(self.widths, lengths, strict=True)) if ours != theirs)
            raise ValueError(
                f"row {i} of the batch holds {self.widths[i]} ids under {flat_name(self.path)!r}, and {lengths[i]} "
                f"values under {flat_name(path)!r}."
            )
        return values

    def keep(self, values: Values) -> Values:
        """What belongs to the kept tokens, of what is as long as the stored ones."""
        return values if self.kept is None else FreshRows(select(flat_of(values), self.kept), self.lengths)

    def mask_after(self, prompts: list[int]) -> FreshRows:
        """A mask that is 1 after the prompt of each row (int8).

        Args:
            prompts: how many of the stored tokens are the prompt's.
        """
        parts = np.empty(2 * len(prompts), dtype=np.int64)
        parts[0::2] = prompts
        parts[1::2] = np.asarray(self.widths) - parts[0::2]
        if parts[1::2].min(initial=0) < 0:
            i = int(parts[1::2].argmin())
            raise ValueError(
                f"row {i} of the batch has a prompt of {prompts[i]} ids, more than the {self.widths[i]} under "
                f"{flat_name(self.path)!r} of which they are the start."
            )
        if self.kept is not None:
            parts = np.asarray(_segment_sums(self.kept, parts))
        flat = np.repeat(np.tile(np.array([0, 1], dtype=np.int8), len(prompts)), parts)
        return FreshRows(torch.from_numpy(flat).to(self.stored[0].device), self.lengths)

    def labels(self, masks: Sequence[Values]) -> FreshRows:
        """The ids, -100 wherever one of the masks is 0."""
        labels = flat_of(self.ids)
        for mask in masks:
            labels = torch.where(flat_of(mask).bool(), labels, IGNORED_LABEL)
        return FreshRows(labels if masks else labels.clone(), self.lengths)


def integers(mask: Values) -> Values:
    """A mask of booleans as one of integers (int8, which shares its memory)."""
    if isinstance(mask, FreshRows):
        return FreshRows(mask.flat.view(torch.int8), mask.lengths) if mask.flat.dtype == torch.bool else mask
    if isinstance(mask, torch.Tensor):
        return mask.view(torch.int8) if mask.dtype == torch.bool else mask
    return [row.view(torch.int8) if row.dtype == torch.bool else row for row in mask]


def _tensors(values: Values) -> Values:
    if isinstance(values, (torch.Tensor, FreshRows)):
        return values
    return [value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in values]


def _segment_sums(kept: np.ndarray[Any, Any], lengths: Any) -> list[int]:
    """How many are kept in each of the segments that follow each other."""
    ends = np.cumsum(lengths)
    if np.min(lengths, initial=1) > 0:
        # In 32 bits: 23 us for 256 rows of 512, against 58 us in 64.
        return list(np.add.reduceat(kept.view(np.int8), ends - lengths, dtype=np.int32).tolist())
    counts = np.concatenate([[0], np.cumsum(kept)])  # `reduceat` gives an empty segment its neighbour's first element
    return list((counts[ends] - counts[ends - lengths]).tolist())
