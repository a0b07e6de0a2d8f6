"""A reward model that TRL trained scores rollouts that TorchRL collected, and TorchRL's loss trains on the scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from trl import RewardConfig, RewardTrainer

from torchrl_trl_bridge import HFRewardModelWrapper
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer


def trained_reward_model(folder: Path) -> torch.nn.Module:
    pairs = [{"chosen": f"{i} yes yes", "rejected": f"{i} no"} for i in range(16)]
    model = tiny_reward_model(folder / "reward")
    RewardTrainer(
        model,
        args=RewardConfig(
            output_dir=str(folder / "out"),
            max_steps=3,
            learning_rate=1e-2,
            per_device_train_batch_size=8,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tiny_tokenizer(),
    ).train()
    return model


def prompts() -> Iterator[dict[str, Any]]:
    while True:
        yield {"query": ["first?"] * 4 + ["the second?"] * 4}


def test_grpo_loss_trains_on_the_scores(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm(tmp_path / "policy", tokenizer)
    settings = {"tokenizer": tokenizer, "input_mode": "history", "pad_output": False, "return_log_probs": True}
    policy = TransformersWrapper(
        model, generate=True, generate_kwargs={"max_new_tokens": 6, "do_sample": True}, **settings
    )
    score = HFRewardModelWrapper(trained_reward_model(tmp_path), inference_mode=True)

    def scored(rollouts: TensorDictBase) -> TensorDictBase:
        rewards = score(rollouts)["reward"]
        for rollout, reward in zip(rollouts.unbind(0), rewards, strict=True):
            alone = score(rollout.select("tokens", "masks"))["reward"]
            torch.testing.assert_close(alone, reward, atol=1e-5, rtol=0)
            rollout["next", "reward"] = reward.view(1, 1)
            rollout["next", "done"].fill_(True)
        return rollouts

    env = ChatEnv.from_dataloader(prompts(), input_mode="history", tokenizer=tokenizer, batch_size=(8,))
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(64))
    replay_buffer.append_transform(MCAdvantage(grpo_size=4, prompt_key=("text", "prompt")))
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=8)
    for rollouts in collector:
        replay_buffer.extend(scored(rollouts.reshape(-1)))
    assert len(replay_buffer) == 8

    loss = GRPOLoss(TransformersWrapper(model, generate=False, **settings), kl_to_ref_coeff=None)
    batch = replay_buffer.sample(8)
    with torch.no_grad():
        batch = loss.actor_network(batch)  # log-probabilities of whole sequences, which the collector does not write
    output = loss(batch)
    assert torch.isfinite(output.loss_objective)
    output.loss_objective.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert any(gradient.abs().sum() > 0 for gradient in gradients)
    assert all(parameter.grad is None for parameter in score.parameters()), "scores carry no graph"
