"""The main job on real parts: a collector fills a buffer, and TRL trains from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer, SamplerWithoutReplacement
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.counting import CountingSampler
from tests.features import needs, sampler_param
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


@needs("streams in GRPO")
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


def conversations(rows: int, **kwargs: Any) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=ListStorage(rows), **kwargs)
    for i in range(rows):
        chat = [{"role": "user", "content": f"number {i}?"}, {"role": "assistant", "content": str(i)}]
        replay_buffer.add(TensorDict({"messages": NonTensorData(chat), "prompt": NonTensorData(chat[:1])}))
    return replay_buffer


@needs("streams in GRPO")
def test_grpo_uses_the_first_row_after_one_batch_was_drawn(tmp_path: Path) -> None:
    sampler = CountingSampler()
    draws: list[int] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        draws.append(sampler.draws)
        return [0.0] * len(completions)

    GRPOTrainer(
        tiny_causal_lm(tmp_path / "model"),
        reward_funcs=reward,
        args=arguments(GRPOConfig, tmp_path, num_generations=4, max_completion_length=2),
        train_dataset=TorchRLBufferDataset(
            conversations(20, sampler=sampler), 8, keys=["prompt"], num_batches=None
        ).as_hf_dataset(),
        processing_class=tiny_tokenizer(),
    ).train()
    assert draws[0] == 1


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, sampler_param("ConsumingSampler")])
@pytest.mark.parametrize("mapped", [False, True])
def test_what_a_trainer_looks_at_before_it_trains_is_not_lost(sampler: type, mapped: bool, tmp_path: Path) -> None:
    # 8 rows, each drawn once: 2 steps of 4 need all of them.
    replay_buffer = conversations(8, sampler=sampler())
    stored = [replay_buffer[i]["messages"][0]["content"] for i in range(8)]
    dataset = TorchRLBufferDataset(replay_buffer, 4, keys=["messages"], num_batches=2)
    trained: list[str] = []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        trained.append(row["messages"][0]["content"])
        return row

    stream = dataset.as_hf_dataset()
    trainer = SFTTrainer(
        tiny_causal_lm(tmp_path / "model"),
        args=arguments(SFTConfig, tmp_path, max_length=64),
        train_dataset=stream.map(note) if mapped else stream,
        processing_class=tiny_tokenizer(),
    )
    trained.clear()
    assert trainer.train().global_step == 2
    if mapped:
        assert sorted(trained) == sorted(stored)


def test_a_trainers_edits_do_not_reach_the_buffer(tmp_path: Path) -> None:
    replay_buffer = conversations(4)

    def grow(row: dict[str, Any]) -> dict[str, Any]:
        row["messages"].append({"role": "user", "content": "more"})
        row["messages"].append({"role": "assistant", "content": "more"})
        return row

    SFTTrainer(
        tiny_causal_lm(tmp_path / "model"),
        args=arguments(SFTConfig, tmp_path, max_length=128),
        train_dataset=TorchRLBufferDataset(replay_buffer, 4, keys=["messages"], num_batches=None)
        .as_hf_dataset()
        .map(grow),
        processing_class=tiny_tokenizer(),
    ).train()
    assert all(len(replay_buffer[i]["messages"]) == 2 for i in range(4))


def test_an_evaluation_repeated_sees_the_same_rows(tmp_path: Path) -> None:
    replay_buffer = conversations(64)
    trainer = SFTTrainer(
        tiny_causal_lm(tmp_path / "model"),
        args=arguments(SFTConfig, tmp_path, max_length=64),
        train_dataset=TorchRLBufferDataset(replay_buffer, 4, keys=["messages"], num_batches=None).as_hf_dataset(),
        eval_dataset=TorchRLBufferDataset(replay_buffer, 4, keys=["messages"], num_batches=2, seed=0).as_hf_dataset(),
        processing_class=tiny_tokenizer(),
    )
    first = trainer.evaluate()["eval_loss"]
    torch.manual_seed(99)
    assert trainer.evaluate()["eval_loss"] == first
    trainer.train()
    assert trainer.evaluate()["eval_loss"] != first, "other weights"
