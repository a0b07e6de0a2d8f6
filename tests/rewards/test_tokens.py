"""Process rewards: one for each token, or for each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reward_models import PAD, VOCAB, padded, random_rows, small_config, small_model
from tensordict import TensorDict, lazy_stack
from torch import nn

from torchrl_trl_bridge import HFRewardModelWrapper
from torchrl_trl_bridge.tiny import tiny_tokenizer

LENGTHS = (6, 1, 9, 4)


def token_classifier(model_type: str = "llama", num_labels: int = 1, **overrides: Any) -> Any:
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(0)
    return AutoModelForTokenClassification.from_config(
        small_config(model_type, num_labels=num_labels, **overrides)
    ).eval()


def alone(model: nn.Module, row: torch.Tensor, label: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=row[None]).logits[0, :, label]


def ragged(rows: list[torch.Tensor]) -> Any:
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return lazy_stack(
        [
            TensorDict({"tokens": {"full": r}, "masks": {"all_attention_mask": m}})
            for r, m in zip(rows, masks, strict=True)
        ]
    )


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limits", [{}, {"micro_batch_size": 2}, {"max_tokens": 12}])
def test_one_reward_for_each_token(model_type, side, limits):
    model = token_classifier(model_type)
    rows = random_rows(LENGTHS)
    batch = padded(rows, side)
    out = HFRewardModelWrapper(model, per_token=True, inference_mode=True, **limits)(batch)
    mask = batch["masks", "all_attention_mask"]
    assert out["reward"].shape == mask.shape
    assert out["reward"].dtype == torch.float32
    assert torch.equal(out["reward_mask"], mask)
    assert (out["reward"][~mask] == 0).all()
    for row, rewards, kept in zip(rows, out["reward"], mask, strict=True):
        torch.testing.assert_close(rewards[kept], alone(model, row), atol=1e-5, rtol=0)


def test_ragged_rows_stay_ragged():
    model = token_classifier()
    rows = random_rows(LENGTHS)
    score = HFRewardModelWrapper(model, per_token=True, reward_key=("process", "reward"), inference_mode=True)
    assert score.out_keys == [("process", "reward"), ("process", "reward_mask")]
    out = score(ragged(rows))
    for row, scored in zip(rows, out.unbind(0), strict=True):
        torch.testing.assert_close(scored["process", "reward"], alone(model, row), atol=1e-5, rtol=0)
        assert scored["process", "reward_mask"].tolist() == [True] * len(row)
    nested = lazy_stack([ragged(rows[:2]), ragged(rows[2:])])
    torch.testing.assert_close(score(nested)[1, 0]["process", "reward"], alone(model, rows[2]), atol=1e-5, rtol=0)
    single = score(ragged(rows)[0])
    torch.testing.assert_close(single["process", "reward"], alone(model, rows[0]), atol=1e-5, rtol=0)
    jagged = TensorDict({"tokens": {"full": torch.nested.nested_tensor(rows, layout=torch.jagged)}}, [4])
    out = HFRewardModelWrapper(model, per_token=True, attention_mask_key=None, inference_mode=True)(jagged)
    for row, rewards in zip(rows, out["reward"].unbind(0), strict=True):
        torch.testing.assert_close(rewards, alone(model, row), atol=1e-5, rtol=0)


def test_rollouts_of_a_collector(collected):
    batch = collected[:]
    model = token_classifier(vocab_size=len(tiny_tokenizer()))
    HFRewardModelWrapper(model, per_token=True, reward_key="steps", inference_mode=True)(batch)
    for row in batch.unbind(0):
        mask = row["masks", "all_attention_mask"].bool()
        assert torch.equal(row["steps_mask"], mask)
        torch.testing.assert_close(row["steps"][mask], alone(model, row["tokens", "full"][mask]), atol=1e-5, rtol=0)


def test_rewards_at_the_ends_of_steps():
    model = token_classifier(num_labels=2)
    end = 7
    rows = [torch.tensor([3, 4, end, 5, end]), torch.tensor([6, end, 8]), torch.tensor([9])]
    batch = padded(rows, "left")
    score = HFRewardModelWrapper(
        model, per_token=True, step_token_id=end, reward_mask_key="ends", label=1, inference_mode=True
    )
    score(batch)
    assert torch.equal(batch["ends"], batch["tokens", "full"] == end)
    assert batch["reward"].count_nonzero() == 3
    assert batch["reward"][0, [2, 4]].tolist() == pytest.approx(alone(model, rows[0], 1)[[2, 4]].tolist(), abs=1e-5)
    assert batch["ends"].sum(1).tolist() == [2, 1, 0], "rewards[mask] are the steps in order"


def test_max_length_leaves_the_beginning_without_reward():
    model = token_classifier()
    rows = random_rows((5, 2))
    out = HFRewardModelWrapper(model, per_token=True, max_length=3, inference_mode=True)(padded(rows, "left"))
    assert out["reward_mask"].tolist() == [[False, False, True, True, True], [False, False, False, True, True]]
    torch.testing.assert_close(out["reward"][0, 2:], alone(model, rows[0][-3:]), atol=1e-5, rtol=0)


def test_text_gives_rewards_for_the_models_own_tokens():
    tokenizer = tiny_tokenizer()
    model = token_classifier(vocab_size=len(tokenizer))
    score = HFRewardModelWrapper(model, per_token=True, tokenizer=tokenizer, input_key="text", inference_mode=True)
    out = score(TensorDict({"text": ["abc", "d"]}, [2]))
    for text, rewards in zip(["abc", "d"], out["reward"].unbind(0), strict=True):
        torch.testing.assert_close(rewards, alone(model, torch.tensor(tokenizer.encode(text))), atol=1e-5, rtol=0)


def test_gradients():
    model = token_classifier()
    rows = random_rows((3, 5))
    HFRewardModelWrapper(model, per_token=True)(padded(rows))["reward"].sum().backward()
    assert model.score.weight.grad.abs().sum() > 0


class ScalarOnEveryToken(nn.Module):
    """What a value head gives."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        values = input_ids.float()
        return values if self.dims == 2 else values[..., None]


