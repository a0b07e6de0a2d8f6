"""Each TRL trainer trains from a buffer that a collector filled, by the name of its dataset type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from torchrl_trl_bridge import DatasetType, PreferencePairs, TorchRLBufferDataset
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

GROUP = 4


class CountLetters(Transform):
    """A reward: the share of lower-case letters in the answer."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        texts = [row["text", "response"] for row in tensordict.unbind(0)]
        shares = [sum(map(str.islower, text)) / max(len(text), 1) for text in texts]
        next_tensordict["reward"] = torch.tensor(shares).view(*tensordict.batch_size, 1, 1)
        return next_tensordict


def questions() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield {"query": [f"{number} + 1?"] * GROUP + [f"{number} + 2?"] * GROUP, "answer": [number + 1] * 2 * GROUP}
        number += 1


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ReplayBuffer]:
    """Rewarded rollouts, in groups of 4 of one prompt; or the pairs that ``transform`` makes of them."""
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm(tmp_path_factory.mktemp("policy"), tokenizer)

    def rollouts(mode: str, transform: Transform | None = None) -> ReplayBuffer:
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode=mode, generate=True, pad_output=False,
            generate_kwargs={"max_new_tokens": 8, "do_sample": True},
        )  # fmt: skip
        env = ChatEnv.from_dataloader(questions(), input_mode=mode, tokenizer=tokenizer, batch_size=(2 * GROUP,))
        env = env.append_transform(StepCounter(max_steps=1)).append_transform(CountLetters())
        replay_buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=transform)
        torch.manual_seed(0)
        for _ in LLMCollector(
            env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=24, replay_buffer=replay_buffer
        ):
            pass
        return replay_buffer

    return rollouts


@dataclass
class Case:
    """A trainer, what its dataset is, and what its configuration adds."""

    trainer: type
    config: type
    columns: str | DatasetType
    kind: str = "rollouts"
    arguments: dict[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ("conversational", "standard")
    streams: bool = True


GENERATION = {"num_generations": GROUP, "max_completion_length": 4}
PROMPTS = DatasetType("prompt-only", extra={"answer": "answer"})
CASES = {
    "sft-language-modeling": Case(trl.SFTTrainer, trl.SFTConfig, "language-modeling"),
    "sft-prompt-completion": Case(trl.SFTTrainer, trl.SFTConfig, "prompt-completion"),
    "sft-packing": Case(
        trl.SFTTrainer, trl.SFTConfig, "prompt-completion", arguments={"packing": True, "max_length": 64}
    ),
    "sft-tokenized": Case(
        trl.SFTTrainer, trl.SFTConfig, "tokenized", arguments={"completion_only_loss": True}, forms=("tokenized",)
    ),
    "sft-tokenized-packing": Case(
        trl.SFTTrainer, trl.SFTConfig, DatasetType("tokenized", labels=True),
        arguments={"packing": True, "max_length": 64}, forms=("tokenized",),
    ),
    "grpo": Case(trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, arguments=GENERATION),
    "rloo": Case(trl.RLOOTrainer, trl.RLOOConfig, PROMPTS, arguments=GENERATION),
    "dpo": Case(trl.DPOTrainer, trl.DPOConfig, "preference", "pairs"),
    "kto": Case(trl.KTOTrainer, trl.KTOConfig, DatasetType("unpaired-preference", threshold=0.1)),
    "reward": Case(
        trl.RewardTrainer, trl.RewardConfig, "preference", "pairs", forms=("conversational", "standard", "tokenized")
    ),
    "distillation": Case(
        trl.DistillationTrainer, trl.DistillationConfig, "prompt-only", arguments={"max_completion_length": 4}
    ),
    "cpo": Case(CPOTrainer, CPOConfig, "preference", "pairs", {"max_length": 64}, streams=False),
    "orpo": Case(ORPOTrainer, ORPOConfig, "preference", "pairs", {"max_length": 64}, streams=False),
}  # fmt: skip
RUNS = [
    pytest.param(case, form, streaming, id=f"{name}-{form}-{'stream' if streaming else 'snapshot'}")
    for name, case in CASES.items()
    for form in case.forms
    for streaming in ([True, False] if case.streams else [False])
]
MODES = {"conversational": "history", "standard": "text", "tokenized": "text"}


def buffer_of(case: Case, form: str, rollouts: Callable[..., ReplayBuffer]) -> ReplayBuffer:
    if case.kind == "rollouts":
        return rollouts(MODES[form])
    leaf = {"conversational": "history", "standard": "text", "tokenized": "tokens"}[form]
    return rollouts(MODES[form], PreferencePairs(GROUP, prompt_key=(leaf, "prompt"), strategy="all"))


def arguments(config: type, folder: Path, **kwargs: Any) -> Any:
    return config(**{
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2,
        "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "gradient_checkpointing": False,
    } | kwargs)  # fmt: skip


def trainer_of(trainer: type, args: Any, dataset: Any, folder: Path, **kwargs: Any) -> Any:
    """The trainer with what it asks for beside the data."""
    model = (tiny_reward_model if trainer is trl.RewardTrainer else tiny_causal_lm)(folder / "model")
    if trainer in (trl.GRPOTrainer, trl.RLOOTrainer):
        kwargs.setdefault("reward_funcs", [length_reward, answer_reward])
    if trainer is trl.DistillationTrainer:
        kwargs["teacher_model"] = tiny_causal_lm(folder / "teacher", seed=1)
    return trainer(model, args=args, train_dataset=dataset, processing_class=tiny_tokenizer(), **kwargs)


def length_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(i % 3) for i in range(len(completions))]


def answer_reward(prompts: list[Any], completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
    for prompt, number in zip(prompts, answer, strict=True):
        text = prompt if isinstance(prompt, str) else prompt[0]["content"]
        assert f"{number - 1} + " in text, "the extra column belongs to the prompt"
        assert type(number) is int
    return [float(number) for number in answer]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def train(trainer: Any) -> list[dict[str, Any]]:
    """Trains, and returns the records of the steps."""
    before = weights(trainer.model)
    assert trainer.train().global_step == trainer.args.max_steps
    assert not torch.equal(weights(trainer.model), before)
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize(("case", "form", "streaming"), RUNS)
def test_it_trains(
    case: Case, form: str, streaming: bool, rollouts: Callable[..., ReplayBuffer], tmp_path: Path
) -> None:
    dataset = TorchRLBufferDataset(buffer_of(case, form, rollouts), 8, columns=case.columns, num_batches=None)
    args = arguments(case.config, tmp_path, **case.arguments)
    dataset.check(case.trainer, args, streaming=streaming)
    assert f"({form}, " in repr(dataset)
    train(trainer_of(case.trainer, args, dataset.as_hf_dataset(streaming=streaming), tmp_path))
