"""The Hugging Face forms of a buffer dataset: the live stream and the snapshot."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.data.llm import History

from tests.counting import CountingSampler
from tests.features import has, needs
from torchrl_trl_bridge import TorchRLBufferDataset

CHATS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    [{"role": "user", "content": "add"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}, {"role": "tool", "content": "2"}],
    [{"role": "user", "content": None}],
]  # fmt: skip


def numbers(rows: int = 10, storage: type = LazyTensorStorage, **kwargs: Any) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(1000), **kwargs)
    replay_buffer.extend(TensorDict({"x": torch.arange(rows), "tokens": torch.arange(3 * rows).view(rows, 3)}, [rows]))
    return replay_buffer


def chats(storage: type = LazyStackStorage) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(10))
    for chat in CHATS:
        replay_buffer.add(TensorDict({"messages": NonTensorData(chat)}))
    return replay_buffer


# The stream


def test_the_stream_gives_the_rows_of_the_dataset(collected: ReplayBuffer) -> None:
    dataset = TorchRLBufferDataset(collected, 4, num_batches=2, seed=0)
    plain, streamed = list(dataset), list(dataset.as_hf_dataset())
    assert len(plain) == len(streamed) == 8
    for ours, theirs in zip(plain, streamed, strict=True):
        assert list(ours) == list(theirs)
        for name, value in ours.items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert torch.equal(value, theirs[name])
            else:
                assert theirs[name] == value


def test_it_is_what_trainers_ask_for() -> None:
    stream = TorchRLBufferDataset(numbers(), 4).as_hf_dataset()
    assert isinstance(stream, datasets.IterableDataset)
    assert isinstance(stream, torch.utils.data.IterableDataset)
    assert stream.num_shards == 1


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage, LazyMemmapStorage])
def test_scalars_are_python_numbers_and_the_rest_tensors(storage: type) -> None:
    replay_buffer = ReplayBuffer(storage=storage(10))
    data = {"i": torch.tensor([4]), "f": torch.tensor([0.5]), "b": torch.tensor([True]), "ids": torch.arange(3)[None]}
    replay_buffer.extend(TensorDict(data, [1]))
    row = next(iter(TorchRLBufferDataset(replay_buffer, 1).as_hf_dataset()))
    assert (type(row["i"]), type(row["f"]), type(row["b"])) == (int, float, bool)
    assert row["i"] == 4
    assert {4: "found"}[row["i"]]
    assert json.dumps([row["i"], row["f"], row["b"]]) == "[4, 0.5, true]"
    assert isinstance(row["ids"], torch.Tensor)
    assert row["ids"].dtype == torch.int64


def test_bfloat16_survives() -> None:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    replay_buffer.extend(TensorDict({"h": torch.ones(2, 3, dtype=torch.bfloat16)}, [2]))
    dataset = TorchRLBufferDataset(replay_buffer, 2)
    assert next(iter(dataset.as_hf_dataset()))["h"].dtype == torch.bfloat16
    assert dataset.as_hf_dataset(streaming=False)[:]["h"] == [[1.0] * 3] * 2


def test_rows_added_later_are_seen_within_an_iteration() -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(1))
    replay_buffer.add(TensorDict({"x": torch.tensor(1)}))
    rows = iter(TorchRLBufferDataset(replay_buffer, 1, num_batches=None).as_hf_dataset())
    assert next(rows)["x"] == 1
    replay_buffer.add(TensorDict({"x": torch.tensor(2)}))
    assert next(rows)["x"] == 2


@pytest.mark.parametrize(
    "together",
    [
        lambda stream, other: datasets.interleave_datasets([stream, other]),
        lambda stream, other: datasets.concatenate_datasets([stream, other]),
        lambda stream, other: datasets.concatenate_datasets([stream, other.rename_column("x", "y")], axis=1),
    ],
    ids=["interleaved", "one after the other", "side by side"],
)
def test_a_stream_put_together_with_another_is_live_too(together: Callable[..., datasets.IterableDataset]) -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(1))
    replay_buffer.add(TensorDict({"x": torch.tensor(1)}))
    stream = TorchRLBufferDataset(replay_buffer, 1, num_batches=3).as_hf_dataset()
    rows = iter(together(stream, datasets.Dataset.from_dict({"x": [7] * 3}).to_iterable_dataset()))
    assert next(rows)["x"] == 1
    replay_buffer.add(TensorDict({"x": torch.tensor(2)}))
    assert 2 in [row["x"] for row in rows]


def test_features_are_known_without_a_draw() -> None:
    sampler = CountingSampler()
    replay_buffer = numbers(sampler=sampler)
    stream = TorchRLBufferDataset(replay_buffer, 4).as_hf_dataset()
    assert stream.column_names == ["x", "tokens"]
    assert stream.features == datasets.Features(
        {"x": datasets.Value("int64"), "tokens": datasets.Sequence(datasets.Value("int64"))}
    )
    assert sampler.draws == 0


def test_features_become_known_with_the_first_row() -> None:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    stream = TorchRLBufferDataset(replay_buffer, 4).as_hf_dataset()
    assert stream.features is None
    assert stream.column_names is None
    replay_buffer.extend(TensorDict({"x": torch.arange(3)}, [3]))
    assert stream.column_names == ["x"]


@pytest.mark.parametrize("kind", ["collected", "tensordict", "ensemble", "keys", "mixed"])
def test_features_name_the_columns_of_the_rows(kind: str, collect: Callable[..., ReplayBuffer]) -> None:
    keys = None
    replay_buffer = collect()
    if kind == "tensordict":
        replay_buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        replay_buffer.extend(TensorDict({"x": torch.arange(3)}, [3]))
    elif kind == "ensemble":
        replay_buffer = ReplayBufferEnsemble(numbers(), numbers(), batch_size=4)
    elif kind == "keys":
        keys = [("tokens", "full"), "history"]
    elif kind == "mixed":
        replay_buffer = ReplayBuffer(storage=ListStorage(10))
        replay_buffer.add(TensorDict({"a": torch.ones(1)}))
        replay_buffer.add(TensorDict({"b": "text"}))
    stream = TorchRLBufferDataset(replay_buffer, 4, keys=keys).as_hf_dataset()
    for row in stream:
        assert list(row) == stream.column_names
    assert set(stream.features) == set(stream.column_names)


def test_shuffle_holds_no_rows_back() -> None:
    sampler = CountingSampler()
    stream = TorchRLBufferDataset(numbers(sampler=sampler), 4, num_batches=None).as_hf_dataset()
    next(iter(stream.shuffle(seed=1)))
    assert sampler.draws == 1
    next(iter(stream.map(lambda row: {"y": row["x"]}).select_columns(["y"]).shuffle(seed=1)))
    assert sampler.draws == 2


@pytest.mark.parametrize("looked_at", [False, True])
def test_rows_are_filtered_as_they_are(looked_at: bool) -> None:
    stream = TorchRLBufferDataset(numbers(), 8, num_batches=2).as_hf_dataset()
    columns = stream.column_names if looked_at else None
    filtered = stream.filter(lambda row: row["x"] % 2 == 0)
    assert not looked_at or filtered.column_names == columns
    assert all(row["x"] % 2 == 0 for row in filtered)
    assert len(list(stream)) == 16


def test_columns_are_selected_from_what_was_mapped() -> None:
    mapped = TorchRLBufferDataset(numbers(), 4).as_hf_dataset().map(lambda row: {"y": row["x"], "z": 0})
    assert [list(row) for row in mapped.select_columns(["y"])] == [["y"]] * 4


def test_a_look_before_training_loses_no_row() -> None:
    replay_buffer = numbers(12, sampler=SamplerWithoutReplacement())
    stream = TorchRLBufferDataset(replay_buffer, 4, num_batches=3).as_hf_dataset()
    for _ in range(3):
        next(iter(stream))
    next(iter(stream.map(lambda row: row)))
    assert sorted(row["x"] for row in stream) == list(range(12))


@pytest.mark.parametrize("taken", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("mapped", [False, True])
def test_taking_some_rows_loses_none(taken: int, mapped: bool) -> None:
    stream = TorchRLBufferDataset(numbers(12, sampler=SamplerWithoutReplacement()), 4, num_batches=3).as_hf_dataset()
    some = (stream.map(lambda row: row) if mapped else stream).take(taken)
    assert len(list(some.take(0))) == 0
    first = [row["x"] for row in some]
    assert len(first) == taken
    assert sorted((first + [row["x"] for row in stream])[:12]) == list(range(12))


def test_epochs_of_a_seeded_stream() -> None:
    dataset = TorchRLBufferDataset(numbers(1000), 8, seed=3)
    stream = dataset.as_hf_dataset()
    mapped = stream.map(lambda row: row)

    def rows(source: Any, epoch: int) -> list[int]:
        source.set_epoch(epoch)
        return [row["x"] for row in source]

    assert rows(stream, 0) == rows(stream, 0) == rows(mapped, 0)
    assert rows(stream, 1) == rows(stream, 1) == rows(mapped, 1)
    assert rows(stream, 0) != rows(stream, 1)
    dataset.set_epoch(1)
    assert [row["x"].item() for row in dataset] == rows(stream, 1)


def test_a_buffer_that_cannot_be_pickled() -> None:
    generator = itertools.count()
    generator = (i for i in generator)  # no pickler takes it

    def count(batch: Any) -> Any:
        next(generator)
        return batch

    stream = TorchRLBufferDataset(numbers(transform=count), 4).as_hf_dataset()
    assert len(list(stream)) == 4
    assert len(list(stream.map(lambda row: row))) == 4


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_making_a_stream_costs_nothing_that_grows_with_the_buffer(
    storage: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Counted, not timed: the rows that are read, whatever the size of the buffer.
    read = []
    get = storage.get
    monkeypatch.setattr(storage, "get", lambda self, index: read.append(len(index)) or get(self, index))
    TorchRLBufferDataset(numbers(1000, storage), 4).as_hf_dataset()
    assert sum(read) <= 16


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_data_loader_with_workers_gives_each_row_once(workers: int) -> None:
    replay_buffer = numbers(1000, sampler=SamplerWithoutReplacement())
    for source in (
        TorchRLBufferDataset(replay_buffer, 5, num_batches=6),
        TorchRLBufferDataset(replay_buffer, 5, num_batches=6).as_hf_dataset(),
    ):
        context = "fork" if workers else None
        loader = torch.utils.data.DataLoader(source, batch_size=3, num_workers=workers, multiprocessing_context=context)
        rows = [int(x) for batch in loader for x in batch["x"]]
        assert len(rows) == len(set(rows)) == 30


# The snapshot


def test_a_snapshot_has_all_rows_in_storage_order(collected: ReplayBuffer) -> None:
    snapshot = TorchRLBufferDataset(collected, 4).as_hf_dataset(streaming=False)
    assert isinstance(snapshot, datasets.Dataset)
    assert len(snapshot) == len(collected)
    for i, row in enumerate(snapshot):
        stored = collected[i]
        assert row["tokens.full"] == stored["tokens", "full"].tolist()
        assert row["text.response"] == stored["text", "response"]
        assert row["answer"] == stored["answer"].item()
        if ("history", "full") in stored.keys(True):
            assert [message["content"] for message in row["history.full"]] == stored["history", "full"].content
            assert all(set(message) == {"role", "content"} for message in row["history.full"])


def test_a_snapshot_and_a_stream_have_the_same_features(collected: ReplayBuffer) -> None:
    dataset = TorchRLBufferDataset(collected, 4)
    assert dataset.as_hf_dataset(streaming=False).features == dataset.as_hf_dataset().features


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
@needs("Json")
def test_messages_keep_the_keys_that_they_had(storage: type) -> None:
    snapshot = TorchRLBufferDataset(chats(storage), 4).as_hf_dataset(streaming=False)
    assert list(snapshot["messages"]) == CHATS


@needs("Json")
def test_histories_keep_the_keys_that_they_had() -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    stored = [chat[:2] for chat in CHATS[:2]]
    for chat in stored:
        replay_buffer.add(TensorDict({"chat": History.from_chats([chat])[0]}))
    assert list(TorchRLBufferDataset(replay_buffer, 4).as_hf_dataset(streaming=False)["chat"]) == stored


def test_where_datasets_has_no_json_lacking_keys_come_as_none() -> None:
    """As in any ``datasets.Dataset`` of such a release."""
    if has("Json"):
        pytest.skip("datasets has Json, which keeps the keys")
    snapshot = TorchRLBufferDataset(chats(ListStorage), 4).as_hf_dataset(streaming=False)
    given = [[{key: value for key, value in turn.items() if value is not None} for turn in chat] for chat in CHATS]
    rows = list(snapshot["messages"])
    assert [
        [{key: turn[key] for key in kept} for turn, kept in zip(*pair, strict=True)]
        for pair in zip(rows, given, strict=True)
    ] == given
    assert all(set(turn) == {key for chat in CHATS for turn in chat for key in turn} for chat in rows for turn in chat)


@needs("Json")
def test_python_values_come_back_as_they_were() -> None:
    rows: list[dict[str, Any]] = [
        {"s": "4", "n": 1, "mixed": "4", "d": {"a": 1}, "l": ["x"], "e": []},
        {"s": "{}", "n": 2.5, "mixed": 4, "d": {"b": [None, "4"]}, "l": ["y", "z"], "e": []},
    ]
    replay_buffer = ReplayBuffer(storage=ListStorage(10))
    for row in rows:
        replay_buffer.add(TensorDict({key: NonTensorData(value) for key, value in row.items()}))
    snapshot = TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False)
    assert list(snapshot) == rows


FLOATS = [torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, *FLOATS])
def test_tensors_of_any_rank_and_dtype(dtype: torch.dtype) -> None:
    data = {f"d{n}": torch.arange(2 * 3**n).view(2, *[3] * n).to(dtype) for n in range(4)}
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    replay_buffer.extend(TensorDict(data, [2]))
    snapshot = TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False).with_format("torch")
    for name, values in data.items():
        assert torch.equal(torch.stack(list(snapshot[name])).to(dtype).float(), values.float())


@needs("Json")
def test_tensors_of_several_dtypes_and_ranks() -> None:
    rows = [torch.ones(2), torch.arange(3), torch.ones(1, 2)]
    replay_buffer = ReplayBuffer(storage=ListStorage(10), sampler=SamplerWithoutReplacement(shuffle=False))
    for row in rows:
        replay_buffer.add(TensorDict({"v": row}))
    dataset = TorchRLBufferDataset(replay_buffer, 3)
    assert list(dataset.as_hf_dataset(streaming=False)["v"]) == [[1.0, 1.0], [0, 1, 2], [[1.0, 1.0]]]
    for row, expected in zip(dataset.as_hf_dataset(), rows, strict=True):
        assert row["v"].dtype == expected.dtype
        assert torch.equal(row["v"], expected)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dtype_that_arrow_lacks_is_named(streaming: bool) -> None:
    dataset = TorchRLBufferDataset(buffer_of_complex(), 2)
    with pytest.raises(TypeError, match=r"column 'z'.*torch.complex64.*keys=\["):
        dataset.as_hf_dataset(streaming=streaming).column_names  # noqa: B018
    assert next(iter(dataset))["z"].dtype == torch.complex64
    chosen = TorchRLBufferDataset(buffer_of_complex(), 2, keys=["x"]).as_hf_dataset(streaming=streaming)
    assert chosen.column_names == ["x"]


def buffer_of_complex() -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    replay_buffer.extend(TensorDict({"z": torch.ones(2, dtype=torch.complex64), "x": torch.arange(2)}, [2]))
    return replay_buffer


def test_ragged_tensors_of_any_rank() -> None:
    rows = [TensorDict({"v": torch.arange(n), "m": torch.ones(n, 2), "o": torch.ones(n)}) for n in (1, 3, 2)]
    rows.append(TensorDict({"v": torch.arange(2), "m": torch.ones(2, 2)}))
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    for row in rows:
        replay_buffer.add(row)
    snapshot = TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False)
    assert list(snapshot["v"]) == [[0], [0, 1, 2], [0, 1], [0, 1]]
    assert list(snapshot["m"]) == [[[1.0, 1.0]] * n for n in (1, 3, 2, 2)]
    assert list(snapshot["o"]) == [[1.0], [1.0] * 3, [1.0] * 2, None]


def test_a_snapshot_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrl_trl_bridge.buffers import huggingface

    monkeypatch.setattr(huggingface, "SNAPSHOT_ROWS", 4)
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(100))
    for i in range(10):
        only = {"late": "x"} if i > 7 else {}
        replay_buffer.add(TensorDict({"x": torch.arange(i), "s": str(i), **only}))
    snapshot = TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False)
    assert list(snapshot["x"]) == [list(range(i)) for i in range(10)]
    assert list(snapshot["s"]) == [str(i) for i in range(10)]
    assert list(snapshot["late"]) == [None] * 8 + ["x"] * 2


def test_a_snapshot_is_no_view() -> None:
    replay_buffer = numbers(3)
    snapshot = TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False)
    replay_buffer.empty()
    replay_buffer.extend(TensorDict({"x": torch.zeros(3).long(), "tokens": torch.zeros(3, 3).long()}, [3]))
    assert list(snapshot["x"]) == [0, 1, 2]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_snapshot_of_a_storage_of_two_dimensions(storage: type) -> None:
    replay_buffer = ReplayBuffer(storage=storage(20, ndim=2))
    replay_buffer.extend(TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
    snapshot = TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False)
    # TorchRL stores the second dimension of what was written, time, first.
    assert torch.equal(torch.tensor(snapshot["x"][:]).view(3, 4), torch.arange(12).view(4, 3).T)


def test_a_snapshot_of_an_ensemble() -> None:
    ensemble = ReplayBufferEnsemble(numbers(3), numbers(2), batch_size=2)
    assert list(TorchRLBufferDataset(ensemble, 2).as_hf_dataset(streaming=False)["x"]) == [0, 1, 2, 0, 1]


def test_a_snapshot_of_an_empty_buffer() -> None:
    with pytest.raises(RuntimeError, match="is empty"):
        TorchRLBufferDataset(ReplayBuffer(storage=ListStorage(3)), 2).as_hf_dataset(streaming=False)


@pytest.mark.parametrize("value", [{"f": {1, 2}}, {1: "a"}, {"a": [{2: "b"}]}, 2**70, [1, 2**70]])
def test_a_value_that_arrow_cannot_hold_is_named(value: Any) -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(3))
    replay_buffer.add(TensorDict({"o": NonTensorData(value)}))
    with pytest.raises(TypeError, match=r"column 'o'.*keys=\["):
        TorchRLBufferDataset(replay_buffer, 2).as_hf_dataset(streaming=False)
    assert next(iter(TorchRLBufferDataset(replay_buffer, 1)))["o"] == value
