"""Does the score of a row depend on the rows and the padding beside it?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict

from torchrl_trl_bridge.rewards.inputs import TokenRows, read_rows


def padding_differences(score: Callable[[TokenRows], torch.Tensor], rows: TokenRows) -> dict[str, float]:
    """The largest absolute differences between scores of rows in a batch and of each row alone.

    Args:
        score: gives one float per row, or per token.
        rows: the rows.

    Returns:
        The difference of the rows as they are (``"batched"``) and of the rows padded on either side.
    """
    alone = torch.cat([score(row) for row in _one_by_one(rows)]) if len(rows.lengths) else score(rows)
    batches = {"batched": rows, "left_padded": _padded(rows, "left"), "right_padded": _padded(rows, "right")}
    differences = {}
    for name, batch in batches.items():
        difference = (score(batch) - alone).abs()
        differences[name] = float(difference.max()) if len(difference) else 0.0
    return differences


def _one_by_one(rows: TokenRows) -> list[TokenRows]:
    ids = torch.split(rows.ids, rows.lengths.tolist())
    return [TokenRows.ragged(row, rows.lengths[i : i + 1], torch.Size([1])) for i, row in enumerate(ids)]


def _padded(rows: TokenRows, side: str) -> TokenRows:
    width = int(rows.lengths.max()) if len(rows.lengths) else 0
    places = torch.arange(width, device=rows.ids.device)
    mask = places >= width - rows.lengths[:, None] if side == "left" else places < rows.lengths[:, None]
    # Any id will do for padding: here the first of the first row, which is one that counts elsewhere.
    filling = rows.ids.new_zeros(mask.shape) if len(rows.ids) == 0 else rows.ids[0].expand(mask.shape)
    ids = filling.masked_scatter(mask, rows.ids)
    return read_rows(TensorDict({"ids": ids, "mask": mask}, [len(mask)]), "ids", "mask", None)
