"""What scoring costs, in counts that no busy machine moves: forward calls, padded tokens, copies, calls a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.counting import calls_in_package, operations
from torchrl_trl_bridge import HFRewardModelWrapper


class Recorder(nn.Module):
    """Scores a row by its length, and notes the shape of each call and the tokens in it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []
        self.tokens = 0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        self.shapes.append(tuple(input_ids.shape))  # type: ignore[arg-type]
        self.tokens += int(attention_mask.sum())
        return {"logits": attention_mask.sum(1, keepdim=True).float()}


def padded(lengths: list[int]) -> TensorDict:
    """Rows padded on the left, as TorchRL pads."""
    width = max(lengths)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return TensorDict({"tokens": {"full": mask.long()}, "masks": {"all_attention_mask": mask}}, [len(lengths)])


LENGTHS = torch.linspace(16, 1024, 64).long()[torch.randperm(64, generator=torch.Generator().manual_seed(0))].tolist()


@pytest.mark.parametrize(
    ("limits", "rows", "tokens"),
    [
        ({"micro_batch_size": 8}, 8, 8 * 1024),
        ({"max_tokens": 4096}, 64, 4096),
        ({"micro_batch_size": 4, "max_tokens": 2048}, 4, 2048),
    ],
)
def test_the_memory_of_a_call_is_bounded(limits: dict[str, int], rows: int, tokens: int) -> None:
    model = Recorder()
    rewards = HFRewardModelWrapper(model, inference_mode=True, **limits)(padded(LENGTHS))["reward"]
    assert rewards.flatten().tolist() == LENGTHS
    assert max(height for height, _ in model.shapes) <= rows
    assert max(height * width for height, width in model.shapes) <= tokens
    assert model.tokens == sum(LENGTHS)  # each once


def test_sorted_micro_batches_hold_little_padding() -> None:
    model = Recorder()
    HFRewardModelWrapper(model, inference_mode=True, micro_batch_size=8)(padded(LENGTHS))
    assert len(model.shapes) == 64 / 8
    assert sum(height * width for height, width in model.shapes) < 1.2 * sum(LENGTHS)


def test_one_call_where_nothing_is_bounded() -> None:
    model = Recorder()
    HFRewardModelWrapper(model, inference_mode=True)(padded(LENGTHS))
    assert model.shapes == [(64, 1024)]


@pytest.mark.parametrize(("limits", "most"), [({}, 7), ({"micro_batch_size": 8}, 5)])
def test_new_memory_in_sizes_of_the_batch(limits: dict[str, int], most: int) -> None:
    """Reading the batch and each call's ids and mask, all together, beside the model's own."""
    batch = padded(LENGTHS)
    counted = operations(lambda: HFRewardModelWrapper(Recorder(), inference_mode=True, **limits)(batch))
    assert counted.new_bytes < most * batch["tokens", "full"].nbytes


def test_operations_grow_with_the_calls_of_the_model_and_not_with_the_rows() -> None:
    scorer = HFRewardModelWrapper(Recorder(), inference_mode=True)
    few, many = (operations(lambda n=n: scorer(padded([9] * n))).names for n in (8, 64))
    assert few == many


def test_calls_a_row() -> None:
    scorer = HFRewardModelWrapper(Recorder(), inference_mode=True, micro_batch_size=64)
    few, many = (calls_in_package(lambda n=n: scorer(padded([9] * n))) for n in (16, 64))
    assert (many - few) / 48 <= 1
