"""A buffer dataset as ``datasets.IterableDataset`` (a stream) and as ``datasets.Dataset`` (a snapshot)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import torch

from torchrl_trl_bridge.buffers import arrow
from torchrl_trl_bridge.buffers.sampling import Share
from torchrl_trl_bridge.buffers.trainers import check_evaluation, check_exhausted, check_user
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.compat.datasets import ExamplesIterable, UnshuffledStream, dataset_of_table
from torchrl_trl_bridge.rollouts import Column

if TYPE_CHECKING:
    from torchrl_trl_bridge.buffers.dataset import TorchRLBufferDataset

SNAPSHOT_ROWS = 4096
"""How many rows of a snapshot are read at a time."""


def stream(dataset: TorchRLBufferDataset) -> datasets.IterableDataset:
    """A live view: see `TorchRLBufferDataset.as_hf_dataset`."""
    return BufferStream(_BufferExamples(dataset))


def snapshot(dataset: TorchRLBufferDataset) -> datasets.Dataset:
    """The whole buffer, in storage order: see `TorchRLBufferDataset.as_hf_dataset`."""
    dataset.wait()
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
    return dataset_of_table(table, datasets.Features({name: feature for name, (_, feature) in built.items()}))


class BufferStream(UnshuffledStream):
    """A Hugging Face stream whose features are known as soon as the buffer holds a row, made before or after."""

    @property
    def features(self) -> datasets.Features | None:
        examples = getattr(self, "_ex_iterable", None)
        if isinstance(examples, _BufferExamples):
            check_user(examples.dataset, examples.checked)
            if self._info.features is None:
                self._info.features = examples.features
        return self._info.features


class _BufferExamples(ExamplesIterable):  # type: ignore[misc]
    """The rows of a buffer dataset, in the form in which ``datasets`` wants its sources."""

    # The rows are passed on as they are. Otherwise each would go through Arrow's types, and its tensors become lists.
    is_typed = True
    num_shards = 1

    def __init__(self, dataset: TorchRLBufferDataset) -> None:
        super().__init__()
        self.dataset = dataset
        self.epoch = 0
        self.checked: set[type] = set()
        self._features: datasets.Features | None = None

    @property
    def features(self) -> datasets.Features | None:
        if self._features is None:
            self._features = _features_of(self.dataset)
        return self._features

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        state: dict[str, Any] = self._state_dict or {}
        skipped = state.get("given", 0)
        check_evaluation(self.dataset)
        # `datasets` gives its only shard, the whole stream, to one data-loader worker.
        rows = self.dataset.stream(epoch=self.epoch, share=Share(), names=list(self.features or ()), scalars=True)
        for position, row in enumerate(rows):
            if position < skipped:
                continue
            if self._state_dict:
                self._state_dict["given"] = position + 1
            yield position, row
        check_exhausted(self.dataset)

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
        self._state_dict = {"given": 0, "type": type(self).__name__}
        return self._state_dict


def _features_of(dataset: TorchRLBufferDataset) -> datasets.Features | None:
    if not compat.row_count(dataset.replay_buffer):
        return None
    columns = dataset.peek()
    return datasets.Features({name: arrow.feature_of(name, column.values) for name, column in columns.items()})
