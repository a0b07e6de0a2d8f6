"""Whether a TRL trainer takes what a buffer dataset gives: found before it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_trl_bridge.buffers.columns import DATASET_TYPES, ColumnPlan
from torchrl_trl_bridge.compat import trl as compat

if TYPE_CHECKING:
    from torchrl_trl_bridge.buffers.dataset import TorchRLBufferDataset


def check_trainer(dataset: TorchRLBufferDataset, trainer_class: type, args: Any, *, streaming: bool) -> None:
    """See `TorchRLBufferDataset.check`."""
    if streaming and not compat.takes_streams(trainer_class):
        raise ValueError(compat.refusal_of_streams(trainer_class.__name__))
    columns = list(dataset.peek(complete=True))
    check_columns(columns, lambda types: possible_types(dataset, types), trainer_class, args)
    if streaming:
        check_length(dataset, dataset.rows_per_iteration, args)


def check_columns(
    columns: Sequence[str], possible: Callable[[Sequence[str]], Sequence[str]], trainer_class: type, args: Any
) -> None:
    """Raises ValueError if these are not the columns that a trainer needs.

    Args:
        columns: the columns that there are.
        possible: of some dataset types, those that the buffer could make.
        trainer_class: a known trainer.
        args: its configuration.
    """
    needs = compat.needs_of(trainer_class)
    name = trainer_class.__name__
    text_field = getattr(args, "dataset_text_field", None)  # of SFT
    alternatives = needs.columns + (((text_field,),) if text_field else ())
    if not any(set(alternative) <= set(columns) for alternative in alternatives):
        types = possible(needs.types) or needs.types
        raise ValueError(
            f"{name} needs the columns {' or '.join(' + '.join(names) for names in alternatives)}. This dataset gives "
            f"{list(columns)}. Write {' or '.join(map(_written, types))}, or name the keys: "
            f"columns={{{', '.join(f'{column!r}: <key>' for column in needs.columns[0])}}}."
        )
    if (
        {"input_ids", "completion_mask"} <= set(columns)
        and "labels" not in columns
        and compat.trains_on_prompts_too(trainer_class, args)
    ):
        raise ValueError(
            f"{name} would not use 'completion_mask', and train on the prompts too. Write "
            "SFTConfig(completion_only_loss=True), or False if that is meant, or give it labels: "
            'columns=DatasetType("tokenized", labels=True).'
        )


def check_length(dataset: TorchRLBufferDataset, rows: int | None, args: Any) -> None:
    """Raises ValueError if a stream is too short for a single step of a trainer, which would end without one."""
    needed = compat.generation_batch(args)
    if rows is not None and needed is not None and rows < needed:
        raise ValueError(
            f"the stream ends after {rows} rows, and one generation batch takes {needed} prompts: training would end "
            f"before its first step. Write num_batches=None, or at least num_batches={-(-needed // dataset.batch_size)}"
            f" with batch_size={dataset.batch_size}."
        )


def check_user(check: Callable[[type, Any], None], checked: set[type]) -> None:
    """Calls ``check(trainer_class, args)`` for the trainer that asks for rows, once a class, if it is TRL's own."""
    work = compat.trainer_at_work()
    trainer_class = None if work is None else type(work.trainer)
    if work is None or trainer_class is None or trainer_class in checked or not compat.is_known(trainer_class):
        return
    # A formatting function makes the column that SFT needs.
    if work.arguments.get("formatting_func") is None:
        checked.add(trainer_class)
        check(trainer_class, work.arguments.get("args") or getattr(work.trainer, "args", None))


def check_evaluation(dataset: TorchRLBufferDataset) -> None:
    """Raises ValueError if a stream without end is about to be evaluated."""
    if dataset.rows_per_iteration is None:
        work = compat.trainer_at_work()
        if work is not None and work.evaluates:
            raise ValueError(
                "this stream has no end (num_batches=None), and so its evaluation would have none. Give the trainer an "
                "eval_dataset with num_batches=<number>, and a seed for the same rows each time, or a snapshot: "
                "as_hf_dataset(streaming=False)."
            )


def check_exhausted(dataset: TorchRLBufferDataset) -> None:
    """Raises ValueError if a stream that has ended was too short for a step of the trainer that iterates it."""
    work = compat.trainer_at_work()
    if work is not None and not work.evaluates:
        check_length(dataset, dataset.rows_per_iteration, getattr(work.trainer, "args", None))


def _written(type_: str) -> str:
    return f'columns="{type_}"'


def possible_types(dataset: TorchRLBufferDataset, types: Sequence[str] = DATASET_TYPES) -> list[str]:
    """Those dataset types that the buffer could make."""
    return [name for name in types if _can_make(dataset, name)]


def _can_make(dataset: TorchRLBufferDataset, name: str) -> bool:
    try:
        dataset.peek(ColumnPlan(name))
    except TypeError:  # a reward without a threshold
        return True
    except (KeyError, ValueError):
        return False
    return True
