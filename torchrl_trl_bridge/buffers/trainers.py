"""Whether a TRL trainer takes what a buffer dataset gives: found before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrl_trl_bridge.buffers.columns import ColumnPlan
from torchrl_trl_bridge.compat import trl as compat

if TYPE_CHECKING:
    from torchrl_trl_bridge.buffers.dataset import TorchRLBufferDataset


def check_trainer(dataset: TorchRLBufferDataset, trainer_class: type, args: Any, *, streaming: bool) -> None:
    """See `TorchRLBufferDataset.check`."""
    needs = compat.needs_of(trainer_class)
    name = trainer_class.__name__
    if streaming and not compat.takes_streams(trainer_class):
        raise ValueError(compat.refusal_of_streams(name))
    columns = list(dataset.peek())
    text_field = getattr(args, "dataset_text_field", None)  # of SFT
    alternatives = needs.columns + (((text_field,),) if text_field else ())
    if not any(set(alternative) <= set(columns) for alternative in alternatives):
        raise ValueError(
            f"{name} needs the columns {' or '.join(' + '.join(names) for names in alternatives)}. This dataset gives "
            f"{columns}. Write {' or '.join(_advice(dataset, needs.types))}, or name the keys: "
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
    if streaming:
        check_length(dataset, dataset.rows_per_iteration, args)


def check_length(dataset: TorchRLBufferDataset, rows: int | None, args: Any) -> None:
    """Raises ValueError if a stream is too short for a single step of a trainer, which would end without one."""
    needed = compat.generation_batch(args)
    if rows is not None and needed is not None and rows < needed:
        raise ValueError(
            f"the stream ends after {rows} rows, and one generation batch takes {needed} prompts: training would end "
            f"before its first step. Write num_batches=None, or at least num_batches={-(-needed // dataset.batch_size)}"
            f" with batch_size={dataset.batch_size}."
        )


def check_user(dataset: TorchRLBufferDataset, checked: set[type]) -> None:
    """Checks the columns for the trainer that asks for them, once for each class, if it is one of TRL's own."""
    work = compat.trainer_at_work()
    trainer_class = None if work is None else type(work.trainer)
    if work is None or trainer_class is None or trainer_class in checked or not compat.is_known(trainer_class):
        return
    # A formatting function makes the column that SFT needs.
    if work.arguments.get("formatting_func") is None and dataset.row_count:
        checked.add(trainer_class)
        args = work.arguments.get("args") or getattr(work.trainer, "args", None)
        check_trainer(dataset, trainer_class, args, streaming=True)


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


def _advice(dataset: TorchRLBufferDataset, types: Sequence[str]) -> list[str]:
    """The ``columns=`` to write, those that the buffer can make if it can make any."""
    possible = [name for name in types if _can_make(dataset, name)]
    return [f'columns="{name}"' for name in possible or types]


def _can_make(dataset: TorchRLBufferDataset, name: str) -> bool:
    try:
        dataset.peek(ColumnPlan(name))
    except TypeError:  # a reward without a threshold
        return True
    except (KeyError, ValueError):
        return False
    return True
