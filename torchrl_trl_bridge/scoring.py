"""Calling reward functions and reward models as TRL's GRPOTrainer and RLOOTrainer call them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torchrl_trl_bridge.compat.transformers import saved_as

Reward = float | None


class RewardFunctions:
    """One or several reward functions, called with what a trainer calls its own with.

    Args:
        reward_funcs: what GRPOTrainer takes: a callable, an async callable, a sequence classifier with one output, the
            path or hub id of one, or a list of these.
        reward_weights: the weight of each function; 1 by default.
        reward_processing_classes: the tokenizer of each model, None for callables; for one model, just its tokenizer.
            Default: the one saved with the model.

    Raises:
        TypeError: for anything else.
        ValueError: if the numbers of functions, weights and processing classes differ, or there is no function.
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        reward_weights: Sequence[float] | None = None,
        reward_processing_classes: Any = None,
    ) -> None:
        functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if not functions:
            raise ValueError("there is no reward function: pass at least one.")
        tokenizers = reward_processing_classes
        if not isinstance(tokenizers, (list, tuple)):
            tokenizers = [tokenizers] if tokenizers is not None else [None] * len(functions)
        weights = [1.0] * len(functions) if reward_weights is None else [float(weight) for weight in reward_weights]
        for what, given in (("reward_weights", weights), ("reward_processing_classes", tokenizers)):
            if len(given) != len(functions):
                raise ValueError(f"{what} must be one for each of the {len(functions)} functions, got {len(given)}.")
        self.functions = [_loaded(function) for function in functions]
        self.weights = weights
        self.names = _distinct([name_of(function) for function in self.functions])
        self._tokenizers = [
            _tokenizer_of(function, tokenizer) for function, tokenizer in zip(self.functions, tokenizers, strict=True)
        ]

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        *,
        template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, list[Reward]]:
        """The rewards that each function gives to each completion, by the name of the function.

        Args:
            prompts: ``B`` strings, or ``B`` conversations.
            completions: ``B`` strings, or ``B`` lists of messages.
            template_kwargs: passed to the chat template of a model's tokenizer.
            kwargs: passed on to the callables: ``completion_ids``, the columns of the dataset, ``trainer_state``,
                ``log_extra``, ``log_metric``.

        Returns:
            Floats, detached from any graph. None is a reward that does not apply.

        Raises:
            TypeError: if a function returns anything but numbers and None.
            ValueError: if a function returns another number of rewards than there are completions.
        """
        results: list[Any] = [None] * len(self.functions)
        waiting = {}
        for i, function in enumerate(self.functions):
            if isinstance(function, nn.Module):
                results[i] = _score(function, self._tokenizers[i], prompts, completions, template_kwargs or {})
            elif is_async(function):
                waiting[i] = function(prompts=prompts, completions=completions, **kwargs)
            else:
                results[i] = function(prompts=prompts, completions=completions, **kwargs)
        for i, result in zip(waiting, _wait_for(list(waiting.values())), strict=True):
            results[i] = result
        named = zip(self.names, results, strict=True)
        return {name: _checked(name, result, len(prompts)) for name, result in named}

    def combine(self, rewards: dict[str, list[Reward]]) -> list[Reward]:
        """The weighted sum of the rewards of each completion, without those that do not apply; None if none does."""
        columns = zip(*rewards.values(), strict=True)
        return [_weighted(row, self.weights) for row in columns]


def _weighted(rewards: Sequence[Reward], weights: Sequence[float]) -> Reward:
    terms = [weight * reward for reward, weight in zip(rewards, weights, strict=True) if reward is not None]
    return math.fsum(terms) if terms else None


def name_of(function: Any) -> str:
    """The name under which a trainer logs a reward function."""
    if isinstance(function, nn.Module):
        return (saved_as(function) or type(function).__name__).split("/")[-1]
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function``, a partial or an object with ``__call__`` included, gives a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _distinct(names: list[str]) -> list[str]:
    """The names, numbered where two functions share one, so that no reward overwrites another."""
    return [name if names.count(name) == 1 else f"{name}_{names[:i].count(name) + 1}" for i, name in enumerate(names)]


def _loaded(function: Any) -> Any:
    if isinstance(function, str):
        return load_classifier(function)
    if not callable(function):
        raise TypeError(f"a reward function must be callable, a model or the path of one, got {function!r}.")
    return function


def load_classifier(path: str) -> Any:
    """The reward model of a path or hub id, as a trainer loads it."""
    from transformers import AutoModelForSequenceClassification

    try:
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    except (OSError, ValueError) as error:  # what has too many slashes for a hub id is a ValueError to some releases
        raise OSError(
            f"the reward function {path!r}: a string is the path or hub id of a sequence classifier, and none can be "
            f"loaded from there. {error}"
        ) from error


def _tokenizer_of(function: Any, tokenizer: Any) -> Any:
    if not isinstance(function, nn.Module):
        return None
    config: Any = function.config
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(saved_as(function))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # The model finds the last token of a row by this id.
    config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _score(
    model: nn.Module, tokenizer: Any, prompts: list[Any], completions: list[Any], template_kwargs: dict[str, Any]
) -> list[float]:
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    if texts and isinstance(texts[0], list):
        texts = tokenizer.apply_chat_template(texts, tokenize=False, **template_kwargs)
    device = next(model.parameters()).device
    inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        scores = model(**inputs.to(device)).logits[:, 0]
    return [float(score) for score in scores.tolist()]


def _checked(name: str, rewards: Any, expected: int) -> list[Reward]:
    if isinstance(rewards, (str, bytes)) or not isinstance(rewards, Iterable):
        raise TypeError(
            f"the reward function {name!r} returned {rewards!r}: it must return a list with one reward for each of the "
            f"{expected} completions."
        )
    rewards = rewards.tolist() if isinstance(rewards, torch.Tensor) else list(rewards)
    if len(rewards) != expected:
        raise ValueError(
            f"the reward function {name!r} returned {len(rewards)} rewards for {expected} completions: it must return "
            "one for each."
        )
    for i, reward in enumerate(rewards):
        if isinstance(reward, (str, bytes)) or not (reward is None or hasattr(reward, "__float__")):
            raise TypeError(
                f"the reward function {name!r} returned {reward!r} for completion {i}: a reward is a number, or None "
                "where there is none."
            )
    floats = [None if reward is None else float(reward) for reward in rewards]
    return [None if reward is None or math.isnan(reward) else reward for reward in floats]


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the life of the process: an HTTP client that an async function keeps open is bound to its loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop


def _wait_for(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs coroutines side by side, from a thread that may have a running loop of its own, as in a notebook."""
    if not coroutines:
        return []

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    return asyncio.run_coroutine_threadsafe(gather(), _event_loop()).result()
