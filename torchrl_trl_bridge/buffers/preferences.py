"""Rewarded rollouts → chosen / rejected: a transform on the writing side of a replay buffer."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.envs.transforms import Transform

from torchrl_trl_bridge.arguments import is_integer
from torchrl_trl_bridge.buffers.columns import row_sums
from torchrl_trl_bridge.buffers.flattening import KeySelection, describe_missing, flat_name, own
from torchrl_trl_bridge.rollouts import Column, Path, read_columns

if TYPE_CHECKING:
    from tensordict.utils import NestedKey

STRATEGIES = ("best-worst", "best-random", "all")

_ATTENDED = ("masks", "all_attention_mask")


@dataclass
class _Rollout:
    prompt: Any
    response: Any
    reward: float


class PreferencePairs(Transform):  # type: ignore[misc]  # torchrl comes without types
    """Writes preference pairs to a replay buffer in place of a group of rewarded rollouts of one prompt.

    It waits for ``group_size`` finished rollouts of a prompt, and writes rows with the keys ``"prompt"``, ``"chosen"``,
    ``"rejected"`` and ``"margin"`` (float32, the difference of their rewards), which
    ``TorchRLBufferDataset(..., columns="preference")`` gives to a trainer. What is sampled passes as it is.

    Args:
        group_size: rollouts of one prompt that make a group; at least 2.
        prompt_key: the prompt, by which rollouts are grouped: a ``History``, a list of messages, a string or token ids.
        response_key: the completion. Default: what stands beside the prompt under ``"response"`` (``"completion"`` for
            the key ``"prompt"``). A key that ends in ``"full"`` holds whole conversations: no prompt is written then,
            and TRL finds the part that chosen and rejected share.
        reward_key: rewards of shape ``[B]``, ``[B, 1]`` or ``[B, 1, 1]``, or of several tokens or steps, which are
            summed.
        done_key: rows where this is False are passed over: a trajectory counts with its last row. A buffer without the
            key has finished rollouts only.
        margin: a pair is written if its rewards differ by more than this.
        strategy: ``"best-worst"`` makes one pair a group, ``"best-random"`` one of the best and any other, ``"all"``
            every pair of a group.
        seed: of the choice of ``"best-random"``.
        max_waiting: how many rollouts may wait for the rest of their group.

    Raises:
        ValueError: if ``group_size`` is below 2, the margin negative, or the strategy unknown.
        KeyError: while writing, if a key holds nothing; it names the available keys.
        RuntimeError: while writing, if more than ``max_waiting`` rollouts wait: most prompts then get less than
            ``group_size`` of them.

    Notes:
        Token ids are written without stored padding, as ``("masks", "all_attention_mask")`` tells it.

        Write with ``extend``: ``add`` takes what a transform gives for one row, and a group may give several.

        Groups are kept in the process that writes. With a Ray buffer that is the buffer's.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> pairs = PreferencePairs(2, prompt_key=("text", "prompt"), reward_key="reward")
        >>> rb = ReplayBuffer(storage=LazyStackStorage(10), transform=pairs)
        >>> text = {"prompt": ["2+2?", "2+2?"], "response": ["4", "5"]}
        >>> _ = rb.extend(TensorDict({"text": text, "reward": torch.tensor([1.0, 0.0])}, batch_size=[2]))
        >>> rb[0]["chosen"], rb[0]["rejected"], rb[0]["margin"]
        ('4', '5', tensor(1.))
        >>> pairs.stats()["pairs"]
        1
    """

    def __init__(
        self,
        group_size: int,
        *,
        prompt_key: NestedKey = ("history", "prompt"),
        response_key: NestedKey | None = None,
        reward_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        margin: float = 0.0,
        strategy: str = "best-worst",
        seed: int | None = None,
        max_waiting: int = 100_000,
    ) -> None:
        super().__init__()
        if not is_integer(group_size, 2):
            raise ValueError(f"group_size must be an integer from 2 on, got {group_size!r}.")
        if not margin >= 0:
            raise ValueError(f"margin must be a number from 0 on, got {margin!r}.")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}.")
        if seed is not None and not is_integer(seed):
            raise TypeError(f"seed must be an integer or None, got {seed!r}.")
        if not is_integer(max_waiting, 1):
            raise ValueError(f"max_waiting must be a positive integer, got {max_waiting!r}.")
        self.group_size = int(group_size)
        self.margin = margin
        self.strategy = strategy
        self.max_waiting = max_waiting
        self._prompt = KeySelection([prompt_key])
        self._response = KeySelection([_beside(prompt_key) if response_key is None else response_key])
        self._reward = KeySelection([reward_key])
        self._done = KeySelection([done_key])
        self._whole = (self._response.paths or [()])[-1][-1] == "full"
        self._random = random.Random(None if seed is None else int(seed))
        self._groups: dict[Hashable, list[_Rollout]] = defaultdict(list)
        self._waiting = 0
        self._counts: Counter[str] = Counter()

    def stats(self) -> dict[str, int]:
        """What became of the rollouts so far.

        Returns:
            ``groups`` finished and ``pairs`` written; what made no pair: ``ties`` (pairs whose rewards differ by no
            more than the margin), ``identical`` (pairs of one completion), ``nan`` (rollouts without a reward),
            ``not_done`` (rows before the last of their trajectory); and what waits: ``unfinished_groups`` with their
            ``waiting_rollouts``.
        """
        counted = ("groups", "pairs", "ties", "identical", "nan", "not_done")
        waiting = {
            "unfinished_groups": len(self._groups),
            "waiting_rollouts": self._waiting,
        }
        return {name: self._counts[name] for name in counted} | waiting

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Gives back what was sampled."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        batch = tensordict.reshape(-1) if tensordict.ndim != 1 else tensordict
        rows = [row for group in self._finished_groups(batch) for row in self._pairs(group)]
        self._counts["pairs"] += len(rows)
        if self._waiting > self.max_waiting:
            raise RuntimeError(
                f"{self._waiting} rollouts of {len(self._groups)} prompts wait for the rest of their groups of "
                f"{self.group_size}. Let each prompt have {self.group_size} rollouts, or raise max_waiting "
                f"({self.max_waiting})."
            )
        return lazy_stack(rows) if rows else None

    def _finished_groups(self, batch: TensorDictBase) -> Iterator[list[_Rollout]]:
        keys = (self._prompt, self._response, self._reward, self._done)
        leaves = read_columns(batch, [*(path for key in keys for path in key.paths or ()), _ATTENDED])
        prompts, responses = _column(self._prompt, leaves, batch), _column(self._response, leaves, batch)
        rewards = row_sums(_column(self._reward, leaves, batch).values, (self._reward.paths or [()])[-1])
        done_at = self._done.select(leaves)
        done = [bool(torch.as_tensor(value).all()) for value in leaves[done_at[0]].values] if done_at else None
        for i, reward in enumerate(rewards):
            if done is not None and not done[i]:
                self._counts["not_done"] += 1
                continue
            prompt, response = _unpadded(prompts.values[i], responses.values[i], leaves.get(_ATTENDED), i)
            group = self._groups[_identity(prompt)]
            group.append(_Rollout(own(prompt), own(response), reward))
            self._waiting += 1
            if len(group) == self.group_size:
                self._counts["groups"] += 1
                self._waiting -= self.group_size
                yield self._groups.pop(_identity(prompt))

    def _pairs(self, group: list[_Rollout]) -> Iterator[TensorDictBase]:
        rewarded = [rollout for rollout in group if not math.isnan(rollout.reward)]
        self._counts["nan"] += len(group) - len(rewarded)
        rewarded.sort(key=lambda rollout: -rollout.reward)
        for better, worse in self._candidates(rewarded):
            margin = better.reward - worse.reward
            if not margin > self.margin:
                self._counts["ties"] += 1
            elif _identity(better.response) == _identity(worse.response):
                self._counts["identical"] += 1
            else:
                row = {} if self._whole else {"prompt": better.prompt}
                row |= {"chosen": better.response, "rejected": worse.response}
                # A copy for each row: rows that share a list cannot be told from a column stored whole.
                stored = {name: _storable(own(value)) for name, value in row.items()}
                yield TensorDict({**stored, "margin": torch.tensor(margin, dtype=torch.float32)})

    def _candidates(self, rewarded: list[_Rollout]) -> Iterator[tuple[_Rollout, _Rollout]]:
        if self.strategy == "all":
            yield from itertools.combinations(rewarded, 2)
        elif len(rewarded) > 1:
            yield rewarded[0], rewarded[-1] if self.strategy == "best-worst" else self._random.choice(rewarded[1:])


def _beside(prompt_key: NestedKey) -> NestedKey:
    path = (prompt_key,) if isinstance(prompt_key, str) else tuple(prompt_key)
    if path[-1] != "prompt":
        raise ValueError(f"the completion that belongs to prompt_key={prompt_key!r} is not known: pass response_key.")
    return (*path[:-1], "response") if len(path) > 1 else "completion"


def _column(key: KeySelection, leaves: dict[Path, Column], batch: TensorDictBase) -> Column:
    meant = key.select(leaves)
    if not meant:
        raise KeyError(describe_missing(key.missing(leaves)[0], read_columns(batch)))
    column = leaves[meant[0]]
    for i, value in enumerate(column.values if isinstance(column.values, list) else ()):
        if value is None:
            raise ValueError(f"row {i} of the batch holds nothing under {flat_name(meant[0])!r}.")
    return column


def _unpadded(prompt: Any, response: Any, attended: Column | None, row: int) -> tuple[Any, Any]:
    if attended is None or not isinstance(prompt, torch.Tensor) or not isinstance(response, torch.Tensor):
        return prompt, response
    mask = attended.values[row]
    if mask is None or len(mask) != len(prompt) + len(response):
        return prompt, response
    mask = mask.bool()
    return prompt[mask[: len(prompt)]], response[mask[len(prompt) :]]


def _identity(value: Any) -> Hashable:
    """What two equal prompts or completions have in common."""
    if isinstance(value, torch.Tensor):
        return tuple(value.flatten().tolist())
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _storable(value: Any) -> Any:
    # tensordict would take a bare list of messages for a column over the turns.
    return value if isinstance(value, torch.Tensor) else NonTensorData(value)
