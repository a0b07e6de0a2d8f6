"""`as_trl_reward_func`: TorchRL's scorers as reward functions of TRL's trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from tensordict.utils import NestedKey

from torchrl_trl_bridge.compat.torchrl import score_step, scores_steps
from torchrl_trl_bridge.compat.trl import NOT_COLUMNS
from torchrl_trl_bridge.messages import messages_to_history
from torchrl_trl_bridge.modes import eval_mode
from torchrl_trl_bridge.rewards.text import path_of
from torchrl_trl_bridge.rollouts import Path, read_columns

__all__ = ["as_trl_reward_func"]

Outputs = Mapping[Path, Any]
"""What a scorer wrote, by key: one value a completion."""


def as_trl_reward_func(
    scorer: Any,
    *,
    reward_key: NestedKey = "reward",
    name: str | None = None,
    tokenizer: Any = None,
    log_outputs: bool = True,
) -> Callable[..., list[float | None]]:
    """Makes a reward function for ``GRPOTrainer(reward_funcs=...)`` and ``RLOOTrainer`` of a TorchRL scorer.

    Args:
        scorer: a TensorDict module (``TensorDictModule``, :class:`HFRewardModelWrapper`, a sequence of these), which
            reads its ``in_keys``, or one of TorchRL's reward transforms (``GSM8KRewardParser``, ``MATHRewardParser``,
            ``CountdownRewardParser``, ``IfEvalScorer``, or another ``Transform`` that scores in ``_step``).

    Keyword Args:
        reward_key: where the scorer writes the reward, one number per completion. For a transform: in the next
            tensordict.
        name: what the trainer logs the reward under; the name of the scorer's class by default.
        tokenizer: of the policy. Needed by scorers that read ``("tokens", "full")``, and by those that read the text of
            conversations as the chat template writes them.
        log_outputs: log the mean of each other number that the scorer writes through TRL's ``log_metric``, as
            ``name/key``.

    The scorer finds what a TorchRL collector would give it: ``("history", "prompt" | "response" | "full")`` for
    conversations, ``("text", ...)`` of the same (strings; the response of a conversation, without a tokenizer, is the
    content of its last message), ``("tokens", "response")`` from ``completion_ids`` (and, with ``tokenizer``,
    ``"prompt"`` and ``"full"``), ``("masks", "all_attention_mask")``, and the columns of the dataset, for a transform
    also in the next tensordict, where TorchRL's parsers look for the answer. Only what is read is made. A transform is
    given a ``ChatEnv`` as parent, in the mode that fits: conversations or text. Completions differ in length: a
    ``TensorDictModule``, which reads one tensor, is called with those of one length at a time.

    Returns:
        A reward function with a ``__name__``; it can be pickled if the scorer can. It gives one float per completion,
        None where the scorer gave NaN, and runs without gradients, modules in eval mode.

    Raises:
        TypeError: if ``scorer`` is neither a TensorDict module nor a transform.
        KeyError: when called, if a key that the scorer reads is not there; it names the dataset column to add. Also if
            the scorer does not write ``reward_key``.
        ValueError: when called, if there is not one number for each completion.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> def high(ids):
        ...     return ids.float().mean(-1)
        >>> scorer = TensorDictModule(high, in_keys=[("tokens", "response")], out_keys=["reward"])
        >>> reward = as_trl_reward_func(scorer, name="high")
        >>> reward.__name__
        'high'
        >>> reward(prompts=["2 + 2?"] * 2, completions=["4", "5"], completion_ids=[[7, 1], [8, 2]])
        [4.0, 5.0]
        >>> reward(prompts=["2 + 2?"] * 2, completions=["4", "five"], completion_ids=[[7, 1], [8, 2, 5]])
        [4.0, 5.0]
    """
    return _RewardFunction(scorer, reward_key, name, tokenizer, log_outputs)


class _RewardFunction:
    """A class, not a closure, so that it can be pickled."""

    def __init__(self, scorer: Any, reward_key: NestedKey, name: str | None, tokenizer: Any, log_outputs: bool) -> None:
        self._scorer: _Module | _Transform
        if isinstance(scorer, TensorDictModuleBase):
            self._scorer = _Module(scorer)
        elif scores_steps(scorer):
            self._scorer = _Transform(scorer, tokenizer)
        else:
            raise TypeError(
                f"scorer must be a TensorDict module or a TorchRL transform, got {type(scorer).__name__}. Wrap a "
                "function of tensors in a TensorDictModule; a function of prompts and completions needs no wrapping."
            )
        self._reward_key = reward_key
        self._tokenizer = tokenizer
        self._log_outputs = log_outputs
        self.__name__ = type(scorer).__name__ if name is None else name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        rows = len(prompts)
        if rows == 0:
            return []
        columns = {
            key: values
            for key, values in columns.items()
            if key not in NOT_COLUMNS and isinstance(values, Sequence) and len(values) == rows
        }
        conversational = not isinstance(prompts[0], str)
        offer = _Offer(prompts, completions, completion_ids, columns, self._tokenizer, conversational)
        with torch.no_grad():
            outputs = self._scorer.score(offer, self.__name__)
        rewards = self._rewards(outputs, rows)
        if self._log_outputs and log_metric is not None:
            self._log(outputs, log_metric)
        return [None if math.isnan(reward) else reward for reward in rewards]

    def _rewards(self, outputs: Outputs, rows: int) -> list[float]:
        values = outputs.get(path_of(self._reward_key))
        if values is None:
            raise KeyError(
                f"the scorer {self.__name__!r} wrote no {self._reward_key!r}, but "
                f"{', '.join(sorted('.'.join(path) for path in outputs)) or 'nothing'}. Pass reward_key=."
            )
        numbers = [float(number) for row in values for number in torch.as_tensor(row).flatten().tolist()]
        if len(numbers) != rows:
            raise ValueError(
                f"the scorer {self.__name__!r} gave {len(numbers)} numbers under {self._reward_key!r} for {rows} "
                "completions: it must give one for each."
            )
        return numbers

    def _log(self, outputs: Outputs, log_metric: Callable[[str, float], None]) -> None:
        for path, values in outputs.items():
            tensors = [value for value in values if isinstance(value, (torch.Tensor, int, float))]
            if path == path_of(self._reward_key) or not tensors:
                continue
            numbers = [float(number) for value in tensors for number in torch.as_tensor(value).flatten().tolist()]
            finite = [number for number in numbers if math.isfinite(number)]
            if finite:
                log_metric(f"{self.__name__}/{'.'.join(path)}", math.fsum(finite) / len(finite))


class _Offer:
    """What a scorer may read, made when it is asked for."""

    def __init__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None,
        columns: dict[str, Any],
        tokenizer: Any,
        conversational: bool,
    ) -> None:
        self.prompts, self.completions, self.completion_ids = prompts, completions, completion_ids
        self.columns = columns
        self.tokenizer = tokenizer
        self.conversational = conversational

    def __len__(self) -> int:
        return len(self.prompts)

    def make(self, paths: Iterator[Path] | Sequence[Path]) -> TensorDictBase:
        """The rows with the values under some paths, each where there is one."""
        rows: list[dict[str, Any]] = [{} for _ in self.prompts]
        for path in dict.fromkeys(paths):
            values = self._values(path)
            for row, value in zip(rows, values if values is not None else (), strict=False):
                node = row
                for key in path[:-1]:
                    node = node.setdefault(key, {})
                node[path[-1]] = value
        return lazy_stack([TensorDict(row) for row in rows])

    def missing(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if self._values(path) is None]

    def _values(self, path: Path) -> Sequence[Any] | None:
        if len(path) == 1 and path[0] in self.columns:
            return [_leaf(value) for value in self.columns[path[0]]]
        if len(path) != 2:
            return None
        kind, part = path
        if kind == "history" and self.conversational:
            return self._history(part)
        if kind == "text":
            return self._text(part)
        if kind == "tokens":
            ids = self._ids(part)
            return None if ids is None else [torch.tensor(row, dtype=torch.long) for row in ids]
        if path == ("masks", "all_attention_mask"):
            ids = self._ids("full")
            return None if ids is None else [torch.ones(len(row), dtype=torch.bool) for row in ids]
        return None

    def _history(self, part: str) -> Sequence[Any] | None:
        if part == "prompt":
            return [messages_to_history(prompt) for prompt in self.prompts]
        if part == "response":
            return [messages_to_history(completion) for completion in self.completions]
        return [messages_to_history([*p, *c]) for p, c in self._pairs()] if part == "full" else None

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.prompts, self.completions, strict=True)

    def _text(self, part: str) -> Sequence[str] | None:
        if not self.conversational:
            texts = {"prompt": lambda p, c: p, "response": lambda p, c: c, "full": lambda p, c: p + c}
            return [texts[part](p, c) for p, c in self._pairs()] if part in texts else None
        if self.tokenizer is None:
            return [completion[-1]["content"] or "" for completion in self.completions] if part == "response" else None
        if part == "prompt":
            return self._rendered_prompts()
        full = self.tokenizer.apply_chat_template([[*p, *c] for p, c in self._pairs()], tokenize=False)
        if part == "full":
            return full  # type: ignore[no-any-return]
        return [text.removeprefix(prompt) for text, prompt in zip(full, self._rendered_prompts(), strict=True)]

    def _rendered_prompts(self) -> list[str]:
        # A prompt that ends with the assistant's words is continued, as TRL does.
        return [
            self.tokenizer.apply_chat_template(
                prompt,
                tokenize=False,
                add_generation_prompt=prompt[-1]["role"] != "assistant",
                continue_final_message=prompt[-1]["role"] == "assistant",
            )
            for prompt in self.prompts
        ]

    def _ids(self, part: str) -> Sequence[Sequence[int]] | None:
        if self.completion_ids is None or part == "response":
            return self.completion_ids
        if self.tokenizer is None or part not in ("prompt", "full"):
            return None
        if self.conversational:
            prompts = self.tokenizer(text=self._rendered_prompts(), add_special_tokens=False)["input_ids"]
        else:
            prompts = self.tokenizer(text=list(self.prompts))["input_ids"]
        if part == "prompt":
            return prompts  # type: ignore[no-any-return]
        return [[*p, *c] for p, c in zip(prompts, self.completion_ids, strict=True)]


def _leaf(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    return value if isinstance(value, torch.Tensor | str) else NonTensorData(value)


class _Module:
    """A TensorDict module reads its ``in_keys``."""

    def __init__(self, module: TensorDictModuleBase) -> None:
        self.module = module

    def score(self, offer: _Offer, name: str) -> Outputs:
        paths = [path_of(key) for key in self.module.in_keys]
        missing = offer.missing(paths)
        if missing:
            raise _missing(name, missing, offer)
        batch = offer.make(paths)
        ragged = _ragged(batch, paths)
        outputs: dict[Path, list[Any]] = {}
        with eval_mode(self.module):  # no gradient will want its dropout
            for rows in _of_one_shape(ragged) if _stacks(self.module, ragged) else [range(len(offer))]:
                part = batch if len(rows) == len(offer) else lazy_stack([batch[i] for i in rows])
                for path, column in read_columns(self._written(part, ragged, name)).items():
                    values = outputs.setdefault(path, [None] * len(offer))
                    for i, value in zip(rows, column.values, strict=True):
                        values[i] = value
        return outputs

    def _written(self, batch: TensorDictBase, ragged: Mapping[Path, Any], name: str) -> TensorDictBase:
        try:
            return self.module(batch).select(*self.module.out_keys)
        except RuntimeError as error:
            if not ragged or _stacks(self.module, ragged):
                raise
            raise RuntimeError(
                f"the scorer {name!r} failed where {', '.join(map('.'.join, ragged))} is of another length in each "
                "completion, so that there is no one tensor of it. Read the rows one by one, or make the scorer of "
                f"TensorDictModules, which are given completions of one length at a time. {error}"
            ) from error


def _ragged(batch: TensorDictBase, paths: Sequence[Path]) -> dict[Path, list[Any]]:
    """The tensors that differ in shape between rows, and these shapes."""
    shapes = {
        path: [value.shape for value in column.values]
        for path, column in read_columns(batch, paths).items()
        if all(isinstance(value, torch.Tensor) for value in column.values)
    }
    return {path: of_rows for path, of_rows in shapes.items() if len(set(of_rows)) > 1}


def _of_one_shape(ragged: Mapping[Path, list[Any]]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, shapes in enumerate(zip(*ragged.values(), strict=True)):
        groups.setdefault(shapes, []).append(i)
    return list(groups.values())


def _stacks(module: Any, ragged: Mapping[Path, Any]) -> bool:
    """Whether a module reads one of these keys as one tensor of all rows, as a ``TensorDictModule`` does."""
    if isinstance(module, TensorDictSequential):
        return any(_stacks(part, ragged) for part in module)
    return isinstance(module, TensorDictModule) and any(path_of(key) in ragged for key in module.in_keys)


class _Transform:
    """A TorchRL transform scores a step of its environment: the conversation before it, the columns on both sides."""

    def __init__(self, transform: Any, tokenizer: Any) -> None:
        self.transform = transform
        self.tokenizer = tokenizer
        self._in_mode: dict[str, Any] = {}

    def score(self, offer: _Offer, name: str) -> Outputs:
        mode = "history" if offer.conversational else "text"
        transform = self._transform_in(mode)
        paths = [path_of(key) for key in transform.in_keys or ()]
        parts = [(kind, part) for kind in (mode,) for part in ("prompt", "response", "full")]
        columns = [(key,) for key in offer.columns]
        before = offer.make([*parts, *paths, *columns])
        after = offer.make(columns)
        try:
            after = score_step(transform, before, after)
        except Exception as error:
            missing = offer.missing(paths)
            if missing:
                raise _missing(name, missing, offer) from error
            raise
        return {path: column.values for path, column in read_columns(after.exclude(*offer.columns)).items()}

    def _transform_in(self, mode: str) -> Any:
        if mode not in self._in_mode:
            from torchrl.envs import TransformedEnv
            from torchrl.envs.llm import ChatEnv

            transform = self.transform.clone()
            # Parsers ask their environment for its mode, and choose their keys by it.
            env = TransformedEnv(ChatEnv(batch_size=(1,), input_mode=mode, tokenizer=self.tokenizer), transform)
            self._in_mode[mode] = env  # kept alive: a transform knows its environment by a weak reference
        return self._in_mode[mode].transform


def _missing(name: str, missing: Sequence[Path], offer: _Offer) -> KeyError:
    columns = [path[0] for path in missing if len(path) == 1]
    known = ", ".join(offer.columns) or "none"
    text = f"the scorer {name!r} reads {', '.join('.'.join(path) for path in missing)}, "
    if columns:
        return KeyError(
            f"{text}and the dataset has no column {', '.join(map(repr, columns))} (beside the prompt it has: {known}). "
            "Add it to the dataset that the trainer is given."
        )
    hints = []
    if any(path[0] == "history" for path in missing):
        hints.append("History is made of conversational prompts, not of strings")
    if any(path[0] in ("tokens", "masks", "text") for path in missing):
        hints.append("pass tokenizer= with the policy's tokenizer")
    return KeyError(f"{text}which is not made of what the trainer passes: {'; '.join(hints) or 'pass a column'}.")
