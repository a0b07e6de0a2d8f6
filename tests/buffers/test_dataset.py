"""TorchRLBufferDataset: its contract, and rows of every kind of buffer."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import time
import warnings
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict, lazy_stack
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
from torchrl.envs import Transform

from tests.features import has, needs, sampler_class, sampler_param
from torchrl_trl_bridge import TorchRLBufferDataset
from torchrl_trl_bridge.buffers.sampling import Share

ConsumingSampler, StalenessAwareSampler = sampler_class("ConsumingSampler"), sampler_class("StalenessAwareSampler")
if has("trl_interop"):
    from torchrl.modules.llm.trl_interop import TorchRLBufferDataset as TorchRLsOwn

PLAIN = (torch.Tensor, str, int, float, bool, list, dict)
STORAGES = [ListStorage, LazyStackStorage, LazyTensorStorage, LazyMemmapStorage]
KEEP_STRINGS = [ListStorage, LazyStackStorage, LazyTensorStorage]


def buffer_of(data: Any, storage: type = LazyTensorStorage, **kwargs: Any) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(100), **kwargs)
    replay_buffer.extend(data)
    return replay_buffer


def ragged_rows(lengths: list[int]) -> TensorDict:
    return lazy_stack([TensorDict({"tokens": torch.arange(n), "id": torch.tensor(n)}) for n in lengths])


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return torch.equal(torch.as_tensor(left), torch.as_tensor(right))
    return left == right and type(left) is type(right)


# Arguments


@pytest.mark.parametrize("value", [None, [1, 2], {"a": 1}, torch.arange(3), ListStorage(3)])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="must be a torchrl ReplayBuffer instance, got"):
        TorchRLBufferDataset(value, 2)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None, True])
def test_batch_size_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ValueError, match="batch_size must be a positive integer"):
        TorchRLBufferDataset(buffer_of(torch.arange(3)), value)


def test_integers_of_numpy_are_integers() -> None:
    def rows_and_state(two: Any) -> Any:
        dataset = TorchRLBufferDataset(buffer_of(torch.arange(30)), two, num_batches=two, seed=two)
        dataset.set_epoch(two)
        return [next(iter(row.values())).item() for row in dataset], json.dumps(dataset.state_dict())

    assert rows_and_state(np.int64(2)) == rows_and_state(2)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_num_batches_must_be_a_positive_integer_or_none(value: Any) -> None:
    with pytest.raises(ValueError, match="num_batches must be a positive integer or None"):
        TorchRLBufferDataset(buffer_of(torch.arange(3)), 2, num_batches=value)


def test_no_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keys=\[\] selects nothing"):
        TorchRLBufferDataset(buffer_of(torch.arange(3)), 2, keys=[])


def test_one_string_is_no_list_of_keys() -> None:
    with pytest.raises(TypeError, match=r"keys=\['prompt'\]"):
        TorchRLBufferDataset(buffer_of(torch.arange(3)), 2, keys="prompt")


@pytest.mark.parametrize(
    ("name", "value", "error"), [("seed", 1.5, TypeError), ("timeout", -1, ValueError), ("timeout", "3", ValueError)]
)
def test_seed_and_timeout_are_checked(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        TorchRLBufferDataset(buffer_of(torch.arange(3)), 2, **{name: value})


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is such a device")
    with pytest.raises(ValueError, match=f"device='{device}': this machine has no such device"):
        TorchRLBufferDataset(buffer_of(torch.arange(3)), 2, device=device)


@pytest.mark.parametrize("streaming", ["no", None, 1])
def test_streaming_is_true_or_false(streaming: Any) -> None:
    with pytest.raises(TypeError, match=r"streaming must be True \(a stream\) or False"):
        TorchRLBufferDataset(buffer_of(torch.arange(3)), 2).as_hf_dataset(streaming=streaming)


@needs("trl_interop")
def test_repr_shows_the_arguments_as_torchrls_does() -> None:
    replay_buffer = buffer_of(TensorDict({"x": torch.arange(3)}, [3]))
    assert repr(TorchRLBufferDataset(replay_buffer, 2, num_batches=3)) == repr(
        TorchRLsOwn(replay_buffer, 2, num_batches=3)
    )
    assert "seed=3" in repr(TorchRLBufferDataset(replay_buffer, 2, seed=3))


def test_number_of_rows() -> None:
    replay_buffer = buffer_of(TensorDict({"x": torch.arange(3)}, [3]))
    assert len(list(TorchRLBufferDataset(replay_buffer, 4))) == 4
    assert len(list(TorchRLBufferDataset(replay_buffer, 4, num_batches=3))) == 12
    endless = iter(TorchRLBufferDataset(replay_buffer, 4, num_batches=None))
    assert len([next(endless) for _ in range(50)]) == 50


# The same rows as torchrl's own class, where that is right


@needs("trl_interop")
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("keys", [None, ["a"], [("b", "c"), "a"], [("b", "d", "e")]])
def test_rows_equal_torchrls(storage: type, keys: Any) -> None:
    data = TensorDict(
        {
            "a": torch.arange(6),
            "b": {"c": torch.randn(6, 3), "d": {"e": torch.arange(12).view(6, 2).bool()}},
        },
        [6],
    )
    replay_buffer = buffer_of(data, storage)
    torch.manual_seed(0)
    theirs = list(TorchRLsOwn(replay_buffer, 5, keys=keys, num_batches=2))
    torch.manual_seed(0)
    ours = list(TorchRLBufferDataset(replay_buffer, 5, keys=keys, num_batches=2))
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert list(our) == list(their)
        assert all(equal(our[name], their[name]) and our[name].dtype == their[name].dtype for name in our)


@needs("trl_interop")
@pytest.mark.parametrize("storage", KEEP_STRINGS)
def test_strings_equal_torchrls(storage: type) -> None:
    data = TensorDict({"prompt": NonTensorStack("a", "b", "c"), "n": torch.arange(3)}, [3])
    replay_buffer = buffer_of(data, storage)
    torch.manual_seed(0)
    theirs = list(TorchRLsOwn(replay_buffer, 8))
    torch.manual_seed(0)
    ours = list(TorchRLBufferDataset(replay_buffer, 8))
    assert [row["prompt"] for row in ours] == [row["prompt"] for row in theirs]
    assert [row["n"].item() for row in ours] == ["abc".index(row["prompt"]) for row in ours]


# What TorchRL's collectors write


def test_collected_rows_are_plain_and_whole(collected: ReplayBuffer) -> None:
    rows = list(TorchRLBufferDataset(collected, 16))
    stored = {}
    for i in range(len(collected)):
        stored[collected[i]["text", "full"], collected[i]["query"]] = collected[i]
    assert len(rows) == 16
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same columns"
    for row in rows:
        assert all(isinstance(value, PLAIN) for value in row.values()), row
        source = stored[row["text.full"], row["query"]]
        for key in ("prompt", "response", "full"):
            assert torch.equal(row[f"tokens.{key}"], source["tokens", key])
            assert row[f"text.{key}"] == source["text", key]
        assert torch.equal(row["masks.all_attention_mask"], source["masks", "all_attention_mask"])
        assert torch.equal(row["log_probs.response"], source["log_probs", "response"])
        assert torch.equal(row["next.done"], source["next", "done"])
        assert row["tokens.padded"] is source["tokens"].padded
        if ("history", "prompt") in source.keys(True):
            messages = row["history.full"]
            history = source["history", "full"]
            assert [message["role"] for message in messages] == history.role
            assert [message["content"] for message in messages] == history.content
            assert messages == row["history.prompt"] + row["history.response"]


def test_padding_that_was_not_stored_does_not_appear(collect: Any) -> None:
    rows = list(TorchRLBufferDataset(collect("history", False), 16))
    assert len({len(row["tokens.full"]) for row in rows}) > 1
    assert all(row["masks.all_attention_mask"].all() for row in rows)


def test_fields_that_are_none_in_all_rows_are_left_out(collect: Any) -> None:
    row = next(iter(TorchRLBufferDataset(collect("history"), 2)))
    assert "masks.all_assistant_mask" not in row
    assert not any("tool" in name for name in row)


@pytest.mark.parametrize("storage", KEEP_STRINGS)
def test_a_leaf_that_is_none_in_all_rows_is_left_out(storage: type) -> None:
    replay_buffer = buffer_of(TensorDict({"x": torch.arange(3), "none": None, "s": ["a", None, "c"]}, [3]), storage)
    assert all(set(row) == {"x", "s"} for row in TorchRLBufferDataset(replay_buffer, 8))
    assert TorchRLBufferDataset(replay_buffer, 8).as_hf_dataset().column_names == ["x", "s"]
    assert TorchRLBufferDataset(replay_buffer, 8).as_hf_dataset(streaming=False)[:] == {
        "x": [0, 1, 2],
        "s": ["a", None, "c"],
    }


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_conversations_of_different_lengths(storage: type) -> None:
    chats = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        [{"role": "user", "content": "weather?"}],
        [{"role": role, "content": str(i)} for i, role in enumerate(["system", *["user", "assistant"] * 3])],
    ]
    replay_buffer = ReplayBuffer(storage=storage(10))
    for i, chat in enumerate(chats):
        row = {
            "chat": History.from_chats([chat]),
            "plain": NonTensorData(chat, batch_size=[1]),
            "id": torch.tensor([i]),
        }
        replay_buffer.extend(TensorDict(row, [1]))
    for row in TorchRLBufferDataset(replay_buffer, 20):
        assert row["chat"] == row["plain"] == chats[row["id"]]


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_tool_calls_and_replies_are_kept(storage: type) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    chat = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    replay_buffer = ReplayBuffer(storage=storage(4))
    replay_buffer.extend(TensorDict({"chat": History.from_chats([chat])}, [1]))
    replay_buffer.extend(TensorDict({"chat": History.from_chats([chat[:1]])}, [1]))
    rows = [row["chat"] for row in TorchRLBufferDataset(replay_buffer, 12)]
    assert all(row in (chat, chat[:1]) for row in rows)
    assert chat in rows
    next(row for row in rows if row == chat)[1]["tool_calls"][0]["function"]["arguments"]["b"].append(9)
    assert call["function"]["arguments"] == {"a": 1, "b": [2]}


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_rows_padded_to_two_widths_in_one_batch(storage: type) -> None:
    replay_buffer = ReplayBuffer(storage=storage(10))
    for width in (3, 5):
        replay_buffer.extend(TensorDict({"tokens": torch.full((2, width), width)}, [2]))
    rows = list(TorchRLBufferDataset(replay_buffer, 20))
    assert {len(row["tokens"]) for row in rows} == {3, 5}
    assert all((row["tokens"] == len(row["tokens"])).all() for row in rows)


# Other shapes of buffer


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_storages_of_two_dimensions(storage: type) -> None:
    replay_buffer = ReplayBuffer(storage=storage(20, ndim=2))
    replay_buffer.extend(TensorDict({"x": torch.arange(12).view(4, 3), "y": {"z": torch.randn(4, 3, 2)}}, [4, 3]))
    rows = list(TorchRLBufferDataset(replay_buffer, 30))
    assert {row["x"].item() for row in rows} <= set(range(12))
    assert all(row["y.z"].shape == (2,) for row in rows)


@pytest.mark.parametrize("storage", STORAGES)
def test_plain_tensors(storage: type) -> None:
    if storage is LazyStackStorage:
        pytest.skip("TorchRL's LazyStackStorage takes tensordicts only")
    rows = list(TorchRLBufferDataset(buffer_of(torch.arange(6).view(3, 2), storage), 8))
    assert len(rows) == 8
    assert all(list(row) == ["value"] and row["value"].tolist() in ([0, 1], [2, 3], [4, 5]) for row in rows)


def test_objects_without_keys() -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda rows: rows)
    replay_buffer.extend(["a", "b"])
    assert {row["value"] for row in TorchRLBufferDataset(replay_buffer, 20)} == {"a", "b"}


def test_pytrees() -> None:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    replay_buffer.extend({"a": torch.arange(3), "b": {"c": (torch.zeros(3, 2), torch.ones(3))}})
    row = next(iter(TorchRLBufferDataset(replay_buffer, 2)))
    assert sorted(row) == ["a", "b.c.0", "b.c.1"]


def test_tensordict_buffers_give_the_index() -> None:
    replay_buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    replay_buffer.extend(TensorDict({"x": torch.arange(10) * 10}, [10]))
    assert all(row["x"] == 10 * row["index"] for row in TorchRLBufferDataset(replay_buffer, 20))


def test_ensembles_give_single_rows() -> None:
    parts = [buffer_of(TensorDict({"x": torch.arange(5) + 100 * i, f"only{i}": torch.ones(5)}, [5])) for i in range(2)]
    rows = list(TorchRLBufferDataset(ReplayBufferEnsemble(*parts, batch_size=8), 8))
    assert len(rows) == 8
    for row in rows:
        of_second = row["x"] >= 100
        assert row["index.buffer_ids"] == of_second
        assert (row["only0"] is None) == of_second
        assert (row["only1"] is None) != of_second


@pytest.mark.parametrize("steps", [[2, 3], [2, 2]])
def test_rows_of_several_steps(steps: list[int]) -> None:
    trajectories = [
        lazy_stack([TensorDict({"tokens": torch.arange(n + t), "text": f"{n}/{t}"}) for t in range(n)]) for n in steps
    ]
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    for trajectory in trajectories:
        replay_buffer.add(trajectory)
    for row in TorchRLBufferDataset(replay_buffer, 6):
        n = len(row["text"])
        assert row["text"] == [f"{n}/{t}" for t in range(n)]
        assert [len(tokens) for tokens in row["tokens"]] == [n + t for t in range(n)]


# Keys


def keyed() -> ReplayBuffer:
    data = {"a": torch.arange(4), "nested": {"b": torch.ones(4), "deep": {"c": NonTensorStack(*"wxyz")}}}
    return buffer_of(TensorDict(data, [4]))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ([("nested", "b"), "a"], ["nested.b", "a"]),
        ([["nested", "deep", "c"]], ["nested.deep.c"]),
        (["nested.deep.c"], ["nested.deep.c"]),
        (["nested"], ["nested.b", "nested.deep.c"]),
        ([("nested", "deep"), "a", "a"], ["nested.deep.c", "a"]),
    ],
)
def test_keys(storage: type, keys: Any, names: list[str]) -> None:
    replay_buffer = buffer_of(keyed()[:], storage)
    assert list(next(iter(TorchRLBufferDataset(replay_buffer, 2, keys=keys)))) == names


def test_a_missing_key_is_named_with_the_close_ones_first() -> None:
    with pytest.raises(KeyError, match=r"'nested\.bb' holds nothing.* Did you mean 'nested\.b'\?.*\['nested\.b'"):
        next(iter(TorchRLBufferDataset(keyed(), 2, keys=[("nested", "bb")])))


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_a_key_that_few_rows_hold_is_none_in_the_others(storage: type) -> None:
    replay_buffer = ReplayBuffer(storage=storage(100))
    for i in range(60):
        replay_buffer.add(TensorDict({"a": torch.tensor(i), **({"rare": "x"} if i == 59 else {})}))
    rows = list(TorchRLBufferDataset(replay_buffer, 4, keys=["a", "rare"], num_batches=40, seed=0))
    assert all(row["rare"] == ("x" if row["a"] == 59 else None) for row in rows)


def test_leaves_that_flatten_to_one_name() -> None:
    replay_buffer = buffer_of(TensorDict({"a.b": torch.zeros(3), "a": {"b": torch.ones(3)}}, [3]))
    with pytest.raises(ValueError, match=r"\('a\.b',\) and \('a', 'b'\).*'a\.b'"):
        next(iter(TorchRLBufferDataset(replay_buffer, 2)))
    assert next(iter(TorchRLBufferDataset(replay_buffer, 2, keys=[("a", "b")]))) == {"a.b": torch.tensor(1.0)}
    assert next(iter(TorchRLBufferDataset(replay_buffer, 2, keys=["a.b"]))) == {"a.b": torch.tensor(0.0)}


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_rows_that_differ_in_their_keys(storage: type) -> None:
    replay_buffer = ReplayBuffer(storage=storage(10))
    replay_buffer.add(TensorDict({"a": torch.tensor(1), "n": {"x": torch.tensor(2)}}))
    replay_buffer.add(TensorDict({"a": torch.tensor(1), "s": "text"}))
    rows = list(TorchRLBufferDataset(replay_buffer, 40))
    assert {tuple(sorted(row)) for row in rows} == {("a", "n.x", "s")}
    assert all((row["s"] is None) != (row["n.x"] is None) for row in rows)


ROWS_OF_TWO_DTYPES = [
    TensorDict({"id": torch.tensor(2**53 + 1), "n": {"yes": torch.tensor(True)}}),
    TensorDict({"id": torch.tensor(0.5), "n": {"yes": torch.tensor(3)}}),
]


class AddsKey(Transform):  # type: ignore[misc]
    """Writes to the batch that it is given."""

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("added", torch.zeros(tensordict.shape[0]))


@pytest.mark.parametrize(
    "make",
    [
        ReplayBuffer,
        TensorDictReplayBuffer,
        lambda storage: ReplayBuffer(storage=storage, prefetch=2, batch_size=2),
        lambda storage: ReplayBuffer(storage=storage, transform=AddsKey([])),
        lambda storage: ReplayBufferEnsemble(
            ReplayBuffer(storage=storage), ReplayBuffer(storage=LazyStackStorage(2)), p=[0.99, 0.01], batch_size=2
        ),
    ],
    ids=["plain", "tensordict", "prefetching", "transformed", "ensemble"],
)
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("seed", [None, 0])
def test_rows_of_several_dtypes_keep_their_values(storage: type, make: Any, seed: int | None) -> None:
    replay_buffer = make(storage=storage(2))
    for buffer in getattr(replay_buffer, "_rbs", [replay_buffer]):
        for row in ROWS_OF_TWO_DTYPES:
            buffer.add(row.clone())
    dataset = TorchRLBufferDataset(replay_buffer, 2, keys=["id", ("n", "yes")], num_batches=10, seed=seed)
    stored = {(2**53 + 1, True), (0.5, 3)}
    rows = list(dataset)
    assert {(row["id"].item(), row["n.yes"].item()) for row in rows} == stored
    assert {row["id"].dtype for row in rows} == {torch.int64, torch.float32}
    if hasattr(datasets, "Json"):
        assert {(row["id"], row["n.yes"]) for row in dataset.as_hf_dataset()} == stored
        snapshot = dataset.as_hf_dataset(streaming=False)[:]
        assert set(zip(snapshot["id"], snapshot["n.yes"], strict=True)) == stored
    else:
        with pytest.raises(TypeError, match=r"column 'id'.*several dtypes"):
            dataset.as_hf_dataset(streaming=False)


@pytest.mark.parametrize("make", [lambda **parts: ReplayBuffer(transform=AddsKey([]), **parts), TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("seed", [None, 0])
def test_what_is_drawn_here_leaves_the_buffer_as_it_was(storage: type, make: Any, seed: int | None) -> None:
    replay_buffer = make(storage=storage(2), batch_size=2)
    for row in ROWS_OF_TWO_DTYPES:
        replay_buffer.add(row.clone())
    before, keys = dict(vars(replay_buffer)), [set(row.keys()) for row in replay_buffer.storage._storage]
    dataset = TorchRLBufferDataset(replay_buffer, 2, num_batches=3, seed=seed)
    assert {"added", "index"} & set(next(iter(dataset)))
    if hasattr(datasets, "Json"):
        assert len(dataset.as_hf_dataset(streaming=False)) == 2
    assert vars(replay_buffer) == before
    assert [set(row.keys()) for row in replay_buffer.storage._storage] == keys


@pytest.mark.parametrize("rows", [[torch.tensor(1), torch.tensor(0.5)], [(torch.tensor(1),), (torch.tensor(0.5),)]])
def test_rows_of_several_dtypes_without_keys_are_refused(rows: list[Any]) -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(2), sampler=SamplerWithoutReplacement())
    for row in rows:
        replay_buffer.add(row)
    with pytest.raises(ValueError, match=r"\['torch.float32', 'torch.int64'\].*values change"):
        list(TorchRLBufferDataset(replay_buffer, 2))


def test_a_row_has_every_column_that_the_stream_had_before() -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(1))
    replay_buffer.add(TensorDict({"a": torch.tensor(1), "b": "x"}))
    rows = iter(TorchRLBufferDataset(replay_buffer, 1, num_batches=2))
    assert next(rows)["b"] == "x"
    replay_buffer.add(TensorDict({"a": torch.tensor(2)}))
    assert next(rows) == {"a": torch.tensor(2), "b": None}


def test_a_key_of_two_kinds_is_named() -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(4), sampler=SamplerWithoutReplacement(shuffle=False))
    replay_buffer.add(TensorDict({"a": torch.tensor(1)}))
    replay_buffer.add(TensorDict({"a": {"b": torch.tensor(1)}}))
    with pytest.raises(ValueError, match="'a' holds a tensordict in some rows"):
        next(iter(TorchRLBufferDataset(replay_buffer, 2)))


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_conversations_without_keys(storage: type) -> None:
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ("ab", "cd")]
    replay_buffer = ReplayBuffer(storage=storage(4), sampler=SamplerWithoutReplacement(shuffle=False))
    replay_buffer.extend(History.from_chats(chats))
    assert list(TorchRLBufferDataset(replay_buffer, 2)) == [{"value": chat} for chat in chats]


def test_a_turn_that_stands_alone_is_a_conversation() -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(2))
    replay_buffer.add(TensorDict({"turn": History(role="user", content="a")}))
    assert next(iter(TorchRLBufferDataset(replay_buffer, 1)))["turn"] == [{"role": "user", "content": "a"}]


# What TorchRL lost


def test_strings_in_a_memory_mapped_storage_are_refused() -> None:
    replay_buffer = buffer_of(TensorDict({"s": NonTensorStack("a", "b"), "x": torch.arange(2)}, [2]), LazyMemmapStorage)
    with pytest.raises(ValueError, match=r"\['s'\].*LazyMemmapStorage.*LazyStackStorage"):
        next(iter(TorchRLBufferDataset(replay_buffer, 2)))
    assert list(next(iter(TorchRLBufferDataset(replay_buffer, 2, keys=["x"])))) == ["x"]


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_a_column_stored_whole_is_refused(storage: type) -> None:
    for items in (["a", "b", "c"], [["a"], ["b", "c"], []], [1.5, 2.5, None]):
        column = NonTensorData(items, batch_size=[3])
        replay_buffer = buffer_of(TensorDict({"s": column, "x": torch.arange(3)}, [3]), storage)
        with pytest.raises(ValueError, match=r"column 's' holds the whole column.*NonTensorStack"):
            next(iter(TorchRLBufferDataset(replay_buffer, 8)))


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_equal_lists_of_as_many_items_as_there_are_rows_are_kept(storage: type) -> None:
    rows = [TensorDict({"choices": NonTensorData(["a", "b", "c"]), "x": torch.tensor(i)}) for i in range(3)]
    replay_buffer = buffer_of(lazy_stack(rows), storage)
    assert [row["choices"] for row in TorchRLBufferDataset(replay_buffer, 8)] == [["a", "b", "c"]] * 8


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_a_list_meant_for_all_rows_is_kept(storage: type) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "mul", "div")]
    replay_buffer = buffer_of(TensorDict({"tools": NonTensorData(tools, batch_size=[3])}, [3]), storage)
    assert all(row["tools"] == tools for row in TorchRLBufferDataset(replay_buffer, 8))


def test_a_tuple_meant_for_all_rows_is_kept() -> None:
    replay_buffer = buffer_of(TensorDict({"stop": NonTensorData(("a", "b"), batch_size=[2])}, [2]), LazyStackStorage)
    assert all(row["stop"] == ["a", "b"] for row in TorchRLBufferDataset(replay_buffer, 8))


def test_telling_a_column_stored_whole_reads_each_row_once() -> None:
    # 5,000 rows that hold 5,000 items each: comparing them would take 25 million looks.
    column = NonTensorData([str(i) for i in range(5000)], batch_size=[5000])
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(5000))
    replay_buffer.extend(TensorDict({"s": column}, [5000]))
    with pytest.raises(ValueError, match="holds the whole column"):
        next(iter(TorchRLBufferDataset(replay_buffer, 8)))


def test_metadata_comes_as_its_value() -> None:
    rows = lazy_stack([TensorDict({"padded": MetaData(False), "x": torch.tensor(i)}) for i in range(3)])
    assert all(row["padded"] is False for row in TorchRLBufferDataset(buffer_of(rows, LazyStackStorage), 4))
    dense = TensorDict({"padded": MetaData(False), "x": torch.arange(3)}, [3])
    assert all(row["padded"] is False for row in TorchRLBufferDataset(buffer_of(dense, LazyMemmapStorage), 4))


# Rows are the consumer's


@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_done_to_a_row_does_not_reach_the_buffer(storage: type) -> None:
    data: dict[str, Any] = {"x": torch.arange(6.0).view(3, 2), "n": {"y": torch.zeros(3)}}
    if storage in KEEP_STRINGS:
        data["messages"] = NonTensorStack(*[NonTensorData([{"role": "user", "content": "hi"}]) for _ in range(3)])
        data["info"] = NonTensorStack(*[NonTensorData({"tags": ["t"]}) for _ in range(3)])
    replay_buffer = buffer_of(TensorDict(data, [3]), storage)
    dataset = TorchRLBufferDataset(replay_buffer, 8, seed=0)
    before = copy.deepcopy(list(dataset))
    for row in dataset:
        row["x"].add_(100)
        row["n.y"].add_(100)
        if "messages" in row:
            row["messages"].append({"role": "assistant", "content": "no"})
            row["messages"][0]["content"] = "changed"
            row["info"]["tags"].append("u")
    after = list(dataset)
    for left, right in zip(before, after, strict=True):
        assert torch.equal(left["x"], right["x"])
        assert torch.equal(left["n.y"], right["n.y"])
        assert left.get("messages") == right.get("messages")
        assert str(left.get("info")) == str(right.get("info"))


def test_editing_collected_rows_does_not_reach_the_buffer(collected: ReplayBuffer) -> None:
    dataset = TorchRLBufferDataset(collected, 16, seed=0)
    before = [(row["tokens.full"].tolist(), row.get("history.full")) for row in dataset]
    for row in dataset:
        row["tokens.full"].zero_()
        if "history.full" in row:
            row["history.full"].append({"role": "user", "content": "more"})
    assert [(row["tokens.full"].tolist(), row.get("history.full")) for row in dataset] == before


def test_a_collate_fn_that_gives_the_stored_row() -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(1), collate_fn=lambda rows: rows[0].unsqueeze(0))
    replay_buffer.add(TensorDict({"x": torch.zeros(2)}))
    for dataset in (TorchRLBufferDataset(replay_buffer, 1), TorchRLBufferDataset(replay_buffer, 1).as_hf_dataset()):
        for row in dataset:
            row["x"].add_(1)
    assert torch.equal(replay_buffer.storage._storage[0]["x"], torch.zeros(2))


def test_rows_of_one_batch_share_nothing() -> None:
    expanded = TensorDict({"x": torch.zeros(1).expand(3, 1)}, [3])
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(3), transform=lambda batch: expanded)
    replay_buffer.extend(TensorDict({"x": torch.arange(3.0)[:, None]}, [3]))
    rows = list(TorchRLBufferDataset(replay_buffer, 3))
    rows[0]["x"].add_(1)
    assert rows[1]["x"].item() == 0


def test_values_without_a_plain_form() -> None:
    import numpy as np

    objects = np.array([{"x": 1}, None], dtype=object)
    value = {"t": (1, 2), "n": np.int64(3), "a": np.arange(2), "td": TensorDict({"x": torch.ones(1)})}
    value |= {"s": np.array(["x", "y"]), "o": objects}
    replay_buffer = ReplayBuffer(storage=ListStorage(2))
    replay_buffer.add(TensorDict({"v": NonTensorData(value)}))
    row = next(iter(TorchRLBufferDataset(replay_buffer, 1)))["v"]
    assert row["t"] == [1, 2]
    assert type(row["n"]) is int
    assert torch.equal(row["a"], torch.arange(2))
    assert type(row["td"]) is dict
    assert row["s"] == ["x", "y"]
    assert row["o"] == [{"x": 1}, None]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_a_nested_tensor_in_a_row_is_named(storage: type, layout: torch.layout) -> None:
    replay_buffer = ReplayBuffer(storage=storage(2))
    for n in (2, 3):
        parts = torch.nested.nested_tensor([torch.arange(n), torch.arange(1)], layout=layout)
        replay_buffer.add(TensorDict({"parts": parts, "x": torch.tensor(n)}))
    dataset = TorchRLBufferDataset(replay_buffer, 2)
    for use in (list, lambda rows: list(rows.as_hf_dataset()), lambda rows: rows.as_hf_dataset(streaming=False)):
        with pytest.raises(TypeError, match=r"column 'parts'.*nested tensors"):
            use(dataset)
    assert len(list(TorchRLBufferDataset(replay_buffer, 2, keys=["x"]))) == 2


def test_an_object_that_cannot_be_copied_is_named() -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(2))
    replay_buffer.add(TensorDict({"v": NonTensorData(threading.Lock()), "x": torch.tensor(1)}))
    with pytest.raises(TypeError, match=r"column 'v' holds a lock that cannot be copied.*keys=\["):
        next(iter(TorchRLBufferDataset(replay_buffer, 1)))
    assert next(iter(TorchRLBufferDataset(replay_buffer, 1, keys=["x"])))["x"] == 1


# Empty buffers


def test_batches_without_rows_are_no_endless_wait() -> None:
    replay_buffer = buffer_of(TensorDict({"x": torch.arange(3)}, [3]), transform=lambda batch: batch[:0])
    with pytest.raises(RuntimeError, match="holds no rows: has its transform dropped them"):
        next(iter(TorchRLBufferDataset(replay_buffer, 2, num_batches=None, timeout=1)))


@needs("can_sample")
def test_the_samplers_own_reason_is_given() -> None:
    replay_buffer = buffer_of(
        TensorDict({"x": torch.arange(6)}, [6]), sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4
    )
    with pytest.raises(RuntimeError, match=r"cannot draw a batch of 10.*ValueError: .*\(10\) is greater"):
        next(iter(TorchRLBufferDataset(replay_buffer, 10)))


def test_an_empty_buffer_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"replay buffer \(ReplayBuffer\) is empty.*timeout="):
        next(iter(TorchRLBufferDataset(ReplayBuffer(storage=ListStorage(3)), 2)))


def test_an_ensemble_with_an_empty_member_is_named() -> None:
    empty = ReplayBuffer(storage=LazyTensorStorage(3))
    ensemble = ReplayBufferEnsemble(empty, ReplayBuffer(storage=LazyTensorStorage(3)), batch_size=2)
    with pytest.raises(RuntimeError, match=r"\(ReplayBufferEnsemble\) is empty"):
        next(iter(TorchRLBufferDataset(ensemble, 2)))


def test_a_timeout_says_what_it_waited_for() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for rows: the replay buffer .* is empty"):
        next(iter(TorchRLBufferDataset(ReplayBuffer(storage=ListStorage(3)), 2, timeout=0.1)))
    assert time.monotonic() - start < 5


def test_a_timeout_waits_for_rows() -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(3))
    filler = threading.Timer(0.2, replay_buffer.extend, [TensorDict({"x": torch.arange(3)}, [3])])
    filler.start()
    try:
        assert len(list(TorchRLBufferDataset(replay_buffer, 2, timeout=30))) == 2
    finally:
        filler.join()


@needs("ConsumingSampler")
def test_a_buffer_whose_rows_are_consumed_is_named() -> None:
    replay_buffer = buffer_of(TensorDict({"x": torch.arange(4)}, [4]), sampler=ConsumingSampler())
    with pytest.raises(RuntimeError, match=r"is empty|cannot draw a batch of 4"):
        list(TorchRLBufferDataset(replay_buffer, 4, num_batches=2))


# Devices


def test_one_transfer_for_each_batch_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [TensorDict({"t": torch.arange(n), "m": torch.ones(n), "s": "x"}) for n in (2, 3, 4)]
    replay_buffer = buffer_of(lazy_stack(rows), LazyStackStorage)
    moves = []
    to = torch.Tensor.to

    def counting(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moves.append(args or kwargs)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counting)
    rows = list(TorchRLBufferDataset(replay_buffer, 32, device="meta", num_batches=2))
    assert {row["t"].device.type for row in rows} == {"meta"}
    assert all(row["s"] == "x" for row in rows)
    assert len(moves) == 2 * 2


# Seeds


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement])
def test_a_seed_fixes_the_rows(storage: type, sampler: type | None) -> None:
    data = TensorDict({"x": torch.arange(50)}, [50])
    replay_buffer = buffer_of(data, storage, **({"sampler": sampler()} if sampler else {}))

    def draw(seed: int, epoch: int = 0) -> list[int]:
        dataset = TorchRLBufferDataset(replay_buffer, 7, num_batches=3, seed=seed)
        dataset.set_epoch(epoch)
        return [row["x"].item() for row in dataset]

    first = draw(1)
    torch.manual_seed(5)
    replay_buffer.sample(3)  # the buffer's own place in a pass is of no matter
    assert draw(1) == first
    assert draw(2) != first
    assert draw(1, epoch=1) != first
    assert draw(1, epoch=1) == draw(1, epoch=1)
    if sampler is not None:
        assert len(set(first)) == 21, "a pass without replacement"


@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement])
def test_a_seed_leaves_all_generators_alone(sampler: type | None) -> None:
    import random

    import numpy as np

    data = TensorDict({"x": torch.arange(50)}, [50])
    kwargs = {"sampler": sampler()} if sampler else {}

    def draws_after(seeded: bool) -> list[list[int]]:
        replay_buffer = buffer_of(data, generator=torch.Generator().manual_seed(3), **kwargs)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        replay_buffer.sample(3)
        if seeded:
            list(TorchRLBufferDataset(replay_buffer, 7, num_batches=3, seed=1))
        return [
            replay_buffer.sample(5)["x"].tolist(),
            torch.rand(2).tolist(),
            [random.random()],
            np.random.rand(2).tolist(),
        ]

    if sampler is not None:
        kwargs = {"sampler": sampler()}
    expected = draws_after(False)
    kwargs = {"sampler": sampler()} if sampler else {}
    assert draws_after(True) == expected


@needs("StalenessAwareSampler")
def test_a_seed_reaches_samplers_that_use_the_global_generator() -> None:
    replay_buffer = buffer_of(
        TensorDict({"x": torch.arange(50), "policy_version": torch.zeros(50)}, [50]), sampler=StalenessAwareSampler()
    )

    def draw() -> list[int]:
        return [row["x"].item() for row in TorchRLBufferDataset(replay_buffer, 7, num_batches=3, seed=1)]

    first = draw()
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    assert draw() == first
    assert torch.equal(torch.rand(2), expected)


def test_a_seeded_stream_beside_a_prefetching_thread() -> None:
    replay_buffer = buffer_of(TensorDict({"x": torch.arange(50)}, [50]), prefetch=3, batch_size=4)
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            replay_buffer.sample()

    other = threading.Thread(target=sample)
    other.start()
    try:
        first = [row["x"].item() for row in TorchRLBufferDataset(replay_buffer, 4, num_batches=50, seed=1)]
        assert [row["x"].item() for row in TorchRLBufferDataset(replay_buffer, 4, num_batches=50, seed=1)] == first
    finally:
        stop.set()
        other.join(30)
    assert not other.is_alive()


def test_a_seeded_ensemble() -> None:
    parts = [
        buffer_of(TensorDict({"x": torch.arange(50) + 100 * i}, [50]), generator=torch.Generator().manual_seed(i))
        for i in range(2)
    ]
    ensemble = ReplayBufferEnsemble(*parts, batch_size=8)
    generators = [part._rng for part in parts] + [part.storage._rng for part in parts]
    first = [row["x"].item() for row in TorchRLBufferDataset(ensemble, 8, seed=1)]
    assert [row["x"].item() for row in TorchRLBufferDataset(ensemble, 8, seed=1)] == first
    assert [part._rng for part in parts] + [part.storage._rng for part in parts] == generators


def test_a_seeded_stream_from_a_prefetching_buffer() -> None:
    replay_buffer = buffer_of(TensorDict({"x": torch.arange(50)}, [50]), prefetch=2, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = [row["x"].item() for row in TorchRLBufferDataset(replay_buffer, 4, num_batches=3, seed=1)]
    replay_buffer.sample()
    assert [row["x"].item() for row in TorchRLBufferDataset(replay_buffer, 4, num_batches=3, seed=1)] == first


# Rows that a consume-once sampler would lose


def consuming(sampler: Any, rows: int = 12) -> ReplayBuffer:
    return buffer_of(TensorDict({"x": torch.arange(rows)}, [rows]), sampler=sampler)


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, sampler_param("ConsumingSampler")])
def test_single_rows_lose_no_others(sampler: type) -> None:
    dataset = TorchRLBufferDataset(consuming(sampler()), 4, num_batches=2)
    taken = [next(iter(dataset))["x"].item() for _ in range(3)]
    assert len(set(taken)) == 3, "each iteration goes on"
    assert sorted(taken + [row["x"].item() for row in dataset]) == sorted(range(12))


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, sampler_param("ConsumingSampler")])
def test_the_rest_of_a_batch_is_not_lost(sampler: type) -> None:
    dataset = TorchRLBufferDataset(consuming(sampler()), 4, num_batches=None)
    used = []
    for row in dataset:
        used.append(row["x"].item())
        if len(used) == 6:
            break
    del row
    for row in dataset:
        used.append(row["x"].item())
        if len(used) == 12:
            break
    assert sorted(used) == list(range(12))


@needs("ConsumingSampler")
def test_two_iterators_dropped_at_once_lose_no_row() -> None:
    dataset = TorchRLBufferDataset(consuming(ConsumingSampler()), 4, num_batches=None)
    first, second = iter(dataset), iter(dataset)
    used = [next(rows)["x"].item() for rows in (first, second, first, second)]
    del first, second
    for _ in range(3):
        rows = iter(dataset)
        used += [next(rows)["x"].item() for _ in range(2)]
        del rows
    assert len(set(used)) == len(used) == 10


def test_a_look_at_an_edited_row() -> None:
    dataset = TorchRLBufferDataset(consuming(SamplerWithoutReplacement(shuffle=False)), 4, num_batches=3)
    stream = dataset.as_hf_dataset().map(lambda row: {"x": row["x"]})
    next(iter(stream))
    rows = dataset.stream.rows(epoch=0, share=Share(), keeps_looks=True)
    next(rows)["x"].fill_(99)
    rows.close()
    assert [row["x"] for row in stream] == list(range(12))


# Live, and across processes


def test_rows_added_later_are_seen_within_an_iteration() -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(1))
    replay_buffer.add(TensorDict({"x": torch.tensor(1)}))
    rows = iter(TorchRLBufferDataset(replay_buffer, 1, num_batches=None))
    assert next(rows)["x"] == 1
    replay_buffer.add(TensorDict({"x": torch.tensor(2)}))
    assert next(rows)["x"] == 2


def test_a_pickled_dataset_takes_no_drawn_rows_along() -> None:
    dataset = TorchRLBufferDataset(consuming(SamplerWithoutReplacement(shuffle=False)), 4, num_batches=3)
    next(iter(dataset))
    clone = pickle.loads(pickle.dumps(dataset))
    assert not clone.stream._unused
    assert len(list(clone)) == 12


def test_two_iterators_at_once() -> None:
    replay_buffer = consuming(SamplerWithoutReplacement())
    dataset = TorchRLBufferDataset(replay_buffer, 2, num_batches=3)
    pairs = list(zip(dataset, dataset, strict=True))
    assert sorted(row["x"].item() for pair in pairs for row in pair) == list(range(12))
