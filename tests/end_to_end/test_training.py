"""The main job on real parts: a collector fills a buffer, and TRL trains from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from torchrl_trl_bridge import TorchRLBufferDataset
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer

STORAGES = [ListStorage, LazyStackStorage]


def arguments(config: type, folder: Path, **kwargs: Any) -> Any:
    return config(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        max_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        **kwargs,
    )


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "snapshot"])
def test_sft_trains_from_collected_rollouts(
    storage: type, padded: bool, streaming: bool, collect: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    model = tiny_causal_lm(tmp_path / "model")
    before = weights(model)
    dataset = TorchRLBufferDataset(
        collect("history", padded, storage), 8, keys=[("history", "full")], num_batches=None
    ).as_hf_dataset(streaming=streaming)
    trainer = SFTTrainer(
        model,
        args=arguments(SFTConfig, tmp_path, max_length=128),
        train_dataset=dataset.rename_column("history.full", "messages"),
        processing_class=tiny_tokenizer(),
    )
    assert trainer.train().global_step == 2
    assert not torch.equal(weights(model), before)
    assert all(record["loss"] > 0 for record in trainer.state.log_history if "loss" in record)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("mode", ["history", "text"])
def test_grpo_trains_from_collected_prompts(
    storage: type, mode: str, collect: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def reward(prompts: list[Any], completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
        seen.extend({"prompt": p, "answer": a} for p, a in zip(prompts, answer, strict=True))
        return [float(i % 3) for i in range(len(completions))]

    key = ("history", "prompt") if mode == "history" else ("text", "prompt")
    replay_buffer = collect(mode, False, storage)
    dataset = TorchRLBufferDataset(replay_buffer, 8, keys=[key, "answer"], num_batches=None).as_hf_dataset()
    model = tiny_causal_lm(tmp_path / "model")
    before = weights(model)
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=arguments(GRPOConfig, tmp_path, num_generations=4, max_completion_length=6),
        train_dataset=dataset.rename_column(".".join(key), "prompt"),
        processing_class=tiny_tokenizer(),
    )
    assert trainer.train().global_step == 2
    assert not torch.equal(weights(model), before)
    stored = list(TorchRLBufferDataset(replay_buffer, 4).as_hf_dataset(streaming=False))
    pairs = [(row[".".join(key)], row["answer"]) for row in stored]
    assert seen
    for start in range(0, len(seen), 4):
        group = seen[start : start + 4]
        assert all(row == group[0] for row in group), "a group is one prompt"
        assert (group[0]["prompt"], group[0]["answer"]) in pairs
        assert type(group[0]["answer"]) is int
