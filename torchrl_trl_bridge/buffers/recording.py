"""TRL's completions and their rewards → a replay buffer, in the layout of a TorchRL collector."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict, lazy_stack

from torchrl_trl_bridge.buffers import rows
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.compat.tensordict import non_tensor
from torchrl_trl_bridge.compat.torch import world
from torchrl_trl_bridge.compat.trl import NOT_COLUMNS, TrainerAtWork, trainer_at_work
from torchrl_trl_bridge.scoring import Reward, RewardFunctions

if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer

RANKS = ("each", "first")


class RolloutRecorder:
    """A TRL reward function that also records what it scores: a row of a replay buffer for each completion.

    ``GRPOTrainer(reward_funcs=RolloutRecorder(replay_buffer, reward))`` trains as ``reward_funcs=reward`` does, and the
    buffer gets the rollouts as a TorchRL ``LLMCollector`` would write them, so that TorchRL's samplers, transforms and
    losses take them, and a :class:`TorchRLBufferDataset` feeds the next trainer.

    Args:
        replay_buffer: a ``torchrl.data.ReplayBuffer`` that holds rows of different length: with a ``LazyStackStorage``
            or ``ListStorage``, or a Ray buffer of one.
        reward_func: what GRPOTrainer takes: a callable, an async callable, a sequence classifier or its path, or a list
            of these. The reward of a list, which the trainer then gets, is the weighted sum.
        reward_weights: the weights of a list, in place of ``GRPOConfig(reward_weights=...)``; 1 each by default.
        reward_processing_classes: the tokenizers of models, as for GRPOTrainer.
        tokenizer: for the token ids of prompts and the text of conversations. Default: the trainer's own; outside of a
            trainer, none, and rows go without them.
        ranks: in a run of several processes, ``"each"`` writes its own rows to its own ``replay_buffer``, or
            ``"first"`` writes those of all ranks. A buffer that is to feed the next trainer of these processes wants
            ``"first"``: rank 0 draws for all of them.
        evaluation: also record what is scored during evaluation.

    Raises:
        TypeError: if ``replay_buffer`` is not a replay buffer, or ``reward_func`` nothing that GRPOTrainer takes.
        ValueError: for an unknown ``ranks``, and a storage that keeps one string for all rows, or takes rows of one
            shape only. While training: for a dataset column that has the name of a rollout's key. What the buffer
            raises passes through, on all ranks, and ends the training: no rollout is lost in silence.

    Notes:
        A row holds ``("text", ...)`` and, for conversations, ``("history", ...)``, each with ``prompt``, ``response``
        and ``full``; ``("tokens", ...)`` of the same (int64) and ``("masks", "all_attention_mask")`` (bool); ``query``,
        the text of the last user turn or of the prompt; ``("next", "reward")`` (float32 ``[1, 1]``, NaN if no function
        applies) and each function's own under ``("rewards", name)``; ``done``, ``terminated`` and ``truncated`` (bool
        ``[1]``; a completion without an end token was truncated); ``policy_version`` (int64, the trainer's
        ``global_step``); ``group_id`` (str); and the other columns of the trainer's dataset, also under ``next``, where
        TorchRL's scorers look for an answer.

        ``group_id`` is the same for the completions of one prompt in one generation step, on all ranks. It serves as
        ``prompt_key`` of ``MCAdvantage`` and ``TopKRewardSelector``. Their defaults, ``query`` and ``("text",
        "prompt")``, also gather completions that the prompt got in earlier steps.

        A reward function is not told log-probabilities. For a loss that compares with the policy that generated, add
        ``("log_probs", "full")`` with a TorchRL wrapper of the policy (``generate=False``) before it trains on.

        Whether a trainer evaluates is seen by which of its methods called. Called by anyone else, it records.

    Examples:
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> def reward(completions, **kwargs):
        ...     return [float(len(completion)) for completion in completions]
        >>> rb = ReplayBuffer(storage=LazyStackStorage(100))
        >>> recorder = RolloutRecorder(rb, reward)
        >>> recorder(prompts=["2+2?", "2+2?"], completions=["4", "four"], completion_ids=[[7], [8, 9]])
        [1.0, 4.0]
        >>> rb[1]["text"].response, rb[1]["tokens"].response, rb[1]["next", "reward"]
        ('four', tensor([8, 9]), tensor([[4.]]))
        >>> rb[0]["group_id"] == rb[1]["group_id"]
        True
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        reward_func: Any,
        *,
        reward_weights: Sequence[float] | None = None,
        reward_processing_classes: Any = None,
        tokenizer: Any = None,
        ranks: str = "each",
        evaluation: bool = False,
    ) -> None:
        if not compat.is_replay_buffer(replay_buffer):
            raise TypeError(f"replay_buffer must be a torchrl ReplayBuffer, got {type(replay_buffer).__name__}.")
        if ranks not in RANKS:
            raise ValueError(f"ranks must be one of {', '.join(map(repr, RANKS))}, got {ranks!r}.")
        rows.check_storage(replay_buffer)
        self.replay_buffer = replay_buffer
        self.reward_functions = RewardFunctions(
            reward_func, reward_weights=reward_weights, reward_processing_classes=reward_processing_classes
        )
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.evaluation = evaluation
        self._calls = 0
        # The name by which trainers log the reward: that of what is wrapped.
        self.__name__ = "+".join(self.reward_functions.names)

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]] | None = None, **kwargs: Any
    ) -> list[Reward]:
        """Scores completions and records them.

        Args:
            prompts: ``B`` strings, or ``B`` conversations.
            completions: ``B`` strings, or ``B`` lists of messages.
            completion_ids: their token ids.
            kwargs: what the trainer passes to reward functions, all of which the wrapped ones get.

        Returns:
            ``B`` rewards; None where no function applies.
        """
        at_work = trainer_at_work()
        template_kwargs = getattr(at_work and at_work.trainer, "chat_template_kwargs", None)
        given = {} if completion_ids is None else {"completion_ids": completion_ids}
        rewards = self.reward_functions(prompts, completions, template_kwargs=template_kwargs, **given, **kwargs)
        total = self.reward_functions.combine(rewards)
        self._log(rewards, kwargs.get("log_metric"))
        if self.evaluation or at_work is None or not at_work.evaluates:
            self._calls += 1
            records = self._records(prompts, completions, completion_ids, rewards, total, at_work, kwargs)
            with rows.all_kept():
                self._write(records)
        return total

    def _log(self, rewards: dict[str, list[Reward]], log_metric: Any) -> None:
        """The mean reward of each function of a list, of which the trainer sees only the sum."""
        if log_metric is None or len(rewards) == 1:
            return
        for name, values in rewards.items():
            present = [value for value in values if value is not None]
            log_metric(f"rewards/{name}", math.fsum(present) / len(present) if present else math.nan)

    def _records(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]] | None,
        rewards: dict[str, list[Reward]],
        total: list[Reward],
        at_work: TrainerAtWork | None,
        kwargs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """What is known of each completion, in plain values, which go from rank to rank."""
        columns = {name: values for name, values in kwargs.items() if name not in NOT_COLUMNS}
        if taken := sorted(rows.RESERVED & columns.keys()):
            raise ValueError(
                f"the dataset's columns {taken} have the names of keys of a rollout, which they would overwrite: "
                "rename them with dataset.rename_column(...)."
            )
        tokenizer = _Prompts.of(self.tokenizer, at_work)
        version = getattr(kwargs.get("trainer_state"), "global_step", 0)
        records = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            ids = None if completion_ids is None else completion_ids[i]
            text, prompt_ids = tokenizer(prompt)
            records.append(
                {
                    "prompt": prompt,
                    "completion": completion,
                    "prompt_text": text,
                    "prompt_ids": prompt_ids,
                    "completion_text": completion if isinstance(completion, str) else tokenizer.decode(ids),
                    "completion_ids": ids,
                    "ended": tokenizer.has_ended(ids),
                    "group_id": f"{version}-{self._calls}-{_digest(prompt)}",
                    "policy_version": version,
                    "reward": total[i],
                    "rewards": {name: values[i] for name, values in rewards.items()},
                    "columns": {name: values[i] for name, values in columns.items() if values[i] is not None},
                }
            )
        return records

    def _write(self, records: list[dict[str, Any]]) -> None:
        ranks = world() if self.ranks == "first" else None
        if ranks is None:
            self.replay_buffer.extend(lazy_stack([_row(record) for record in records]))
            return
        gathered: list[Any] = [None] * ranks.size
        dist.gather_object(records, gathered if ranks.rank == 0 else None, dst=0)
        outcome: list[BaseException | None] = [None]
        if ranks.rank == 0:
            try:
                self.replay_buffer.extend(lazy_stack([_row(record) for record in itertools.chain(*gathered)]))
            except Exception as error:  # told to the other ranks, which would wait for this one for ever
                outcome = [error]
        failed = [None if outcome[0] is None else repr(outcome[0])]
        dist.broadcast_object_list(failed, src=0)
        if outcome[0] is not None:
            raise outcome[0]
        if failed[0] is not None:
            raise RuntimeError(f"rank 0 could not write the rollouts of this step: {failed[0]}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.replay_buffer!r}, {self.__name__}, ranks={self.ranks!r})"


def _row(record: dict[str, Any]) -> TensorDict:
    prompt, completion = record["prompt"], record["completion"]
    ended = record["ended"]
    texts = {"prompt": record["prompt_text"], "response": record["completion_text"]}
    whole = None if None in texts.values() else texts["prompt"] + texts["response"]
    leaves: dict[str, Any] = {
        "group_id": non_tensor(record["group_id"]),
        "rewards": TensorDict({name: _reward(value) for name, value in record["rewards"].items()}),
    }
    if any(part is not None for part in texts.values()):
        leaves["text"] = rows.text(**texts, full=whole)
    after: dict[str, Any] = {"reward": _reward(record["reward"])}
    if isinstance(prompt, str):
        after["text"] = rows.text(prompt=whole)
    else:
        leaves["history"] = rows.history(prompt=prompt, response=completion, cut_off=ended is False)
        after["history"] = rows.next_history(leaves["history"])
    leaves |= rows.tokens(prompt=record["prompt_ids"], response=record["completion_ids"])
    for time, done in ((leaves, False), (after, True)):
        time["query"] = non_tensor(_query(prompt))
        time["done"] = torch.tensor([done])
        time["truncated"] = torch.tensor([done and ended is False])
        time["terminated"] = torch.tensor([done and ended is not False])
        time["policy_version"] = torch.tensor(record["policy_version"])
        time.update({name: rows.leaf(value) for name, value in record["columns"].items()})
    return TensorDict({**leaves, "next": TensorDict(after)})


def _reward(value: Reward) -> torch.Tensor:
    return torch.tensor([[math.nan if value is None else value]], dtype=torch.float32)


def _query(prompt: Any) -> str:
    """What a collector calls the query: the question without the conversation or the template around it."""
    if isinstance(prompt, str):
        return prompt
    content = next((turn.get("content") for turn in reversed(prompt) if turn["role"] == "user"), None)
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, dict))


