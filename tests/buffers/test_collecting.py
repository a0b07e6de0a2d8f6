"""The callback that refills the buffer while a trainer trains."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from torchrl_trl_bridge import CollectCallback, TorchRLBufferDataset
from torchrl_trl_bridge.buffers.collecting import _Ages
from torchrl_trl_bridge.compat import exchanging
from torchrl_trl_bridge.compat.weights import copy_weights, unwrapped
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer


class Rewarded(Transform):
    """Rewards that count up, so that a mean tells which rows it is of; and an error on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fails_at: int | None = None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.calls == self.fails_at:
            raise ZeroDivisionError("the reward model is down")
        next_tensordict["reward"] = torch.full((2, 1, 1), float(self.calls))
        self.calls += 1
        return next_tensordict


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return tiny_causal_lm(tmp_path / "model")


def collector_of(model: Any, replay_buffer: ReplayBuffer | None, **kwargs: Any) -> tuple[LLMCollector, Rewarded]:
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="history", pad_output=False,
        generate_kwargs={"max_new_tokens": 4, "do_sample": True},
    )  # fmt: skip
    rewarded = Rewarded()
    env = ChatEnv.from_dataloader(
        itertools.repeat({"query": ["1 + 1?", "2 + 2?"]}), input_mode="history", tokenizer=tokenizer, batch_size=(2,)
    )
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(rewarded)
    options = {"dialog_turns_per_batch": 2, "replay_buffer": replay_buffer} | kwargs
    return LLMCollector(env, policy=policy, **options), rewarded


