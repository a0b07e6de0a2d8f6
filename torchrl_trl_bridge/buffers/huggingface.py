"""A buffer dataset as ``datasets.IterableDataset`` (a stream) and as ``datasets.Dataset`` (a snapshot)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import torch

from torchrl_trl_bridge.buffers import arrow
from torchrl_trl_bridge.buffers.sampling import Share
from torchrl_trl_bridge.buffers.streaming import new_place
from torchrl_trl_bridge.buffers.trainers import (
    check_columns,
    check_evaluation,
    check_exhausted,
    check_trainer,
    check_user,
    possible_types,
)
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.compat.datasets import ExamplesIterable, TableDataset, UnshuffledStream
from torchrl_trl_bridge.compat.torch import fork_workers_of
from torchrl_trl_bridge.compat.trl import say_what_to_write_instead
from torchrl_trl_bridge.rollouts import Column

if TYPE_CHECKING:
    from torchrl_trl_bridge.buffers.dataset import TorchRLBufferDataset

SNAPSHOT_ROWS = 4096
"""How many rows of a snapshot are read at a time."""


def stream(dataset: TorchRLBufferDataset) -> datasets.IterableDataset:
    """A live view: see `TorchRLBufferDataset.as_hf_dataset`."""
    fork_workers_of(UnshuffledStream)
    say_what_to_write_instead(UnshuffledStream)
    return BufferStream(_BufferExamples(dataset))


def snapshot(dataset: TorchRLBufferDataset) -> datasets.Dataset:
    """The whole buffer, in storage order: see `TorchRLBufferDataset.as_hf_dataset`."""
    table, features, types = dataset.stream.agreed(lambda: (*_table_of(dataset), possible_types(dataset)))
    made: BufferSnapshot = BufferSnapshot.of_table(table, features)
    made.note = _Note(frozenset(types), set())
    return made


def _table_of(dataset: TorchRLBufferDataset) -> tuple[pa.Table, datasets.Features]:
    dataset.wait(drawing=False)
    rows = compat.row_count(dataset.replay_buffer)
    chunks = []
    for start in range(0, rows, SNAPSHOT_ROWS):
        indices = torch.arange(start, min(start + SNAPSHOT_ROWS, rows))
        batch = compat.read_rows(dataset.replay_buffer, indices)
        chunks.append((len(indices), dataset.read(batch, first=start == 0)))
    names = list(dict.fromkeys(name for _, columns in chunks for name in columns))
    nothing = Column([])
    built = {
        name: arrow.column_of(name, [(columns.get(name, nothing), size) for size, columns in chunks]) for name in names
    }
    table = pa.table({name: values for name, (values, _) in built.items()})
    return table, datasets.Features({name: feature for name, (_, feature) in built.items()})


@dataclass
class _Note:
    """What a snapshot knows: the dataset types that the buffer could make, and the trainers that it was checked for."""

    types: frozenset[str]
    checked: set[type]


class BufferSnapshot(TableDataset):
    """A Hugging Face dataset whose columns are checked for the trainer that asks for its length or its rows."""

    def __len__(self) -> int:
        self._check_user()
        return int(super().__len__())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._check_user()
        rows: Iterator[dict[str, Any]] = super().__iter__()
        return rows

    def map(self, *args: Any, **kwargs: Any) -> Any:
        """As ``datasets.Dataset.map``: the first thing that some trainers do with a dataset."""
        self._check_user()
        return super().map(*args, **kwargs)

    def _check_user(self) -> None:
        if self.note is not None:
            check_user(self._check, self.note.checked)

    def _check(self, trainer_class: type, args: Any) -> None:
        check_columns(
            self.column_names, lambda types: [name for name in types if name in self.note.types], trainer_class, args
        )


class BufferStream(UnshuffledStream):
    """A Hugging Face stream whose features are known as soon as the buffer holds a row, made before or after."""

    @property
    def features(self) -> datasets.Features | None:
        examples = self.source
        if self.stated_features is None and isinstance(examples, _BufferExamples):
            self._check_user()  # not each time: datasets 3.1 asks for the features at each row
            self.stated_features = examples.features
        return self.stated_features

    def map(self, *args: Any, **kwargs: Any) -> Any:
        """As ``datasets.IterableDataset.map``: the first thing that some trainers do with a dataset."""
        self._check_user()
        return super().map(*args, **kwargs)

    def shuffle(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the stream itself: its rows are drawn at random already."""
        self._check_user()
        return super().shuffle(*args, **kwargs)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._check_user()
        rows: Iterator[dict[str, Any]] = super().__iter__()
        return rows

    def _check_user(self) -> None:
        examples = self.source
        if isinstance(examples, _BufferExamples) and examples.dataset.row_count:
            dataset = examples.dataset
            check_user(
                lambda trainer_class, args: check_trainer(dataset, trainer_class, args, streaming=True),
                examples.checked,
            )


class _BufferExamples(ExamplesIterable):  # type: ignore[misc]
    """The rows of a buffer dataset, in the form in which ``datasets`` wants its sources."""

    # The rows are passed on as they are. Otherwise each would go through Arrow's types, and its tensors become lists.
    is_typed = True
    num_shards = 1
    sleep_on_threads_shutdown = False  # asked by what puts several streams together

    def __init__(self, dataset: TorchRLBufferDataset) -> None:
        super().__init__()
        self.dataset = dataset
        self.epoch = 0
        self.checked: set[type] = set()
        self._features: datasets.Features | None = None

    @property
    def features(self) -> datasets.Features | None:
        if self._features is None:
            self._features = self.dataset.stream.agreed(lambda: _features_of(self.dataset))
        return self._features

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        check_evaluation(self.dataset)
        # `datasets` gives its only shard, the whole stream, to one data-loader worker.
        rows = self.dataset.stream.rows(
            epoch=self.epoch,
            share=Share(),
            names=list(self.features or ()),
            scalars=True,
            place=new_place() if self._state_dict is None else self._state_dict,
            keeps_looks=True,
        )
        yield from enumerate(rows)
        check_exhausted(self.dataset)

    def __deepcopy__(self, memo: dict[int, Any]) -> _BufferExamples:
        """Another place in the same buffer: ``datasets`` copies what it concatenates or interleaves."""
        clone = copy.copy(self)
        clone._state_dict = copy.deepcopy(self._state_dict, memo)
        return clone

    def shift_rngs(self, value: int) -> _BufferExamples:
        """``datasets`` calls this with the epoch."""
        shifted = copy.copy(self)
        shifted.epoch = self.epoch + value
        return shifted

    def shuffle_data_sources(self, generator: Any) -> _BufferExamples:
        return self

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> _BufferExamples:
        return self

    def reshard_data_sources(self) -> _BufferExamples:
        return self

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {**new_place(), "type": type(self).__name__}
        return self._state_dict


def _features_of(dataset: TorchRLBufferDataset) -> datasets.Features | None:
    if not compat.row_count(dataset.replay_buffer):
        return None
    columns = dataset.peek()
    return datasets.Features({name: arrow.feature_of(name, column.values) for name, column in columns.items()})
