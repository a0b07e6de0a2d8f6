from __future__ import annotations

import pytest
import torch
from reward_models import padded, random_rows, small_model
from tensordict import TensorDict
from torch import nn

from torchrl_trl_bridge import HFRewardModelWrapper
from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer

NAMES = {"batched", "left_padded", "right_padded"}


def test_a_model_that_keeps_rows_apart():
    batch = padded(random_rows((6, 1, 9, 4)))
    differences = HFRewardModelWrapper(small_model("gpt2"), inference_mode=True).padding_differences(batch)
    assert set(differences) == NAMES
    assert max(differences.values()) < 1e-5
    assert "reward" not in batch


def test_on_text(tmp_path):
    score = HFRewardModelWrapper(tiny_reward_model(tmp_path), tokenizer=tiny_tokenizer(), input_key="text")
    differences = score.padding_differences(TensorDict({"text": ["a", "bcdef"]}, [2]))
    assert max(differences.values()) < 1e-5


class Averaging(nn.Module):
    """A model that takes padding for text."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids.float().mean(-1)


def test_a_model_that_sees_padding():
    batch = padded(random_rows((6, 2, 9)))
    differences = HFRewardModelWrapper(Averaging()).padding_differences(batch)
    assert min(differences.values()) > 0.1
    apart = HFRewardModelWrapper(Averaging(), micro_batch_size=1).padding_differences(batch)
    assert max(apart.values()) == 0


def test_dropout_shows():
    model = small_model("bert").train()
    batch = padded(random_rows((6, 2, 9)))
    assert max(HFRewardModelWrapper(model).padding_differences(batch).values()) > 1e-4
    assert max(HFRewardModelWrapper(model, inference_mode=True).padding_differences(batch).values()) < 1e-5


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    batch = padded(random_rows((4,)))[:rows]
    differences = HFRewardModelWrapper(small_model("gpt2"), inference_mode=True).padding_differences(batch)
    assert max(differences.values()) < 1e-6
