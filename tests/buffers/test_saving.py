"""A replay buffer to and from a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, MetaData, NonTensorData, NonTensorStack, TensorDict, lazy_stack
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

from tests.features import sampler_param
from torchrl_trl_bridge import TorchRLBufferDataset, load_buffer, save_buffer
from torchrl_trl_bridge.buffers import saving

LISTS = [ListStorage, LazyStackStorage]
TENSORS = [LazyTensorStorage, LazyMemmapStorage]


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same, with their classes, dtypes, shapes, and the order of their keys."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, LazyStackedTensorDict):
        return left.stack_dim == right.stack_dim and same(left.tensordicts, right.tensordicts)
    if isinstance(left, TensorDict):
        same_frame = left.batch_size == right.batch_size and left.names == right.names and left.device == right.device
        return same_frame and same(dict(left.items()), dict(right.items()))
    if hasattr(left, "_non_tensordict"):
        return same(left._tensordict, right._tensordict) and same(left._non_tensordict, right._non_tensordict)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return left == right or (left != left and right != right)


def restored(replay_buffer: ReplayBuffer, folder: Path, **kwargs: Any) -> ReplayBuffer:
    """The buffer saved and loaded into one like it."""
    save_buffer(replay_buffer, folder)
    other = ReplayBuffer(storage=type(replay_buffer.storage)(replay_buffer.storage.max_size), **kwargs)
    load_buffer(other, folder)
    return other


def chats() -> list[History]:
    return [
        History.from_chats([[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]])[0],
        History.from_chats([[{"role": "user", "content": "2+2?"}, {
            "role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 2.0}}]}]])[0],
        History.from_chats([[{"role": "user", "content": None}]])[0],
    ]  # fmt: skip


# Rows


def test_collected_rows_come_back_the_same(collected: ReplayBuffer, tmp_path: Path) -> None:
    other = restored(collected, tmp_path)
    assert len(other) == len(collected) == 12
    for mine, theirs in zip(collected.storage._storage, other.storage._storage, strict=True):
        assert same(mine, theirs)
        assert type(mine["tokens"]) is type(theirs["tokens"])


@pytest.mark.parametrize("storage", LISTS)
def test_rows_of_every_kind(storage: type, tmp_path: Path) -> None:
    rows = [
        TensorDict({"tokens": {"full": torch.arange(3)}, "text": "a", "chat": chats()[0]}),
        TensorDict({"tokens": {"full": torch.arange(5)}, "text": "ü\n\"'", "chat": chats()[1]}),
        TensorDict({"tokens": {"full": torch.arange(0)}, "text": "", "chat": chats()[2]}),
        TensorDict({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor(True), "c": torch.ones(2).cfloat()}),
        TensorDict({"b": torch.tensor(1, dtype=torch.uint8), "a": NonTensorData([1, 2.5, None, {"x": [True]}])}),
        TensorDict({"m": MetaData({"k": "v"}), "s": NonTensorStack("a", "b")}, [2], names=["turn"]),
        TensorDict({"o": NonTensorData({"t": (1, "2"), 3: b"4", "n": np.float32(5), "a": np.arange(2), "s": {6}})}),
        TensorDict({"o": NonTensorData([float("nan"), float("-inf"), torch.ones(1), torch.float16])}),
        lazy_stack([TensorDict({"x": torch.arange(n), "s": str(n)}) for n in (1, 2)]),
        TensorDict({}, [4, 2]),
        TensorDict({"x": torch.zeros(0, 3)}),
    ]
    replay_buffer = ReplayBuffer(storage=storage(20))
    for row in rows:
        replay_buffer.add(row)
    other = restored(replay_buffer, tmp_path)
    for mine, theirs in zip(replay_buffer.storage._storage, other.storage._storage, strict=True):
        assert same(mine, theirs), (mine, theirs)


@pytest.mark.parametrize("storage", LISTS)
def test_rows_own_their_memory(storage: type, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=storage(20))
    for n in range(1, 9):
        replay_buffer.add(TensorDict({"x": torch.arange(n), "y": torch.tensor(n)}))
    for row in restored(replay_buffer, tmp_path).storage._storage:
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in row.values())


def test_objects_without_keys(tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=lambda rows: rows)
    replay_buffer.extend(["a", torch.arange(2), {"b": [1]}])
    assert same(restored(replay_buffer, tmp_path).storage._storage, ["a", torch.arange(2), {"b": [1]}])


@pytest.mark.parametrize("storage", TENSORS)
@pytest.mark.parametrize("rows", [3, 9])
def test_tensor_storages(storage: type, rows: int, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=storage(5))
    for start in range(0, rows, 3):
        data = {"x": torch.arange(start, start + 3), "n": {"h": torch.rand(3, 2).bfloat16()}, "m": MetaData("v")}
        if storage is LazyTensorStorage:
            data["s"] = NonTensorStack(*"abc")
        replay_buffer.extend(TensorDict(data, [3]))
    other = restored(replay_buffer, tmp_path)
    assert same(replay_buffer[:].to_dict(), other[:].to_dict())
    for buffer in (replay_buffer, other):
        buffer.add(TensorDict(data, [3])[0])
    assert same(replay_buffer[:]["x"], other[:]["x"]), "written at the same place"


@pytest.mark.parametrize("storage", TENSORS)
def test_storages_of_two_dimensions(storage: type, tmp_path: Path) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=storage(20, ndim=2))

    replay_buffer, other = make(), make()
    replay_buffer.extend(TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
    save_buffer(replay_buffer, tmp_path)
    load_buffer(other, tmp_path)
    assert len(other) == 12
    assert torch.equal(other[:]["x"], replay_buffer[:]["x"])


def test_pytrees_and_plain_tensors(tmp_path: Path) -> None:
    for name, data in {
        "tensor": torch.arange(6).view(3, 2),
        "tree": {"a": torch.arange(3), "b": (torch.ones(3),)},
    }.items():
        replay_buffer = ReplayBuffer(storage=LazyTensorStorage(5))
        replay_buffer.extend(data)
        assert same(restored(replay_buffer, tmp_path / name)[:], replay_buffer[:])


def test_ensembles(tmp_path: Path) -> None:
    def make() -> ReplayBufferEnsemble:
        parts = [ReplayBuffer(storage=LazyTensorStorage(9)), ReplayBuffer(storage=LazyStackStorage(9))]
        return ReplayBufferEnsemble(*parts, batch_size=4)

    ensemble, other = make(), make()
    for i, part in enumerate(ensemble._rbs):
        part.extend(TensorDict({"x": torch.arange(3) + i}, [3]))
    save_buffer(ensemble, tmp_path)
    load_buffer(other, tmp_path)
    assert [part[:]["x"].tolist() for part in other._rbs] == [[0, 1, 2], [1, 2, 3]]


def test_an_empty_buffer(tmp_path: Path) -> None:
    full = ReplayBuffer(storage=LazyStackStorage(5))
    full.add(TensorDict({"x": torch.ones(1)}))
    save_buffer(ReplayBuffer(storage=LazyStackStorage(5)), tmp_path)
    load_buffer(full, tmp_path)
    assert len(full) == 0


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_PLAIN, min_size=1, max_size=5))
def test_any_python_value_comes_back(tmp_path: Path, values: list[Any]) -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(5))
    for value in values:
        replay_buffer.add(TensorDict({"v": NonTensorData(value)}))
    other = restored(replay_buffer, tmp_path)
    assert same([row.get("v").data for row in other.storage._storage], values)


# State


@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement, sampler_param("ConsumingSampler")])
@pytest.mark.parametrize("storage", [*LISTS, LazyTensorStorage])
def test_draws_go_on_as_they_would_have(sampler: type | None, storage: type, tmp_path: Path) -> None:
    def make(seed: int) -> ReplayBuffer:
        kwargs = {"sampler": sampler()} if sampler else {}
        return ReplayBuffer(storage=storage(30), generator=torch.Generator().manual_seed(seed), **kwargs)

    replay_buffer, other = make(1), make(2)
    replay_buffer.extend(TensorDict({"x": torch.arange(20)}, [20]))
    replay_buffer.sample(3)
    save_buffer(replay_buffer, tmp_path)
    load_buffer(other, tmp_path)
    for _ in range(2):
        assert replay_buffer.sample(4)["x"].tolist() == other.sample(4)["x"].tolist()


@pytest.mark.parametrize("storage", LISTS)
def test_rows_are_overwritten_in_order(storage: type, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=storage(4))
    for n in range(6):
        replay_buffer.add(TensorDict({"x": torch.tensor(n)}))
    other = restored(replay_buffer, tmp_path)
    other.add(TensorDict({"x": torch.tensor(6)}))
    assert [int(row["x"]) for row in other.storage._storage] == [4, 5, 6, 3]


def test_the_saved_buffer_is_left_as_it_was(tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(4), generator=torch.Generator().manual_seed(0))
    replay_buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
    before = replay_buffer._rng.get_state()
    save_buffer(replay_buffer, tmp_path)
    assert torch.equal(replay_buffer._rng.get_state(), before)
    assert replay_buffer[:]["x"].tolist() == [0, 1, 2, 3]


# Files


def test_nothing_is_pickled_and_json_says_what_it_is(tmp_path: Path, collect: Callable[..., ReplayBuffer]) -> None:
    save_buffer(collect(), tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    index = json.loads((tmp_path / "buffer.json").read_text())
    assert (index["format"], index["version"]) == ("torchrl-trl-bridge replay buffer", 1)


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(4))
    for n in range(3):
        replay_buffer.add(TensorDict({"x": torch.tensor(n)}))
        save_buffer(replay_buffer, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(restored(replay_buffer, tmp_path)) == 3


_KILLED = """
import sys, torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl_trl_bridge import save_buffer
rb = ReplayBuffer(storage=LazyStackStorage(4000))
for n in range(2000):
    rb.add(TensorDict({"x": torch.full((200,), n), "s": str(n)}))
