"""`TRLRewardTransform`: TRL's reward functions score TorchRL rollouts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn

from torchrl_trl_bridge.compat.transformers import saved_as
from torchrl_trl_bridge.compat.trl import arguments_of_reward_functions
from torchrl_trl_bridge.rewards.completions import read_completions
from torchrl_trl_bridge.rewards.model import HFRewardModelWrapper
from torchrl_trl_bridge.rewards.transforms import RewardTransform
from torchrl_trl_bridge.scoring import RewardFunctions, load_classifier, name_of

__all__ = ["TRLRewardTransform"]


class TRLRewardTransform(RewardTransform):
    """Scores rollouts with the reward functions of TRL's ``GRPOTrainer``.

    Append it to a ``ChatEnv`` (of any input mode), pass it to a collector as ``postproc``, or append it to a replay
    buffer: with ``invert=True`` it scores each row once, when it is added, else each time that it is sampled. (On the
    way into a buffer TorchRL runs the transforms from the last to the first: append ``MCAdvantage`` before it.)

    A function gets what its trainer would give it: ``prompts`` and ``completions``, both conversational where the
    rollout has ``History``, and strings else (as TorchRL has them: the prompt as the chat template wrote it);
    ``completion_ids``, where the rollout has token ids; the extra columns, as plain Python values; ``trainer_state``
    (None), ``log_extra`` and ``log_metric``. Models score prompt and completion as :class:`HFRewardModelWrapper` does
    with their tokenizer.

    Args:
        reward_funcs: what ``GRPOTrainer`` takes: a callable, an async callable (all of them run side by side), a
            sequence classifier with one output, the path or hub id of one, or a list of these.
        reward_weights: the weight of each function; 1 by default.

    Keyword Args:
        columns: where the extra columns are, such as ``{"solution": "answer"}``: looked for beside the prompt, then in
            the next tensordict. By default, every value on the top level of the rollout goes by its own name.
        reward_processing_classes: the tokenizer of each model, None for callables; for one model, just its tokenizer.
            By default the one that was saved with the model.
        processing_class: tokenizer of the policy. With it, completions that are strings are decoded from their ids
            without special tokens, as TRL does; rollouts that hold nothing but token ids need it.
        reward_key: where the weighted sum goes in the next tensordict: float32 ``[*batch, 1, 1]``, or in the shape and
            dtype of the reward that an environment has there already.
        unscored_reward: the reward of a rollout to which no function applies. By default that is an error.
        log_extra: called with the name of a column and ``B`` values when a function logs them; by default nothing is.
        log_metric: called with a name and a float, likewise.

    The rewards of each function go to ``("next", "rewards", name)``, of the same shape, NaN where the function returned
    None: that function is left out of the sum.

    Raises:
        TypeError: if a reward function is nothing that can be called.
        ValueError: if the numbers of functions, weights and tokenizers differ. On scoring: if a function returns
            another number of rewards than there are rollouts, or none applies to a rollout.
        TypeError: on scoring, if a function returns anything but numbers and None.
        KeyError: on scoring, if a column or an argument that a function requires is not there.

    Examples:
        >>> from tensordict import TensorDict
        >>> def right(completions, solution, **kwargs):
        ...     return [float(completion == answer) for completion, answer in zip(completions, solution)]
        >>> def short(completions, **kwargs):
        ...     return [-0.1 * len(completion) for completion in completions]
        >>> transform = TRLRewardTransform([right, short], reward_weights=[1, 0.5], columns={"solution": "answer"})
        >>> rollouts = TensorDict({
        ...     "text": {"prompt": ["2 + 2 = ", "3 + 3 = "], "response": ["4", "seven"]}, "answer": ["4", "6"],
        ... }, [2])
        >>> transform(rollouts)["next", "reward"].flatten()
        tensor([ 0.9500, -0.2500])
        >>> rollouts["next", "rewards", "right"].flatten()
        tensor([1., 0.])
    """

    def __init__(
        self,
        reward_funcs: Any,
        reward_weights: Sequence[float] | None = None,
        *,
        columns: Mapping[str, NestedKey] | None = None,
        reward_processing_classes: Any = None,
        processing_class: Any = None,
        reward_key: NestedKey = "reward",
        unscored_reward: float | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> None:
        functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        tokenizers = reward_processing_classes
        if not isinstance(tokenizers, (list, tuple)):
            tokenizers = [tokenizers] if tokenizers is not None else [None] * len(functions)
        if len(tokenizers) != len(functions):
            raise ValueError(
                f"reward_processing_classes must be one for each of the {len(functions)} functions, got "
                f"{len(tokenizers)}."
            )
        functions = [_as_callable(*pair) for pair in zip(functions, tokenizers, strict=True)]
        called = RewardFunctions(functions, reward_weights=reward_weights)
        super().__init__(in_keys=[], out_keys=[reward_key, *(("rewards", name) for name in called.names)])
        self._functions = called
        # Registered, so that `.to(device)` of an environment or buffer takes the models along.
        self._models = nn.ModuleList(f.scorer for f in functions if isinstance(f, _ModelFunction))
        self._columns = None if columns is None else dict(columns)
        self._processing_class = processing_class
        self._unscored_reward = unscored_reward
        given = {"trainer_state": None, "log_extra": log_extra or _nowhere, "log_metric": log_metric or _nowhere}
        self._given = {name: given[name] for name in arguments_of_reward_functions()}

    def rewards(self, rollouts: TensorDictBase) -> Mapping[NestedKey, torch.Tensor]:
        if rollouts.batch_size.numel() == 0:
            return {key: torch.zeros(rollouts.batch_size, device=rollouts.device) for key in self.out_keys}
        inputs = read_completions(rollouts, self._columns, self._processing_class)
        arguments: dict[str, Any] = {**inputs.columns, **self._given}
        if inputs.completion_ids is not None:
            arguments["completion_ids"] = inputs.completion_ids
        for name, function in zip(self._functions.names, self._functions.functions, strict=True):
            _check_arguments(name, function, arguments)
        each = self._functions(inputs.prompts, inputs.completions, **arguments)
        total = self._functions.combine(each)
        if None in total and self._unscored_reward is None:
            raise ValueError(
                f"no reward function ({', '.join(each)}) applies to rollout {total.index(None)}: all returned None. "
                "Leave such rollouts out, or pass unscored_reward= with the reward that they get."
            )

        def tensor(values: Sequence[float | None], none: float | None) -> torch.Tensor:
            floats = [none if value is None else value for value in values]
            return torch.tensor(floats, dtype=torch.float32, device=rollouts.device).reshape(rollouts.batch_size)

        apart = {("rewards", name): tensor(values, math.nan) for name, values in each.items()}
        return {self.out_keys[0]: tensor(total, self._unscored_reward), **apart}


class _ModelFunction:
    """A reward model as a reward function."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.scorer = HFRewardModelWrapper(model, tokenizer=tokenizer, inference_mode=True)
        self.__name__ = name_of(model)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        rewards: list[float] = self.scorer.score_texts(texts).tolist()
        return rewards


def _as_callable(function: Any, tokenizer: Any) -> Any:
    if isinstance(function, HFRewardModelWrapper):
        raise TypeError(
            "an HFRewardModelWrapper is not a reward function of TRL: use its as_transform(), or pass its model, with "
            "reward_processing_classes=."
        )
    if isinstance(function, str):
        function = load_classifier(function)
    if not isinstance(function, nn.Module):
        return function
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(saved_as(function))
    return _ModelFunction(function, tokenizer)


def _check_arguments(name: str, function: Any, arguments: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    given = {"prompts", "completions", *arguments}
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.default is parameter.empty and parameter.name not in given:
            raise KeyError(
                f"the reward function {name!r} needs {parameter.name!r}, and the rollouts offer "
                f"{', '.join(sorted(given))}. Have the environment's dataloader yield a column of that name, or name "
                f"its key: columns={{{parameter.name!r}: ...}}."
            )


def _nowhere(name: str, value: Any) -> None:
    """Logs to nowhere. A function, not a lambda, so that the transform can be sent to other processes."""
