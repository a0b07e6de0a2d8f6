"""Real trainers with a recorder as their reward function."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from datasets import Dataset
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.features import has, needs
from torchrl_trl_bridge import RolloutRecorder
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

QUESTIONS = [f"{i} + {i}?" for i in range(4)]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
TRAINERS = [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)]


def reward(completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
    return [float(len(str(completion)) % 5 + value) for completion, value in zip(completions, answer, strict=True)]


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyStackStorage(1000))


def dataset(conversational: bool = True) -> Dataset:
    return Dataset.from_dict({"prompt": CHATS if conversational else QUESTIONS, "answer": list(range(4))})


def trainer_with(
    reward_funcs: Any, folder: Path, trainer: Any = GRPOTrainer, config: Any = GRPOConfig, **kwargs: Any
) -> Any:
    rows = kwargs.pop("train_dataset", dataset())
    model = kwargs.pop("model", None) or tiny_causal_lm(folder / "model")
    arguments = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        **kwargs,
    }
    return trainer(
        model,
        reward_funcs=reward_funcs,
        args=config(output_dir=str(folder / "out"), **arguments),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny_tokenizer(),
    )


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize(("trainer", "config"), TRAINERS)
@pytest.mark.parametrize("conversational", [True, False], ids=["conversational", "standard"])
def test_training_is_the_same_and_every_rollout_is_kept(
    trainer: Any, config: Any, conversational: bool, tmp_path: Path
) -> None:
    rows = dataset(conversational)
    scored: list[dict[str, Any]] = []

    def watched(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> Any:
        rewards = reward(completions, **kwargs)
        version = kwargs["trainer_state"].global_step
        for ids, prompt, value, answer in zip(completion_ids, prompts, rewards, kwargs["answer"], strict=True):
            scored.append({"ids": ids, "prompt": prompt, "reward": value, "version": version, "answer": answer})
        return rewards

    plain = trainer_with(reward, tmp_path, trainer, config, train_dataset=rows)
    plain.train()
    replay_buffer = buffer()
    recording = trainer_with(RolloutRecorder(replay_buffer, watched), tmp_path, trainer, config, train_dataset=rows)
    recording.train()
    torch.testing.assert_close(weights(recording), weights(plain), rtol=0, atol=0)
    assert len(replay_buffer) == len(scored) == 16
    for i, expected in enumerate(scored):
        row = replay_buffer[i]
        assert row["tokens"].response.tolist() == expected["ids"]
        assert row["next", "reward"].item() == expected["reward"]
        assert row["policy_version"].item() == expected["version"]
        assert row["answer"] == expected["answer"]
    assert [replay_buffer[i]["policy_version"].item() for i in (0, 15)] == [0, 1]
    for start in range(0, 16, 4):
        assert len({replay_buffer[start + i]["group_id"] for i in range(4)}) == 1
    assert len({replay_buffer[i]["group_id"] for i in range(16)}) == 4
    logged = {key for record in recording.state.log_history for key in record}
    assert "rewards/watched/mean" in logged


@pytest.mark.parametrize("conversational", [True, False], ids=["conversational", "standard"])
def test_prompt_ids_are_those_that_the_policy_was_given(conversational: bool, tmp_path: Path) -> None:
    replay_buffer = buffer()
    trainer = trainer_with(RolloutRecorder(replay_buffer, reward), tmp_path, train_dataset=dataset(conversational))
    seen: list[list[int]] = []
    forward = trainer.model.forward

    def watch(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # the loss, on the ids that were generated
            ids, masks = kwargs["input_ids"], kwargs["attention_mask"]
            seen.extend(row[mask.bool()].tolist() for row, mask in zip(ids, masks, strict=True))
        return forward(*args, **kwargs)

    trainer.model.forward = watch
    trainer.train()
    stored = [replay_buffer[i]["tokens"].full.tolist() for i in range(len(replay_buffer))]
    assert sorted(stored) == sorted(seen)


@pytest.mark.parametrize("evaluation", [False, True])
def test_evaluation_is_recorded_if_asked_for(evaluation: bool, tmp_path: Path) -> None:
    replay_buffer = buffer()
    recorder = RolloutRecorder(replay_buffer, reward, evaluation=evaluation)
    trainer = trainer_with(recorder, tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    trainer.train()
    evaluated = 3 * 16
    assert len(replay_buffer) == 16 + (evaluated if evaluation else 0)
    trainer.evaluate()
    assert len(replay_buffer) == 16 + (evaluated + 16 if evaluation else 0)


@needs("async")
def test_models_and_async_functions_score_beside_each_other(tmp_path: Path) -> None:
    async def later(completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    tiny_reward_model(tmp_path / "judge")
    functions = [reward, later, str(tmp_path / "judge")]
    together, apart = buffer(), trainer_with(functions, tmp_path, reward_weights=[1.0, 2.0, 3.0])
    apart.train()
    functions[2] = str(tmp_path / "judge")  # the trainer puts the model in its place
    recorder = RolloutRecorder(together, functions, reward_weights=[1.0, 2.0, 3.0])
    trainer = trainer_with(recorder, tmp_path)
    trainer.train()
    torch.testing.assert_close(weights(trainer), weights(apart), rtol=0, atol=1e-5)
    expected, logged = (run.state.log_history[0] for run in (apart, trainer))
    means = [expected[f"rewards/{name}/mean"] for name in ("reward", "later", "judge")]
    assert logged["reward"] == pytest.approx(means[0] + 2 * means[1] + 3 * means[2], abs=1e-4)
    for name in ("reward", "later", "judge"):
        if has("log_extra"):
            assert logged[f"rewards/{name}"] == pytest.approx(expected[f"rewards/{name}/mean"], abs=1e-4)
        stored = [together[i]["rewards", name].item() for i in range(8)]
        assert sum(stored) / 8 == pytest.approx(expected[f"rewards/{name}/mean"], abs=1e-4)


def test_a_failing_buffer_ends_the_training(tmp_path: Path) -> None:
    class Full(ReplayBuffer):
        def extend(self, data: Any, **kwargs: Any) -> Any:
            if len(self) == 8:
                raise OSError(28, "No space left on device")
            return super().extend(data, **kwargs)

    replay_buffer = Full(storage=LazyStackStorage(100))
    trainer = trainer_with(RolloutRecorder(replay_buffer, reward), tmp_path)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert len(replay_buffer) == 8


# Two processes, of which each generates half of a group


class Breaks(ReplayBuffer):
    def extend(self, data: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")


def _rank(rank: int, folder: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    found: dict[str, Any] = {}

    def train(replay_buffer: ReplayBuffer, ranks: str, **kwargs: Any) -> None:
        recorder = RolloutRecorder(replay_buffer, reward, ranks=ranks)
        model = AutoModelForCausalLM.from_pretrained(Path(folder, "model"))
        trainer_with(recorder, Path(folder), model=model, per_device_train_batch_size=2, **kwargs).train()

    for ranks in ("each", "first"):
        replay_buffer = buffer()
        train(replay_buffer, ranks, eval_strategy="steps", eval_steps=2)
        found[ranks] = [
            [row["group_id"], row["query"], *row["tokens"].response.tolist()]
            for row in (replay_buffer[i] for i in range(len(replay_buffer)))
        ]
    try:
        train(Breaks(storage=LazyStackStorage(10)), "first")
    except (OSError, RuntimeError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_ranks_record_their_own_rows_or_the_first_all(tmp_path: Path) -> None:
    tiny_causal_lm(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (str(tmp_path), port), nprocs=2)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    each = [rank["each"] for rank in ranks]
    assert [len(rows) for rows in each] == [4, 4]  # 2 steps of 2 completions a rank: a group of 4 a step
    assert [row[:2] for row in each[0]] == [row[:2] for row in each[1]]
    assert len({row[0] for row in each[0]}) == 2
    assert ranks[1]["first"] == []
    together = ranks[0]["first"]
    assert together == [*each[0][:2], *each[1][:2], *each[0][2:], *each[1][2:]]
    assert "No space left" in ranks[0]["error"]
    assert ranks[1]["error"].startswith("RuntimeError: rank 0 could not write the rollouts of this step: OSError")
