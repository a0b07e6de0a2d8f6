"""Reading batches: every leaf, in order, whatever form the batch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer

from torchrl_trl_bridge import TorchRLBufferDataset
from torchrl_trl_bridge.rollouts import read_columns

NAMES = st.sampled_from(["a", "b", "c", "tokens", "next"])
SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
DTYPES = st.sampled_from([torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8])
TENSOR_SPECS = st.tuples(st.just("tensor"), SHAPES, DTYPES)
# The structure of a row: names to leaf specifications, nested.
STRUCTURES = st.recursive(
    st.dictionaries(NAMES, st.one_of(TENSOR_SPECS, st.just(("string",))), min_size=1, max_size=3),
    lambda inner: st.dictionaries(NAMES, st.one_of(TENSOR_SPECS, st.just(("string",)), inner), min_size=1, max_size=3),
    max_leaves=4,
)


def make_row(structure: dict[str, Any], generator: torch.Generator, grow: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, spec in structure.items():
        if isinstance(spec, dict):
            row[name] = make_row(spec, generator, grow)
        elif spec[0] == "tensor":
            shape = (spec[1][0] + grow, *spec[1][1:]) if spec[1] else ()
            row[name] = torch.randint(0, 2, shape, generator=generator).to(spec[2])
        else:
            row[name] = str(torch.randint(0, 1000, (), generator=generator).item())
    return row


def leaves(row: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in row.items():
        found |= leaves(value, (*path, name)) if isinstance(value, dict) else {(*path, name): value}
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return bool(left == right)


@settings(max_examples=60, deadline=None)
@given(STRUCTURES, st.integers(1, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_leaf_is_kept_with_its_values_in_order(
    structure: dict[str, Any], size: int, ragged: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [make_row(structure, generator, grow=i if ragged else 0) for i in range(size)]
    batches: list[Any] = [lazy_stack([TensorDict(row) for row in rows]), [TensorDict(row) for row in rows]]
    if not ragged:
        batches.append(torch.stack([TensorDict(row) for row in rows]))
    for batch in batches:
        columns = read_columns(batch)
        assert set(columns) == set(leaves(rows[0]))
        for path, column in columns.items():
            assert len(column.values) == size
            for i, row in enumerate(rows):
                assert same(column.values[i], leaves(row)[path])


@settings(max_examples=20, deadline=None)
@given(STRUCTURES, st.integers(1, 4), st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_rows_of_a_dataset_hold_every_leaf_of_the_stored_rows(
    storage: type, structure: dict[str, Any], size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [
        {**make_row(structure, generator, grow=0 if storage is LazyTensorStorage else i), "row": torch.tensor(i)}
        for i in range(size)
    ]
    replay_buffer = ReplayBuffer(storage=storage(10))
    if storage is LazyTensorStorage:
        replay_buffer.extend(torch.stack([TensorDict(row) for row in rows]))
    else:
        for row in rows:
            replay_buffer.add(TensorDict(row))
    for got in TorchRLBufferDataset(replay_buffer, 6):
        want = {".".join(path): value for path, value in leaves(rows[got["row"]]).items()}
        assert set(got) == set(want)
        assert all(same(got[name], value) for name, value in want.items())


def test_only_what_is_asked_for_is_read() -> None:
    batch = TensorDict({"a": torch.ones(2), "n": {"x": torch.ones(2), "y": NonTensorStack("p", "q")}}, [2])
    assert set(read_columns(batch, [("n", "y"), ("a",)])) == {("n", "y"), ("a",)}
    assert set(read_columns(batch, [("n",)])) == {("n", "x"), ("n", "y")}
    assert set(read_columns(lazy_stack(list(batch.unbind(0))), [("n",)])) == {("n", "x"), ("n", "y")}