def trainer_of(
    model: Any, replay_buffer: ReplayBuffer, folder: Path, callbacks: list[TrainerCallback], **kwargs: Any
) -> SFTTrainer:
    dataset = TorchRLBufferDataset(replay_buffer, 4, columns="prompt-completion", num_batches=None)
    return SFTTrainer(
        model,
        args=SFTConfig(**{
            "output_dir": str(folder / "out"), "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 2,
            "learning_rate": 1e-2, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
            "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        } | kwargs),
        train_dataset=dataset.as_hf_dataset(), processing_class=tiny_tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def logs_of(trainer: SFTTrainer) -> list[dict[str, Any]]:
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("own_buffer", [True, False], ids=["collector-writes", "callback-writes"])
def test_it_collects_stamps_and_logs(own_buffer: bool, model: Any, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector, _ = collector_of(model, replay_buffer if own_buffer else None)
    callback = CollectCallback(collector, replay_buffer, every_n_steps=2, batches=3)
    assert callback.collect() == 6
    trainer = trainer_of(model, replay_buffer, tmp_path, [callback])
    trainer.train()

    assert len(replay_buffer) == 18
    versions = [int(replay_buffer[i]["policy_version"]) for i in range(18)]
    assert versions == [0] * 6 + [1] * 6 + [2] * 6
    first, second = logs_of(trainer)
    assert (first["collect/rows"], second["collect/rows"]) == (12, 6)
    assert first["collect/reward"] == sum(range(6)) / 6
    assert second["collect/reward"] == sum(range(6, 9)) / 3
    assert first["collect/seconds"] > 0
    assert first["collect/age"] == 0  # drawn before the first refill
    assert 0 < second["collect/age"] <= 1
    assert not len(replay_buffer.transform), "the buffer is as it was"
    trainer.train()
    assert logs_of(trainer)[-1]["collect/age"] > 0
    assert not len(replay_buffer.transform)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_the_age_of_rows_costs_no_copy_of_them(storage: type, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_buffer = ReplayBuffer(storage=storage(4), transform=_Ages())
    replay_buffer.add(TensorDict({"policy_version": torch.tensor(0)}))
    for name in ("_copied", "_stacked_if_of_one_dtype"):
        monkeypatch.setattr(exchanging, name, lambda *args: pytest.fail("the rows were copied"))
    assert len(list(TorchRLBufferDataset(replay_buffer, 4))) == 4
    assert replay_buffer.transform[0].mean() == 0


def test_what_reports_a_log_sees_it(model: Any, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(dict(logs))

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    callback = CollectCallback(collector_of(model, replay_buffer)[0], replay_buffer)
    callback.collect()
    trainer_of(model, replay_buffer, tmp_path, [Reporter(), callback]).train()
    assert all("collect/reward" in logs for logs in seen if "loss" in logs)
    assert not any("collect/reward" in logs for logs in seen if "loss" not in logs)


def test_an_error_of_the_collector_ends_the_training(model: Any, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector, rewarded = collector_of(model, replay_buffer)
    callback = CollectCallback(collector, replay_buffer)
    callback.collect()
    rewarded.fails_at = 2
    trainer = trainer_of(model, replay_buffer, tmp_path, [callback])
    with pytest.raises(ZeroDivisionError, match="the reward model is down"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_collector_that_comes_to_its_end(model: Any, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    callback = CollectCallback(collector_of(model, replay_buffer, total_dialog_turns=4)[0], replay_buffer)
    callback.collect()
    with pytest.raises(RuntimeError, match=r"come to its end.*total_dialog_turns=-1"):
        trainer_of(model, replay_buffer, tmp_path, [callback]).train()


def test_data_loader_workers_are_refused(model: Any, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    callback = CollectCallback(collector_of(model, replay_buffer)[0], replay_buffer)
    callback.collect()
    with pytest.raises(ValueError, match=r"dataloader_num_workers=2.*never sees the rows"):
        trainer_of(model, replay_buffer, tmp_path, [callback], dataloader_num_workers=2).train()


def test_arguments_that_cannot_be_meant(model: Any) -> None:
    collector, _ = collector_of(model, None)
    for value in (None, [1], model):
        with pytest.raises(TypeError, match="collector must be a TorchRL collector, such as an LLMCollector"):
            CollectCallback(value, ReplayBuffer(storage=LazyStackStorage(8)))
        with pytest.raises(TypeError, match="replay_buffer must be a torchrl ReplayBuffer"):
            CollectCallback(collector, value)
    replay_buffer, other = (ReplayBuffer(storage=LazyStackStorage(10)) for _ in range(2))
    collector, _ = collector_of(model, replay_buffer)
    with pytest.raises(ValueError, match="another replay buffer"):
        CollectCallback(collector, other)
    for name in ("every_n_steps", "batches"):
        with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
            CollectCallback(collector, replay_buffer, **{name: 0})


# The weights


def lora(model: Any) -> Any:
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def changed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "data-parallel": torch.nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=list(WRAPPERS))
@pytest.mark.parametrize("adapters", ["none", "trainer", "both"])
def test_the_policy_gets_the_weights_of_the_trainer(wrapper: Callable[[Any], Any], adapters: str, model: Any) -> None:
    policy = copy.deepcopy(model)
    if adapters == "both":
        policy = lora(policy)
    trained = changed(model if adapters == "none" else lora(model))
    ids = torch.arange(3, 20)[None]
    assert not torch.allclose(policy(ids).logits, trained(ids).logits, atol=1e-3)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    assert copy_weights(unwrapped(wrapper(trained)), policy)
    torch.testing.assert_close(policy(ids).logits, trained(ids).logits)
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_a_policy_that_is_the_trained_model_needs_none(model: Any) -> None:
    assert not copy_weights(model, model)
    inner = model
    assert not copy_weights(lora(model), inner)


def test_another_policy_follows_the_trainer(model: Any, tmp_path: Path) -> None:
    policy = copy.deepcopy(model)
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    callback = CollectCallback(collector_of(policy, replay_buffer)[0], replay_buffer)
    callback.collect()
    trainer = trainer_of(model, replay_buffer, tmp_path, [callback])
    trainer.train()
    for ours, theirs in zip(policy.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_policy_elsewhere_is_given_the_model(model: Any, tmp_path: Path) -> None:
    given: list[Any] = []
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector, _ = collector_of(copy.deepcopy(model), replay_buffer)
    callback = CollectCallback(collector, replay_buffer, every_n_steps=2, update_policy=given.append)
    callback.collect()
    trainer_of(model, replay_buffer, tmp_path, [callback]).train()
    assert [one is model for one in given] == [True, True]


def test_dropout_is_off_while_collecting_and_on_again_after(model: Any, tmp_path: Path) -> None:
    modes: list[bool] = []
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    callback = CollectCallback(collector_of(model, replay_buffer)[0], replay_buffer, every_n_steps=2)
    callback.collect()
    assert modes
    assert not any(modes)
    modes.clear()
    trainer_of(model, replay_buffer, tmp_path, [callback]).train()
    assert [mode for mode, _ in itertools.groupby(modes)] == [True, False, True, False]
