"""Reward models inside adapters, compiled, in half precision, and with weights that are elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import EOS, padded, random_rows, scores_alone, small_model
from torch import nn

from torchrl_trl_bridge import HFRewardModelWrapper
from torchrl_trl_bridge.tiny import tiny_reward_model, tiny_tokenizer

LENGTHS = (6, 1, 9, 4)


def close(rewards: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(rewards, expected, atol=atol, rtol=0)


def with_adapter(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():  # an adapter starts at zero
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return adapted


@pytest.mark.parametrize("pad_token_id", [0, None, EOS])
def test_peft(pad_token_id):
    base = small_model("llama", pad_token_id=pad_token_id)
    rows = random_rows(LENGTHS)
    plain = scores_alone(base, rows)
    model = with_adapter(base)
    alone = scores_alone(model, rows)
    assert (alone - plain).abs().max() > 1e-3
    batch = padded(rows)
    score = HFRewardModelWrapper(model, inference_mode=True, pad_token_id=0 if pad_token_id is None else None)
    close(score(batch)["reward"], alone)
    model.train()
    close(score(batch)["reward"], alone)
    assert any(module.training for module in model.modules() if isinstance(module, nn.Dropout))
    HFRewardModelWrapper(model.eval(), pad_token_id=0)(batch)["reward"].sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora" in name or "modules_to_save" in name for name in trained)


def test_peft_on_text(tmp_path: Path):
    model = with_adapter(tiny_reward_model(tmp_path))
    tokenizer = tiny_tokenizer()
    score = HFRewardModelWrapper(model, tokenizer=tokenizer, inference_mode=True)
    texts = ["short", "a longer text"]
    expected = scores_alone(model, [torch.tensor(tokenizer.encode(text)) for text in texts])
    close(score.score_texts(texts), expected)


def test_compiled():
    model = small_model("llama", num_hidden_layers=1)
    rows = random_rows(LENGTHS)
    alone = scores_alone(model, rows)
    score = HFRewardModelWrapper(torch.compile(model, backend="eager"), inference_mode=True)
    close(score(padded(rows))["reward"], alone)
    with pytest.raises(ValueError, match="vocabulary of 60"):
        score(padded([torch.tensor([3, 999])]))


def test_compiled_on_text(tmp_path: Path):
    """The padding id that is lent for a call reaches the compiled model."""
    model = tiny_reward_model(tmp_path, pad_token_id=tiny_tokenizer().encode("!")[0], num_hidden_layers=1)
    texts = ["short!", "a longer text"]
    expected = HFRewardModelWrapper(model, tokenizer=tiny_tokenizer()).score_texts(texts).detach()
    compiled = HFRewardModelWrapper(torch.compile(model, backend="eager"), tokenizer=tiny_tokenizer())
    close(compiled.score_texts(texts).detach(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_half_precision(model_type, dtype):
    model = small_model(model_type).to(dtype)
    rows = random_rows(LENGTHS)
    rewards = HFRewardModelWrapper(model, inference_mode=True)(padded(rows))["reward"]
    assert rewards.dtype == torch.float32
    scale = float(scores_alone(model, rows).abs().max())
    close(rewards, scores_alone(model, rows), atol=0.05 * scale)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights(tmp_path: Path, where):
    accelerate = pytest.importorskip("accelerate")
    model = small_model("llama")
    rows = random_rows(LENGTHS)
    alone = scores_alone(model, rows)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    rewards = HFRewardModelWrapper(model, inference_mode=True)(padded(rows))["reward"]
    assert rewards.device.type == "cpu"
    close(rewards, alone)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, {"model": "cpu", "score": "disk"}], ids=str)
def test_device_map(tmp_path: Path, device_map):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForSequenceClassification

    small_model("llama").save_pretrained(tmp_path / "model")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    mapped = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offloaded")
    )
    rows = random_rows(LENGTHS)
    close(HFRewardModelWrapper(mapped, inference_mode=True)(padded(rows))["reward"], scores_alone(plain, rows))