@pytest.mark.parametrize("dims", [2, 3])
def test_a_scalar_on_every_token_is_no_reward_unless_asked_for(dims):
    batch = padded(random_rows((3, 5)))
    with pytest.raises(RuntimeError, match="one scalar reward per row"):
        HFRewardModelWrapper(ScalarOnEveryToken(dims))(batch)
    out = HFRewardModelWrapper(ScalarOnEveryToken(dims), per_token=True)(batch)
    assert torch.equal(out["reward"], batch["tokens", "full"].float() * batch["masks", "all_attention_mask"])


def test_errors():
    batch = padded(random_rows((3, 5)))
    with pytest.raises(RuntimeError, match=r"one reward per token.*drop per_token=True"):
        HFRewardModelWrapper(small_model("llama"), per_token=True)(batch)
    with pytest.raises(RuntimeError, match=r"labels LABEL_0, LABEL_1.*label="):
        HFRewardModelWrapper(token_classifier(num_labels=2), per_token=True)(batch)
    with pytest.raises(ValueError, match="step_token_id= has a meaning only with per_token=True"):
        HFRewardModelWrapper(small_model("llama"), step_token_id=3)
    with pytest.raises(ValueError, match="reward_mask_key= has a meaning only with"):
        HFRewardModelWrapper(small_model("llama"), reward_mask_key="mask")
    broken = token_classifier()
    with torch.no_grad():
        broken.score.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="row 0, row 1: the reward is not finite"):
        HFRewardModelWrapper(broken, per_token=True)(batch)
    assert VOCAB > PAD


def test_no_rows():
    batch = TensorDict(
        {"tokens": {"full": torch.ones(0, 5).long()}, "masks": {"all_attention_mask": torch.ones(0, 5)}}, [0]
    )
    out = HFRewardModelWrapper(token_classifier(), per_token=True)(batch)
    assert out["reward"].shape == out["reward_mask"].shape == (0, 5)