def _digest(prompt: Any) -> str:
    """Tells prompts apart, in the same way on all ranks. Images count by their place, not by what they show."""
    text = (
        prompt
        if isinstance(prompt, str)
        else json.dumps(prompt, sort_keys=True, default=lambda value: type(value).__name__)
    )
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


class _Prompts:
    """Text and token ids of prompts as the trainer has them; each prompt of a batch is tokenized once."""

    def __init__(self, tokenizer: Any, trainer: Any) -> None:
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # inside a processor of several modalities
        tools = getattr(trainer, "tools", None)
        template = getattr(trainer, "chat_template", None)
        self.template_kwargs = {
            **({"tools": tools} if tools else {}),
            **({"chat_template": template} if template else {}),
            **(getattr(trainer, "chat_template_kwargs", None) or {}),
        }
        self.known: dict[str, tuple[str | None, list[int] | None]] = {}

    @classmethod
    def of(cls, tokenizer: Any, at_work: TrainerAtWork | None) -> _Prompts:
        trainer = None if at_work is None else at_work.trainer
        return cls(getattr(trainer, "processing_class", None) if tokenizer is None else tokenizer, trainer)

    def __call__(self, prompt: Any) -> tuple[str | None, list[int] | None]:
        """The text of a prompt and its ids, where they can be known: an image's tokens are not."""
        if self.tokenizer is None or not _is_text(prompt):
            return (prompt if isinstance(prompt, str) else None), None
        key = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
        if key not in self.known:
            if isinstance(prompt, str):
                self.known[key] = prompt, self.tokenizer(text=prompt)["input_ids"]
            else:
                text = self.tokenizer.apply_chat_template(
                    prompt, tokenize=False, add_generation_prompt=True, **self.template_kwargs
                )
                self.known[key] = text, self.tokenizer(text=text, add_special_tokens=False)["input_ids"]
        return self.known[key]

    def decode(self, ids: list[int] | None) -> str | None:
        if self.tokenizer is None or ids is None:
            return None
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def has_ended(self, ids: list[int] | None) -> bool | None:
        """Whether a completion has an end token; None if that is not known."""
        if self.tokenizer is None or ids is None or self.tokenizer.eos_token_id is None:
            return None
        return bool(ids) and ids[-1] in (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)


def _is_text(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    contents = [turn.get("content") for turn in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
