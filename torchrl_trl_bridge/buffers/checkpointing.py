"""A trainer callback that keeps buffer and stream in the trainer's checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torchrl_trl_bridge.buffers.dataset import TorchRLBufferDataset
from torchrl_trl_bridge.buffers.encoding import Encoder, decode
from torchrl_trl_bridge.buffers.sampling import Batch
from torchrl_trl_bridge.buffers.saving import load_buffer, save_buffer
from torchrl_trl_bridge.buffers.streaming import Record
from torchrl_trl_bridge.rollouts import Column, FreshRows

FOLDER = "replay_buffer"
"""Where in a checkpoint's folder the buffer is saved."""

_STREAM, _BATCHES = "stream.json", "stream.safetensors"


class BufferCheckpoint(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """Saves a replay buffer and the place of its stream in each checkpoint of a trainer, and goes on from there.

    A run that resumes (``Trainer.train(resume_from_checkpoint=...)``) trains on the rows that it would have trained on
    without a stop, although the buffer has changed while it ran: what the trainer had drawn ahead is saved too. That
    holds without a seed if the buffer has a generator of its own (``ReplayBuffer(generator=...)``) and prefetches
    nothing. The buffer goes with its checkpoint when ``save_total_limit`` removes that.

    A seeded dataset on a buffer that does not change needs none of this.

    Args:
        dataset: the training dataset, the one whose ``as_hf_dataset()`` the trainer has.
        folder: the checkpoint to resume from. Default: ``checkpoint-<step>`` in the trainer's ``output_dir``.

    Raises:
        FileNotFoundError: on resuming, if the checkpoint holds no buffer.
        ValueError: on resuming, if the buffer does not fit (see `load_buffer`), or the stream had ended and begun anew
            by then: give it ``num_batches=None``.

    Notes:
        Some trainers look at a row when they are made. In a process that resumes with an empty buffer, fill it before:
        ``load_buffer(replay_buffer, "<output_dir>/checkpoint-<step>/replay_buffer")``.

        Where there are several ranks, rank 0 saves; each rank whose buffer holds rows, and rank 0, loads.

        With ``ignore_data_skip`` the trainer does not skip what it has trained on; the stream then begins where the
        checkpoint was, counted in rows, which is exact where each row of the dataset becomes one of the trainer's.
    """

    def __init__(self, dataset: TorchRLBufferDataset, *, folder: str | os.PathLike[str] | None = None) -> None:
        if not isinstance(dataset, TorchRLBufferDataset):
            raise TypeError(
                f"dataset must be a TorchRLBufferDataset, got {type(dataset).__name__}: pass what as_hf_dataset() was "
                "called on."
            )
        self._dataset = dataset
        self._folder = folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restores buffer and stream if the trainer resumes."""
        record = Record()
        if state.global_step:
            folder = Path(self._folder or Path(args.output_dir) / f"checkpoint-{state.global_step}") / FOLDER
            if not folder.exists():
                raise FileNotFoundError(
                    f"{folder} does not exist: the trainer resumes from a checkpoint in which no buffer was saved, or "
                    "from another place. Name that one: BufferCheckpoint(dataset, folder=<checkpoint>)."
                )
            if state.is_world_process_zero or self._dataset.row_count:
                load_buffer(self._dataset.replay_buffer, folder)
            if state.is_world_process_zero:
                _restore_record(record, folder, skipping=not args.ignore_data_skip)
        self._dataset.stream.record = record if state.is_world_process_zero else None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forgets the batches that no checkpoint will need."""
        if self._dataset.stream.record is not None:
            self._dataset.stream.record.mark(args.gradient_accumulation_steps)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves buffer and stream into the checkpoint that the trainer has just written."""
        if self._dataset.stream.record is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
            save_buffer(self._dataset.replay_buffer, folder)
            _save_record(self._dataset.stream.record, folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops recording."""
        self._dataset.stream.record = None


def _save_record(record: Record, folder: Path) -> None:
    encoder = Encoder()
    batches = [
        [batch.number, {name: [column.metadata, _plain(column.values)] for name, column in batch.columns.items()}]
        for batch in record.batches
    ]
    tree = {"version": 1, "saved": encoder.encode([[record.state(), batches]], "a batch of the stream")}
    save_file(encoder.tensors, folder / _BATCHES)
    (folder / _STREAM).write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")


def _plain(values: Any) -> Any:
    return list(values) if isinstance(values, FreshRows) else values


def _restore_record(record: Record, folder: Path, *, skipping: bool) -> None:
    tree = json.loads((folder / _STREAM).read_text(encoding="utf-8"))
    ((state, saved),) = decode(tree["saved"], load_file(folder / _BATCHES))
    batches = [
        Batch(number, {name: Column(values, metadata) for name, (metadata, values) in columns.items()})
        for number, columns in saved
    ]
    record.resume(state, batches, skipping=skipping)
