"""A trainer callback that lets a TorchRL collector refill the replay buffer while a TRL trainer trains."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs.transforms import Transform
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torchrl_trl_bridge.arguments import is_integer
from torchrl_trl_bridge.buffers.columns import row_sums
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.compat.trl import trainer_at_work
from torchrl_trl_bridge.compat.weights import copy_weights, unwrapped
from torchrl_trl_bridge.modes import eval_mode
from torchrl_trl_bridge.rollouts import Column, Path, read_columns

POLICY_VERSION = "policy_version"
"""The key of the version of the policy that made a row: TorchRL's own."""

_REWARD: Path = ("next", "reward")


@dataclass
class _Collected:
    """What was collected and drawn since the last log."""

    rows: int = 0
    seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)


class CollectCallback(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """Lets a TorchRL collector write fresh rollouts into a replay buffer while a trainer trains from it.

    Every ``every_n_steps`` optimizer steps it hands the trainer's weights to the collector's policy, raises the policy
    version by one, and collects. New rows get their version under ``"policy_version"`` (an int64 scalar).

    The trainer's log gets ``collect/rows`` (rows written), ``collect/reward`` (mean of the new rollouts, steps and
    tokens summed), ``collect/age`` (mean age, in versions, of the rows drawn from the buffer) and ``collect/seconds``,
    each since the log before. What is not known is left out.

    Args:
        collector: a ``torchrl.collectors.llm.LLMCollector``, made with this ``replay_buffer`` or with none, and with
            ``total_dialog_turns=-1``. An error that it raises ends the training.
        replay_buffer: the buffer that the trainer's dataset is a view of.
        every_n_steps: optimizer steps between two collections.
        batches: batches of the collector each time.
        policy: the module that gets the trainer's weights. Default: the model inside the collector's policy. A module
            that the trainer trains itself needs none; one of a trainer with adapters gets the adapters if it has such
            too, and the merged weights if not.
        update_policy: takes the trainer's unwrapped model in place of all that, for a policy that lives elsewhere (an
            inference server, another process).

    Raises:
        TypeError: if ``collector`` is no collector, or ``replay_buffer`` no replay buffer.
        ValueError: if ``every_n_steps`` or ``batches`` is not a positive integer, or the collector writes to another
            buffer; when training starts, if the data loader has workers, which would never see the new rows.
        RuntimeError: while training, if the collector has come to its end.

    Notes:
        With several processes, the first one collects.

        `collect` fills the buffer before there is a trainer.

    Examples:
        >>> callback = CollectCallback(collector, rb, every_n_steps=4)  # doctest: +SKIP
        >>> callback.collect()  # doctest: +SKIP
        64
        >>> SFTTrainer(model, train_dataset=dataset, callbacks=[callback]).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        collector: Any,
        replay_buffer: Any,
        *,
        every_n_steps: int = 1,
        batches: int = 1,
        policy: nn.Module | None = None,
        update_policy: Callable[[nn.Module], None] | None = None,
    ) -> None:
        if not hasattr(collector, "postproc") or not hasattr(collector, "__iter__"):
            raise TypeError(f"collector must be a TorchRL collector, such as an LLMCollector, got {collector!r}.")
        if not compat.is_replay_buffer(replay_buffer):
            raise TypeError(f"replay_buffer must be a torchrl ReplayBuffer instance, got {replay_buffer!r}.")
        for name, value in (("every_n_steps", every_n_steps), ("batches", batches)):
            if not is_integer(value, 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        own_buffer = getattr(collector, "replay_buffer", None)
        if own_buffer is not None and own_buffer is not replay_buffer:
            raise ValueError("the collector writes to another replay buffer than the one given here: give it this one.")
        self.collector = collector
        self.replay_buffer = replay_buffer
        self.every_n_steps = int(every_n_steps)
        self.batches = int(batches)
        self.version = 0
        self._policy = policy
        self._update_policy = update_policy
        self._iterator: Iterator[Any] | None = None
        self._since = _Collected()
        self._ages = _Ages()
        _stamp_rows(collector, self)

    def collect(self) -> int:
        """Collects with the weights that the policy has.

        Returns:
            The number of rows written.
        """
        if self._iterator is None:
            self._iterator = iter(self.collector)
        before, started = _written(self.replay_buffer), time.perf_counter()
        model = self._policy_model()
        with torch.no_grad(), contextlib.nullcontext() if model is None else eval_mode(model):
            for _ in range(self.batches):
                try:
                    data = next(self._iterator)
                except StopIteration:
                    raise RuntimeError(
                        "the collector has come to its end. Make it with total_dialog_turns=-1, so that it goes on as "
                        "long as the trainer does."
                    ) from None
                if data is not None:  # the collector has no buffer of its own
                    self.replay_buffer.extend(data.reshape(-1))
        rows = _written(self.replay_buffer) - before
        self._since.rows += rows
        self._since.seconds += time.perf_counter() - started
        return rows

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.dataloader_num_workers:
            raise ValueError(
                f"dataloader_num_workers={args.dataloader_num_workers}: a worker has its own copy of the buffer, and "
                "never sees the rows that are collected while training. Set it to 0."
            )
        work = trainer_at_work()
        if work is not None:  # what is added to the log is then there when the reporting callbacks come
            callbacks = work.trainer.callback_handler.callbacks
            callbacks.sort(key=lambda callback: callback is not self)
        compat.append_transform(self.replay_buffer, self._ages)
        self._ages.clear()  # a trainer looks at some rows before it trains on any

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the buffer without a trace."""
        compat.remove_transform(self.replay_buffer, self._ages)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every_n_steps or not state.is_world_process_zero:
            return
        self._hand_over(kwargs["model"])
        self.collect()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:  # an evaluation, or the summary at the end
            return
        values = {"collect/rows": self._since.rows, "collect/seconds": round(self._since.seconds, 4)}
        if self._since.rewards:
            values["collect/reward"] = sum(self._since.rewards) / len(self._since.rewards)
        age = self._ages.mean()
        if age is not None:
            values["collect/age"] = age
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)
        self._since = _Collected()
        self._ages.clear()

    def _hand_over(self, model: nn.Module) -> None:
        if self._update_policy is not None:
            self._update_policy(unwrapped(model))
        else:
            policy = self._policy_model()
            if policy is None:
                raise ValueError(
                    "the collector's policy has no module to give the trainer's weights to: pass policy=<module>, or "
                    "update_policy=<function>."
                )
            copy_weights(unwrapped(model), policy)
        self.version = self._ages.version = self.version + 1
        if getattr(self.collector, "policy_version_tracker", None) is not None:
            self.collector.increment_version()

    def _policy_model(self) -> nn.Module | None:
        if self._policy is not None:
            return self._policy
        policy = getattr(self.collector, "policy", None)
        model = getattr(policy, "model", policy)
        return model if isinstance(model, nn.Module) and any(True for _ in model.parameters()) else None

    def stamp(self, data: TensorDictBase) -> TensorDictBase:
        """Writes the policy version to collected rows, and keeps their rewards for the log."""
        data.set(POLICY_VERSION, torch.full(data.batch_size, self.version, dtype=torch.int64))
        rewards = read_columns(data.reshape(-1), [_REWARD]).get(_REWARD)
        if rewards is not None:
            self._since.rewards += [r for r in row_sums(rewards.values, _REWARD) if not math.isnan(r)]
        return data


def _stamp_rows(collector: Any, callback: CollectCallback) -> None:
    """Makes the collector stamp its batches, before they are written."""
    inner = collector.postproc

    def postproc(data: TensorDictBase) -> TensorDictBase:
        return callback.stamp(data if inner is None else inner(data))

    collector.postproc = postproc


class _Ages(Transform):  # type: ignore[misc]  # torchrl comes without types
    """Notes the age of the rows that are drawn from a buffer."""

    only_reads = True  # so that no rows are copied for it (compat/exchanging.py)

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self._total, self._rows = 0, 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Gives back what was sampled."""
        if not tensordict.batch_size:  # one row, read by its index
            return tensordict
        column = read_columns(tensordict, [(POLICY_VERSION,)]).get((POLICY_VERSION,), Column([]))
        versions = [int(value) for value in column.values if value is not None]
        self._total += len(versions) * self.version - sum(versions)
        self._rows += len(versions)
        return tensordict

    def mean(self) -> float | None:
        return self._total / self._rows if self._rows else None

    def clear(self) -> None:
        self._total, self._rows = 0, 0


def _written(replay_buffer: Any) -> int:
    count = getattr(replay_buffer, "write_count", None)  # of an ensemble there is none
    return int(len(replay_buffer) if count is None else count)
