"""What differs between releases of TRL: what its trainers need of a dataset, and what they call it.

Nothing here imports ``trl``: a trainer class that is asked about has its module loaded already.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from packaging.version import Version

from torchrl_trl_bridge.compat.frames import calling_frames

__all__ = [
    "NOT_COLUMNS",
    "Needs",
    "TrainerAtWork",
    "arguments_of_reward_functions",
    "cuts_rows",
    "generation_batch",
    "is_known",
    "needs_of",
    "refusal_of_streams",
    "say_what_to_write_instead",
    "takes_streams",
    "token_names_of_pairs",
    "trainer_at_work",
    "trains_on_prompts_too",
]


@dataclass(frozen=True)
class Needs:
    """What a trainer needs of a dataset.

    ``columns`` are alternatives: the rows hold all columns of one of them. ``types`` are the dataset types to name for
    ``columns=`` of a buffer dataset, the usual one first.
    """

    columns: tuple[tuple[str, ...], ...]
    types: tuple[str, ...]


_PROMPTS = Needs((("prompt",),), ("prompt-only",))
_PAIRS = Needs((("chosen", "rejected"),), ("preference",))
_PAIRS_WITH_PROMPT = Needs((("prompt", "chosen", "rejected"),), ("preference",))

# By the name of the trainer, of TRL 0.24 to 1.16. Sub-classes need what their trainer needs.
_NEEDS = {
    "SFTTrainer": Needs(
        (("messages",), ("text",), ("prompt", "completion"), ("input_ids",)),
        ("prompt-completion", "language-modeling", "tokenized"),
    ),
    "GRPOTrainer": _PROMPTS,
    "RLOOTrainer": _PROMPTS,
    "DistillationTrainer": _PROMPTS,
    "DPOTrainer": _PAIRS,
    "CPOTrainer": _PAIRS_WITH_PROMPT,
    "ORPOTrainer": _PAIRS_WITH_PROMPT,
    "KTOTrainer": Needs(
        (("prompt", "completion", "label"), ("chosen", "rejected")), ("unpaired-preference", "preference")
    ),
    "RewardTrainer": Needs(
        (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")),
        ("preference",),
    ),
}

# These repeat each prompt of a stream with a helper of TRL's; before it had one (TRL 1.8 has not) they refuse a stream.
_REPEAT_PROMPTS = frozenset({"GRPOTrainer", "RLOOTrainer", "DistillationTrainer"})


def needs_of(trainer_class: type) -> Needs:
    """What a trainer needs of a dataset.

    Raises:
        TypeError: for a class that is none of the known trainers.
    """
    base = _known_base(trainer_class)
    if _repeats_batches_itself(base):
        return Needs((("messages",),), ("language-modeling",))
    return _NEEDS[base.__name__]


def _repeats_batches_itself(base: type) -> bool:
    """Whether this is the experimental DistillationTrainer (TRL 1.4 and 1.8), which reads conversations.

    Can go when TRL 1.8 leaves the matrix.
    """
    return hasattr(sys.modules[base.__module__], "_RepeatBatchDataLoader")


def is_known(trainer_class: type) -> bool:
    """Whether this is one of the known trainers itself, which no sub-class has taught to take other columns."""
    return trainer_class.__name__ in _NEEDS and trainer_class.__module__.partition(".")[0] == "trl"


def _known_base(trainer_class: type) -> type:
    for base in getattr(trainer_class, "__mro__", ()):
        if base.__name__ in _NEEDS and base.__module__.partition(".")[0] == "trl":
            return base  # type: ignore[no-any-return]
    raise TypeError(
        f"{getattr(trainer_class, '__name__', trainer_class)!r} is not a trainer class whose columns are known. "
        f"Known are {', '.join(sorted(_NEEDS))} of trl."
    )


def takes_streams(trainer_class: type) -> bool:
    """Whether the installed release of a trainer trains from an iterable dataset.

    Asks its module for what it would need: CPO and ORPO, and KTO before TRL 1.4, know map-style datasets only.
    """
    base = _known_base(trainer_class)
    module = sys.modules[base.__module__]
    if _repeats_batches_itself(base):
        return True
    if not hasattr(module, "IterableDataset"):
        return False
    return base.__name__ not in _REPEAT_PROMPTS or hasattr(module, "repeat_iterable_dataset")


def say_what_to_write_instead(stream_type: type) -> None:
    """Lets GRPO and RLOO say what to write where they refuse a stream of this type (before TRL 1.9).

    They refuse it in their first lines, before they touch it, with "Please use a standard dataset instead": so their
    ``__init__`` is wrapped, which adds the one-line change to that error and does nothing else. Only trainers that are
    imported, and that refuse streams, are wrapped. Can go when TRL 1.8 leaves the matrix.
    """
    for name in ("GRPOTrainer", "RLOOTrainer"):
        module = sys.modules.get(f"trl.trainer.{name.removesuffix('Trainer').lower()}_trainer")
        trainer_class: Any = getattr(module, name, None)
        if trainer_class is None or "_refusal_explained" in vars(trainer_class) or takes_streams(trainer_class):
            continue
        trainer_class.__init__ = _explaining(trainer_class.__init__, name, stream_type)
        trainer_class._refusal_explained = True


def _explaining(original: Any, name: str, stream_type: type) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            original(self, *args, **kwargs)
        except NotImplementedError as error:
            if not any(isinstance(value, stream_type) for value in (*args, *kwargs.values())):
                raise
            raise NotImplementedError(refusal_of_streams(name)) from error

    return __init__


def cuts_rows(function: Any) -> bool:
    """Whether this is what SFT maps over a stream, in batches of 1000 rows, to cut long rows (TRL 0.24 to 0.29).

    Can go when TRL 0.29 leaves the matrix.
    """
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return name == "trl.data_utils.truncate_dataset.<locals>.truncate"


def refusal_of_streams(trainer: str) -> str:
    """What to write where a trainer takes no stream."""
    version = importlib.metadata.version("trl")
    return f"{trainer} of trl {version} takes no iterable dataset. Give it a snapshot: as_hf_dataset(streaming=False)."


@functools.cache
def token_names_of_pairs() -> tuple[str, str]:
    """What the installed RewardTrainer calls the token ids of a pair; the newest names where TRL is not installed."""
    try:
        version = Version(importlib.metadata.version("trl"))
    except importlib.metadata.PackageNotFoundError:
        return "chosen_ids", "rejected_ids"
    # Renamed between TRL 0.24 and 0.29. Can go when 0.24 leaves the matrix.
    return ("chosen_ids", "rejected_ids") if version >= Version("0.29") else ("chosen_input_ids", "rejected_input_ids")


def trains_on_prompts_too(trainer_class: type, args: Any) -> bool:
    """Whether SFT would ignore the ``completion_mask`` of tokenized rows, and train on the prompts as well.

    It takes the mask for an offer, and accepts it only with ``completion_only_loss=True`` (TRL 1.16), whereas rows with
    ``prompt`` and ``completion`` turn that on by themselves.
    """
    is_sft = _known_base(trainer_class).__name__ == "SFTTrainer"
    return is_sft and args is not None and getattr(args, "completion_only_loss", None) is None


def generation_batch(args: Any) -> int | None:
    """How many prompts one generation batch of GRPO, RLOO or distillation takes, or None for other trainers."""
    size, group = getattr(args, "generation_batch_size", None), getattr(args, "num_generations", 1)
    return None if size is None else size // group


@dataclass(frozen=True)
class TrainerAtWork:
    """A trainer that is asking for rows at this moment."""

    trainer: Any
    evaluates: bool
    arguments: dict[str, Any]
    """The variables of its outermost method: the arguments, while it is being made."""


def trainer_at_work() -> TrainerAtWork | None:
    """The trainer on whose behalf the caller runs, or None.

    A dataset is not told who iterates it, and some mistakes show only there: a stream without end that is evaluated,
    columns that the trainer does not take. So the calling frames are looked through, for a method of
    ``transformers.Trainer`` (4.56 to 5.24). Where nothing is found nothing is checked.
    """
    transformers = sys.modules.get("transformers.trainer")
    if transformers is None:
        return None
    found: FrameType | None = None
    evaluates = False
    for frame in calling_frames():
        # Looking at the variables of a frame keeps them alive as long as it runs. Those of generators are iterators,
        # which have to go when their user drops them, so that only methods are asked, and those of this package not.
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if (
            code.co_varnames[:1] != ("self",)
            or code.co_flags & inspect.CO_GENERATOR
            or module.startswith(("torchrl_trl_bridge.", "datasets."))
        ):
            continue
        if isinstance(frame.f_locals.get("self"), transformers.Trainer):
            found = frame
            if frame.f_code.co_name in ("evaluation_loop", "prediction_loop"):
                evaluates = True
                break
    return None if found is None else TrainerAtWork(found.f_locals["self"], evaluates, dict(found.f_locals))


NOT_COLUMNS = frozenset({"environments", "log_extra", "log_metric", "trainer_state"})
"""What trainers pass to reward functions that is no column of their dataset (TRL 0.24 to 1.16)."""

# What reward functions are called with beside prompts, completions, their ids and the columns of the dataset, with the
# release that began to. Can go as the releases leave the matrix.
_ARGUMENTS_SINCE = {"trainer_state": Version("0.21"), "log_extra": Version("1.0"), "log_metric": Version("1.0")}


@functools.cache
def arguments_of_reward_functions() -> tuple[str, ...]:
    """What else reward functions get in the installed release of TRL; without one, what they get in the newest."""
    try:
        version = Version(importlib.metadata.version("trl"))
    except importlib.metadata.PackageNotFoundError:
        return tuple(_ARGUMENTS_SINCE)
    return tuple(name for name, since in _ARGUMENTS_SINCE.items() if version >= since)
