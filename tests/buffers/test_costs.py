"""What a batch costs, in counts that no busy machine moves: draws, copies, device moves, calls a row."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import datasets
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from tests.counting import calls_in_package, operations
from torchrl_trl_bridge import TorchRLBufferDataset
from torchrl_trl_bridge.buffers.dataset import PEEKED_ROWS

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage]
FORMS = {"dataset": lambda dataset: dataset, "stream": lambda dataset: dataset.as_hf_dataset()}
MOST_OF_A_STREAM = 3 if hasattr(datasets, "List") else 10
"""Calls a row. Before version 4 ``datasets`` asks for the features at each row."""

in_both_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def buffer_of(storage: type, rows: int = 256, keys: int = 2, **kwargs: Any) -> ReplayBuffer:
    """Rows of ``keys`` keys, of 8 tokens, or ragged where the storage takes such rows as they are."""
    replay_buffer = ReplayBuffer(storage=storage(rows), **kwargs)
    names = [f"key{i}" for i in range(keys)]
    if storage is LazyStackStorage:
        made = [TensorDict({name: torch.arange(1 + i % 8) for name in names}) for i in range(rows)]
        replay_buffer.extend(lazy_stack(made))
    else:
        replay_buffer.extend(TensorDict({name: torch.arange(rows * 8).view(rows, 8) for name in names}, [rows]))
    return replay_buffer


def exhaust(rows: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in rows:
            pass

    return run


# A batch


@in_both_forms
@pytest.mark.parametrize("storage", STORAGES)
def test_one_draw_a_batch_and_none_before(storage: type, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    sample = RandomSampler.sample

    def counting(self: Any, storage: Any, batch_size: int) -> Any:
        drawn.append(batch_size)
        return sample(self, storage, batch_size)

    monkeypatch.setattr(RandomSampler, "sample", counting)
    rows = form(TorchRLBufferDataset(buffer_of(storage), 16, num_batches=3))
    assert drawn == []
    assert len(list(rows)) == 48
    assert drawn == [16, 16, 16]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_dense_rows_are_views_of_the_batch_that_was_drawn(storage: type, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_buffer = buffer_of(storage)
    drawn: list[Any] = []
    sample = replay_buffer.sample
    monkeypatch.setattr(replay_buffer, "sample", lambda size: drawn.append(sample(size)) or drawn[-1])
    rows = list(TorchRLBufferDataset(replay_buffer, 16))
    for name in ("key0", "key1"):
        assert {memory_of(row[name]) for row in rows} == {memory_of(drawn[0][name])}


def test_ragged_rows_are_copied_once_into_one_tensor_a_column() -> None:
    rows: list[Any] = []
    dataset = TorchRLBufferDataset(buffer_of(LazyStackStorage), 64)
    counted = operations(lambda: rows.extend(dataset))
    given = sum(row[name].nbytes for row in rows for name in row)
    indices = 64 * 8
    assert given <= counted.new_bytes <= given + 2 * indices
    assert len({memory_of(row["key0"]) for row in rows}) == 1


def memory_of(value: torch.Tensor) -> int:
    return int(value.untyped_storage().data_ptr())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_that_the_consumer_drops_is_let_go(storage: type) -> None:
    rows = iter(TorchRLBufferDataset(buffer_of(storage), 16))
    dropped = [weakref.ref(next(rows)["key0"]) for _ in range(4)]
    assert [value() is None for value in dropped] == [True] * 4


@in_both_forms
@pytest.mark.parametrize("storage", STORAGES)
def test_operations_on_tensors_do_not_grow_with_the_batch(storage: type, form: Any) -> None:
    replay_buffer = buffer_of(storage)
    counts = [operations(exhaust(form(TorchRLBufferDataset(replay_buffer, size)))).names for size in (16, 128)]
    for count in counts:
        count.pop("_local_scalar_dense", None)  # TorchRL looks up lazily stacked rows one by one
    assert counts[0] == counts[1]


@in_both_forms
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
def test_one_move_to_the_device_a_batch_and_column(storage: type, form: Any) -> None:
    replay_buffer = buffer_of(storage)
    dataset = form(TorchRLBufferDataset(replay_buffer, 16, device="meta", num_batches=3))
    rows: list[Any] = []
    counted = operations(lambda: rows.extend(dataset))
    assert counted.moves == 3 * 2
    assert {value.device.type for row in rows for value in row.values()} == {"meta"}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("form", "most"), [(FORMS["dataset"], 1), (FORMS["stream"], MOST_OF_A_STREAM)], ids=FORMS)
def test_calls_a_row(storage: type, form: Any, most: float) -> None:
    """One call gives a row of tensors: the generator goes on. A stream adds the one that counts the rows."""
    replay_buffer = buffer_of(storage)
    few, many = (calls_in_package(exhaust(form(TorchRLBufferDataset(replay_buffer, size)))) for size in (32, 232))
    own_rows = 1 if issubclass(storage, ListStorage) else 0  # each is asked for its values, and none is stacked
    assert (many - few) / 200 <= most + own_rows


def test_calls_do_not_grow_with_the_keys_of_a_row() -> None:
    slopes = []
    for keys in (1, 10):
        replay_buffer = buffer_of(LazyTensorStorage, keys=keys)
        few, many = (calls_in_package(exhaust(TorchRLBufferDataset(replay_buffer, size))) for size in (32, 232))
        slopes.append((many - few) / 200)
    assert slopes[0] == slopes[1]


# Making a stream


class StaysHere(ReplayBuffer):
    """A buffer that nobody may pickle, copy or draw from."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise AssertionError("pickled or copied")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError("copied")

    def sample(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("drawn from")


def stream_of(replay_buffer: ReplayBuffer) -> Callable[[], Any]:
    """Makes a stream, and asks for its columns, as trainers do first."""
    return lambda: TorchRLBufferDataset(replay_buffer, 8).as_hf_dataset().column_names


def reads_of(replay_buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each read of the storage."""
    reads: list[int] = []
    storage = type(replay_buffer.storage)
    get = storage.get

    def counting(self: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        reads.append(1 if isinstance(index, int) else len(index) if hasattr(index, "__len__") else 10**9)
        return get(self, index, *args, **kwargs)

    monkeypatch.setattr(storage, "get", counting)
    return reads


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_making_a_stream_grows_with_nothing(storage: type, monkeypatch: pytest.MonkeyPatch) -> None:
    stream_of(buffer_of(storage))()  # imports on first use
    costs = []
    for rows in (100, 10_000):
        replay_buffer = ReplayBuffer(storage=storage(rows))
        replay_buffer.extend(TensorDict({"input_ids": torch.zeros(rows, 64, dtype=torch.long)}, [rows]))
        replay_buffer.__class__ = StaysHere
        with monkeypatch.context() as patched:
            reads = reads_of(replay_buffer, patched)
            counted = operations(stream_of(replay_buffer))
        assert sum(reads) <= PEEKED_ROWS
        costs.append((counted.names, counted.new_bytes))
    assert costs[0] == costs[1]


def test_making_a_stream_takes_no_memory() -> None:
    rows = 50_000  # 200 MB, of which no byte is touched
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(rows))
    replay_buffer.extend(TensorDict({"input_ids": torch.zeros(1, 512, dtype=torch.long).expand(rows, 512)}, [rows]))
    tracemalloc.start()
    try:
        counted = operations(stream_of(replay_buffer))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6
    assert counted.new_bytes < 1e6