print("ready", flush=True)
version = 0
while True:
    version += 1
    for row in rb.storage._storage:
        row["version"] = torch.tensor(version)
    save_buffer(rb, sys.argv[1])
    print("saved", flush=True)
"""


def test_a_save_that_is_killed_leaves_the_old_buffer_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _KILLED, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    while "saved" not in process.stdout.readline():
        pass
    # Each time the process is stopped at another point of its saves: what lies there then is what a kill would leave.
    seen = set()
    for stop in range(12):
        time.sleep(0.013 * (stop + 1))
        process.send_signal(signal.SIGSTOP if stop < 11 else signal.SIGKILL)
        other = ReplayBuffer(storage=LazyStackStorage(4000))
        load_buffer(other, folder)
        versions = {int(row["version"]) for row in other.storage._storage}
        assert len(versions) == 1
        assert [row["s"] for row in other.storage._storage] == [str(n) for n in range(2000)]
        seen |= versions
        process.send_signal(signal.SIGCONT)
    assert process.wait(10) == -signal.SIGKILL
    assert len(seen) > 1
    save_buffer(other, folder)
    assert len(list(folder.iterdir())) == 2, "what the killed save left is gone"


# Refusals


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(4))
    save_buffer(replay_buffer, tmp_path)
    index = json.loads((tmp_path / "buffer.json").read_text())
    (tmp_path / "buffer.json").write_text(json.dumps(index | {"version": 2}))
    with pytest.raises(ValueError, match=r"format version 2, of a newer torchrl-trl-bridge.*Upgrade"):
        load_buffer(replay_buffer, tmp_path)


def test_a_folder_without_a_buffer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no buffer\.json"):
        load_buffer(ReplayBuffer(storage=LazyStackStorage(4)), tmp_path)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: ReplayBuffer(storage=LazyTensorStorage(9)), "saved buffer has a LazyStackStorage"),
        (lambda: ReplayBuffer(storage=LazyStackStorage(2)), "holds 3 rows, and this one takes 2"),
        (
            lambda: ReplayBuffer(storage=LazyStackStorage(9), sampler=SamplerWithoutReplacement()),
            "has a RandomSampler, and this one a SamplerWithoutReplacement",
        ),
        (lambda: ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(9)), batch_size=2), "ensemble of 1"),
    ],
)
def test_a_buffer_that_does_not_fit_is_left_alone(other: Callable[[], Any], words: str, tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(9))
    for n in range(3):
        replay_buffer.add(TensorDict({"x": torch.tensor(n)}))
    save_buffer(replay_buffer, tmp_path)
    with pytest.raises(ValueError, match=words):
        load_buffer(other(), tmp_path)


def test_an_object_without_an_open_form_is_named(tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=ListStorage(9))
    replay_buffer.add(TensorDict({"a": {"o": NonTensorData(object())}}))
    with pytest.raises(TypeError, match=r"a\.o.* holds a builtins\.object"):
        save_buffer(replay_buffer, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_strings_that_the_storage_has_lost(tmp_path: Path) -> None:
    replay_buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(9))
    replay_buffer.extend(TensorDict({"s": NonTensorStack("a", "b"), "x": torch.arange(2)}, [2]))
    with pytest.raises(ValueError, match="LazyMemmapStorage"):
        save_buffer(replay_buffer, tmp_path)


@pytest.mark.parametrize("storage", [*LISTS, *TENSORS])
def test_rows_written_during_a_save_are_not_in_it(
    storage: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_buffer = ReplayBuffer(storage=storage(8))
    replay_buffer.extend(TensorDict({"x": torch.zeros(8)}, [8]))
    saved = saving._write

    def write(*args: Any) -> None:
        replay_buffer.extend(TensorDict({"x": torch.ones(8)}, [8]))
        saved(*args)

    monkeypatch.setattr(saving, "_write", write)
    save_buffer(replay_buffer, tmp_path)
    monkeypatch.undo()
    load_buffer(replay_buffer, tmp_path)
    assert replay_buffer[:]["x"].tolist() == [0.0] * 8


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    flat = torch.arange(6)
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(4))
    replay_buffer.add(TensorDict({"parts": NonTensorData([flat[:2], flat[2:], flat])}))
    parts = restored(replay_buffer, tmp_path)[0]["parts"]
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4, 5], list(range(6))]


def test_what_is_no_buffer_or_no_folder_is_named(tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(4))
    (tmp_path / "file").write_text("x")
    for call in (save_buffer, load_buffer):
        with pytest.raises(TypeError, match="replay_buffer must be a torchrl ReplayBuffer instance, got list"):
            call([1], tmp_path / "b")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got TorchRLBufferDataset: pass its replay_buffer"):
            call(TorchRLBufferDataset(replay_buffer, 2), tmp_path / "b")  # type: ignore[arg-type]
        with pytest.raises(NotADirectoryError, match=r"file' is a file, and a buffer is saved in a folder"):
            call(replay_buffer, tmp_path / "file")
