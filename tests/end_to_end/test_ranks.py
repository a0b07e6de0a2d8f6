"""TRL's trainers on several ranks, fed by a buffer that only rank 0 fills."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.counting import CountingSampler
from tests.features import needs
from tests.processes import run_ranks
from tests.training import texts_seen_by_steps
from torchrl_trl_bridge import CollectCallback, TorchRLBufferDataset
from torchrl_trl_bridge.buffers.ranks import MESSAGES_AHEAD
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

GROUP = 4
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def refill(replay_buffer: ReplayBuffer, folder: str) -> CollectCallback:
    """A collector that writes rollouts of eight new questions after each step."""
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        LlamaForCausalLM.from_pretrained(f"{folder}/model"),
        tokenizer=tokenizer,
        input_mode="text",
        pad_output=False,
        generate_kwargs={"max_new_tokens": 2},
    )
    questions = ({"query": [f"{i} + {n}?" for n in range(8)]} for i in itertools.count())
    env = ChatEnv.from_dataloader(questions, input_mode="text", tokenizer=tokenizer, batch_size=(8,))
    env = env.append_transform(StepCounter(max_steps=1))
    return CollectCallback(LLMCollector(env, policy=policy, dialog_turns_per_batch=8), replay_buffer)


def arguments(config: type, folder: str, **kwargs: Any) -> Any:
    return config(
        output_dir=folder,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        **kwargs,
    )


def _grpo(rank: int, folder: str, settings: list[dict[str, Any]]) -> list[list[list[str]]]:
    calls_of_runs = []
    for setting in settings:
        replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
        callbacks = []
        if rank == 0:
            callbacks.append(refill(replay_buffer, folder))
            callbacks[0].collect()
        setting = dict(setting)
        trainer_class, config = TRAINERS[setting.pop("trainer")]
        calls: list[list[str]] = []

        def reward(prompts: list[str], calls: list[list[str]] = calls, **kwargs: Any) -> list[float]:
            calls.append(prompts)
            return [float(i % 3) for i in range(len(prompts))]

        trainer = trainer_class(
            LlamaForCausalLM.from_pretrained(f"{folder}/model"),
            reward_funcs=reward,
            args=arguments(config, f"{folder}/{rank}", num_generations=GROUP, max_completion_length=2, **setting),
            train_dataset=TorchRLBufferDataset(
                replay_buffer, 3, columns="prompt-only", num_batches=None
            ).as_hf_dataset(),
            processing_class=tiny_tokenizer(),
            callbacks=callbacks,
        )
        trainer.train()
        if rank == 0:
            assert len(replay_buffer) == 8 * (1 + setting["max_steps"])
        calls_of_runs.append(calls)
    return calls_of_runs


@needs("streams in GRPO")
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_is_one_prompt(size: int, tmp_path: Path) -> None:
    tiny_causal_lm(tmp_path / "model")
    below, equal, above = GROUP // size, GROUP, 2 * GROUP
    settings = [
        {"trainer": trainer, "per_device_train_batch_size": rows, "shuffle_dataset": shuffle, "max_steps": 2}
        for trainer, shuffle in ([("grpo", True), ("grpo", False), ("rloo", True)] if size == 2 else [("grpo", True)])
        for rows in (below, equal, above)
    ]
    runs_of_ranks = run_ranks(_grpo, size, str(tmp_path), settings, timeout=60)
    checked = 0
    for setting, runs in zip(settings, zip(*runs_of_ranks, strict=True), strict=True):
        for calls in zip(*runs, strict=True):
            prompts = [prompt for of_rank in calls for prompt in of_rank]  # accelerate's slices, in order
            assert len(prompts) == setting["per_device_train_batch_size"] * size
            groups = [prompts[start : start + GROUP] for start in range(0, len(prompts), GROUP)]
            assert all(len(set(group)) == 1 for group in groups), (setting, groups)
            checked += len(groups)
    assert checked >= len(settings)


PAIRED = {"chosen": "{} yes", "rejected": "{} no"}
WITHOUT_GROUPS: dict[str, tuple[type, type, type, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, LlamaForCausalLM, {"text": "row {}"}),
    "reward": (RewardTrainer, RewardConfig, LlamaForSequenceClassification, PAIRED),
    "dpo": (DPOTrainer, DPOConfig, LlamaForCausalLM, {"prompt": "say {}:", **PAIRED}),
    "kto": (KTOTrainer, KTOConfig, LlamaForCausalLM, {"prompt": "say {}:", "completion": " {} yes", "label": True}),
}


def _without_groups(rank: int, folder: str, kind: str) -> tuple[int, list[str]]:
    trainer_class, config, model_class, row = WITHOUT_GROUPS[kind]
    sampler = CountingSampler()
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100), sampler=sampler)
    for n in range(40 if rank == 0 else 0):
        label = {"label": torch.tensor(n % 2 == 0)} if "label" in row else {}
        replay_buffer.add(TensorDict({k: v.format(n) for k, v in row.items() if k != "label"} | label))
    tokenizer = tiny_tokenizer()
    trainer = trainer_class(
        model_class.from_pretrained(f"{folder}/model"),
        args=arguments(config, f"{folder}/{rank}", per_device_train_batch_size=2, max_steps=5),
        train_dataset=TorchRLBufferDataset(replay_buffer, 4, num_batches=None).as_hf_dataset(),
        processing_class=tokenizer,
    )
    before, seen = sampler.rows, texts_seen_by_steps(trainer, tokenizer)
    trainer.train()
    return sampler.rows - before, seen


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", pytest.param("kto", marks=needs("streams in KTO"))])
def test_no_rank_draws_rows_that_are_thrown_away(kind: str, tmp_path: Path) -> None:
    (tiny_reward_model if kind == "reward" else tiny_causal_lm)(tmp_path / "model")
    (draws, seen), (their_draws, their_seen) = run_ranks(_without_groups, 2, str(tmp_path), kind, timeout=60)
    trained = 5 * 2 * 2
    # Up to TRL 1.8 KTO reads the stream twice: the completions of the second are those that it holds others against.
    streams = 2 if kind == "kto" and hasattr(KTOTrainer, "_get_kl_dataset") else 1
    assert their_draws == 0
    assert trained <= draws / streams <= trained + 2 * 4, "the rows trained on and at most one batch a rank"
    pair = 2 if kind in ("reward", "dpo") else 1
    assert len(seen) == len(their_seen) == trained // 2 * pair
    assert max(Counter(seen + their_seen).values()) <= 4


def _accelerated(rank: int, dispatch: bool | None) -> list[list[int]]:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this one was forked from
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(5000), sampler=SamplerWithoutReplacement(shuffle=False))
    if rank == 0:
        replay_buffer.extend(TensorDict({"x": torch.arange(5000)}, [5000]))
    dataset = TorchRLBufferDataset(replay_buffer, 5, num_batches=2 * MESSAGES_AHEAD)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    found = []
    for source in (dataset, dataset.as_hf_dataset()):
        loader = accelerator.prepare(DataLoader(source, batch_size=5))
        found.append([int(x) for batch in loader for x in batch["x"]])
    return found


@pytest.mark.parametrize("dispatch", [None, True, False])
def test_a_loader_of_accelerate_gives_each_rank_its_rows(dispatch: bool | None) -> None:
    # By default it iterates on rank 0 alone, and sends the others their rows.
    first, second = run_ranks(_accelerated, 2, dispatch, timeout=30)
    for mine, theirs in zip(first, second, strict=True):
        assert len(mine) == len(theirs) == 5 * MESSAGES_AHEAD
        assert len({*mine, *theirs}) == 10 * MESSAGES_AHEAD


def _sharded(rank: int, folder: str) -> tuple[list[list[int]], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    if rank == 0:
        for n in range(40):
            replay_buffer.add(TensorDict({"input_ids": torch.arange(n, n + 8)}))
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model")
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, losses = [], []
    dataset = TorchRLBufferDataset(replay_buffer, 4, num_batches=3)
    for batch in DataLoader(dataset, batch_size=4):
        ids = batch["input_ids"]
        seen += ids.tolist()
        loss = model(input_ids=ids[rank::2], labels=ids[rank::2]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return seen, losses


def test_a_sharded_model_sees_one_stream(tmp_path: Path) -> None:
    tiny_causal_lm(tmp_path / "model")
    (seen, losses), (their_seen, their_losses) = run_ranks(_sharded, 2, str(tmp_path), timeout=60)
    assert seen == their_seen
    assert len(seen) == 12
    assert losses != their_losses
