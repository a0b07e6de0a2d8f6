"""Rewards cross both ways in real training: TRL's trainers on TorchRL's scorers, TorchRL's loss on TRL's rewards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv, GSM8KRewardParser
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.features import has, needs
from torchrl_trl_bridge import HFRewardModelWrapper, TRLRewardTransform, as_trl_reward_func
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(trainer_class: Any, config_class: Any, folder: Path, reward_funcs: Any, rows: list[Any], **more: Any) -> Any:
    policy = tiny_causal_lm(folder / "policy")
    policy.lm_head.bias = torch.nn.Parameter(torch.zeros(policy.config.vocab_size))
    with torch.no_grad():
        policy.lm_head.bias[policy.config.eos_token_id] = 4  # completions that end sooner or later
    trainer = trainer_class(
        model=policy,
        processing_class=tiny_tokenizer(),
        reward_funcs=reward_funcs,
        train_dataset=datasets.Dataset.from_list(rows),
        args=config_class(
            output_dir=str(folder / "out"),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=7,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        **more,
    )
    trainer.train()
    return trainer


QUESTIONS = ["What is 2 + 2?", "Name a colour.", "Go!", "Say hello to Ada, please."]


@pytest.mark.parametrize("conversational", [True, False], ids=["conversations", "text"])
def test_scores_equal_trls_own(tmp_path: Path, conversational: bool) -> None:
    """The reward model as TRL calls it, and the same model in the wrapper, on the same completions."""
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model(tmp_path / "judge", pad_token_id=tokenizer.encode("!")[0])
    ours = tiny_reward_model(tmp_path / "other", pad_token_id=tokenizer.encode("!")[0])
    trls: list[float] = []
    model.register_forward_hook(lambda _, __, output: trls.extend(output.logits[:, 0].tolist()))
    key: Any = ("history", "full") if conversational else [("text", "prompt"), ("text", "response")]
    score = as_trl_reward_func(
        HFRewardModelWrapper(ours, tokenizer=tokenizer, input_key=key, micro_batch_size=3), name="wrapper"
    )
    scored: list[float | None] = []

    def recorded(**kwargs: Any) -> list[float | None]:
        rewards = score(**kwargs)
        scored.extend(rewards)
        return rewards

    prompts = [[{"role": "user", "content": text}] if conversational else text for text in QUESTIONS]
    trainer = train(
        GRPOTrainer,
        GRPOConfig,
        tmp_path,
        [model, recorded],
        [{"prompt": prompt} for prompt in prompts],
        reward_processing_classes=[tokenizer, None],
    )
    assert len(scored) == len(trls) == 8
    assert len({round(reward, 6) for reward in trls}) > 4
    torch.testing.assert_close(torch.tensor(scored), torch.tensor(trls), atol=1e-5, rtol=0)
    assert trainer.state.log_history[0]["rewards/judge/mean"] == pytest.approx(
        trainer.state.log_history[0]["rewards/recorded/mean"], abs=1e-5
    )


@needs("parsers without tokenizer")
@pytest.mark.parametrize(
    ("trainer_class", "config_class"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"]
)
def test_torchrl_scorers_train_in_trl(tmp_path: Path, trainer_class: Any, config_class: Any) -> None:
    widths = set()

    def shortness(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        widths.add(ids.shape[1])
        lengths = torch.full((len(ids),), float(ids.shape[1]))
        return -lengths, lengths

    short = TensorDictModule(shortness, in_keys=[("tokens", "response")], out_keys=["reward", "length"])
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "#### 4"} for text in QUESTIONS]
    reward_funcs = [as_trl_reward_func(GSM8KRewardParser(), name="gsm8k"), as_trl_reward_func(short, name="short")]
    trainer = train(trainer_class, config_class, tmp_path, reward_funcs, rows)
    log = trainer.state.log_history[0]
    assert log["rewards/gsm8k/mean"] == 0
    assert -7 <= log["rewards/short/mean"] < 0
    assert len(widths) > 1, "completions of different length, those of one length at a time"
    if has("log_extra"):
        assert log["short/length"] == pytest.approx(-log["rewards/short/mean"]), "through log_metric"


@needs("parsers without tokenizer")
def test_a_missing_column_ends_the_training_with_its_name(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}], "solution": "4"} for text in QUESTIONS]
    with pytest.raises(KeyError, match="no column 'answer'"):
        train(GRPOTrainer, GRPOConfig, tmp_path, as_trl_reward_func(GSM8KRewardParser()), rows)


def longest(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def spread(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(set(completion[0]["content"]))) for completion in completions]


@pytest.mark.parametrize("place", ["environment", "postproc", "buffer"])
@pytest.mark.parametrize("reward", ["model", "functions"])
def test_torchrls_loss_trains_on_trls_rewards(tmp_path: Path, reward: str, place: str) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm(tmp_path / "policy", tokenizer)
    settings = {"tokenizer": tokenizer, "input_mode": "history", "pad_output": False, "return_log_probs": True}
    policy = TransformersWrapper(model, generate_kwargs={"max_new_tokens": 6, "do_sample": True}, **settings)
    judge = tiny_reward_model(tmp_path / "judge")
    score: Any
    if reward == "model":
        score = HFRewardModelWrapper(judge, tokenizer=tokenizer).as_transform()
    else:
        score = TRLRewardTransform([longest, spread, judge], reward_weights=[1, 0.5, 1])

    queries = itertools.repeat({"query": ["first?"] * 4 + ["the second?"] * 4})
    env = ChatEnv.from_dataloader(queries, input_mode="history", tokenizer=tokenizer, batch_size=(8,))
    env = env.append_transform(StepCounter(max_steps=1))
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(16))
    replay_buffer.append_transform(MCAdvantage(grpo_size=4, prompt_key=("text", "prompt")))
    if place == "environment":
        env = env.append_transform(score)
    elif place == "buffer":
        replay_buffer.append_transform(score, invert=True)
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=8,
        total_dialog_turns=8,
        postproc=score if place == "postproc" else None,
    )
    for rollouts in collector:
        replay_buffer.extend(rollouts.reshape(-1))
    assert len(replay_buffer) == 8

    loss = GRPOLoss(TransformersWrapper(model, generate=False, **settings), kl_to_ref_coeff=None)
    batch = replay_buffer.sample(8)
    assert batch["next", "reward"].shape == (8, 1, 1)
    with torch.no_grad():
        batch = loss.actor_network(batch)  # log-probabilities of whole sequences, which the collector does not write
    output = loss(batch)
    assert torch.isfinite(output.loss_objective)
    output.loss_objective.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert any(gradient.abs().sum() > 0 for gradient in gradients)
    assert all(parameter.grad is None for parameter in judge.parameters()), "rewards carry no graph"
