"""Rewards written by a TorchRL transform: in an environment, after a collector, or in a replay buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_trl_bridge.modes import eval_mode

# TorchRL's own LLM environments and rewards have these dimensions beside the batch: tokens (or steps), and the reward.
_SHAPE_OF_A_REWARD = torch.Size([1, 1])


class RewardTransform(Transform):  # type: ignore[misc]  # torchrl is untyped
    """Base of the transforms that write rewards.

    In an environment it writes after each step; called on rollouts (a collector's ``postproc``, or a transform of a
    replay buffer, at sampling) it does the same for all of them at once. ``append_transform(..., invert=True)`` of a
    replay buffer scores rows when they are added instead, once.

    The rewards stand in the next tensordict, float32 ``[*batch, 1, 1]``, or in the shape and dtype of the reward that
    the environment has there already. They carry no graph.
    """

    @abstractmethod
    def rewards(self, rollouts: TensorDictBase) -> Mapping[NestedKey, torch.Tensor]:
        """The rewards of rollouts with prompt and response, ``[*batch]`` each, by the key that they are written to."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        with torch.no_grad():
            for key, values in self.rewards(tensordict).items():
                next_tensordict.set(key, _shaped(values, key, next_tensordict))
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Scores rollouts, whose ``"next"`` is made where it is missing."""
        after = tensordict.get("next", None)
        if after is None:
            after = tensordict.empty()
        # Set in any case: what a lazy stack returns may be a stack made for the caller.
        return tensordict.set("next", self._step(tensordict, after))

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # What an inverted transform of a replay buffer is asked when rows are added (torchrl 0.11 to 0.14).
        return self.forward(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset  # there is no completion to score yet

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for key in self.out_keys:
            if key not in reward_spec.keys(include_nested=True):
                shape = (*reward_spec.shape, *_SHAPE_OF_A_REWARD)
                reward_spec[key] = Unbounded(shape=shape, dtype=torch.float32, device=reward_spec.device)
        return reward_spec


def _shaped(values: torch.Tensor, key: NestedKey, after: TensorDictBase) -> torch.Tensor:
    """Rewards ``[*batch]`` in the shape and dtype of those that are there."""
    there = after.get(key, None)
    if not isinstance(there, torch.Tensor):
        return values.reshape(*values.shape, *_SHAPE_OF_A_REWARD)
    if there.numel() != values.numel():
        raise ValueError(
            f"('next', {key!r}) has shape {tuple(there.shape)} and there is one reward for each of the "
            f"{values.numel()} rollouts. Write the rewards elsewhere with reward_key=."
        )
    return values.reshape(there.shape).to(there.dtype)


class ScorerTransform(RewardTransform):
    """Writes what a scorer module makes of rollouts.

    Args:
        scorer: a module that writes one float per rollout.
        reward_key: where the reward goes in the next tensordict.
    """

    def __init__(self, scorer: TensorDictModuleBase, reward_key: NestedKey = "reward") -> None:
        super().__init__(in_keys=scorer.in_keys, out_keys=[reward_key])
        self.scorer = scorer

    def rewards(self, rollouts: TensorDictBase) -> Mapping[NestedKey, torch.Tensor]:
        with eval_mode(self.scorer):  # no gradient will want its dropout, whatever `env.train()` says
            scored: Any = self.scorer(rollouts, tensordict_out=rollouts.empty())
        return {self.out_keys[0]: scored.get(self.scorer.out_keys[0])}
