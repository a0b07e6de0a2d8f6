"""Columns of a batch → Arrow arrays and Hugging Face features, column by column."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from torchrl_trl_bridge.buffers.flattening import own
from torchrl_trl_bridge.compat.datasets import HAS_JSON, feature_of_arrow_type, item_of, list_of
from torchrl_trl_bridge.rollouts import Column, FreshRows

Values = torch.Tensor | list[Any] | FreshRows

_PYTHON_TYPES = {bool: "bool", int: "int64", float: "float64", str: "string"}


def feature_of(name: str, values: Values) -> Any:
    """The Hugging Face feature of a column, from its values.

    Tensors give (nested lists of) their dtype, float32 for floats of 8 bits and bfloat16. Python values of one type
    give that type. Dictionaries that hold strings under the same keys, as plain messages do, give a struct; others, and
    tensors of several dtypes or ranks, ``datasets.Json``, which takes each row as it is; where ``datasets`` has none, a
    struct of all keys.

    Raises:
        TypeError: for values that Arrow has no type for; it names the column.
    """
    with _naming(name):
        return _feature_of(values)


@contextmanager
def _naming(column: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
        raise TypeError(
            f"column {column!r} holds values that a Hugging Face dataset cannot: {error}. Leave it out with "
            "keys=[...], or iterate the TorchRLBufferDataset itself."
        ) from error


def _feature_of(values: Values) -> Any:
    if isinstance(values, torch.Tensor):
        return _tensor_feature(values.dtype, values.dim() - 1)
    present = [value for value in values if value is not None]
    if not present:
        return datasets.Value("null")
    if all(isinstance(value, torch.Tensor) for value in present):
        if any(value.is_nested for value in present):
            raise TypeError("nested tensors, one in a row (store their parts padded, or as a list)")
        kinds = {(value.dtype, value.dim()) for value in present}
        if len(kinds) == 1:
            return _tensor_feature(*kinds.pop())
        if HAS_JSON and not any(dtype.is_complex for dtype, _ in kinds):
            return datasets.Json()
        raise TypeError(f"its tensors are of several dtypes or ranks, {', '.join(sorted(map(str, kinds)))}")
    return _python_feature(present)


def _tensor_feature(dtype: torch.dtype, dims: int) -> Any:
    if dtype.is_complex:
        raise TypeError(f"Arrow has no type for {dtype} (it has for torch.view_as_real of them)")
    feature: Any = datasets.Value("float32" if _has_no_numpy_dtype(dtype) else str(dtype).removeprefix("torch."))
    for _ in range(dims):
        feature = datasets.Sequence(feature)
    return feature


def _has_no_numpy_dtype(dtype: torch.dtype) -> bool:
    # float32 holds each value of these.
    return dtype == torch.bfloat16 or (dtype.is_floating_point and dtype.itemsize == 1)


def _python_feature(present: list[Any]) -> Any:
    types = set(map(type, present))
    if types == {int, float}:
        types = {float}
    if len(types) == 1 and (known := _PYTHON_TYPES.get(next(iter(types)))):
        return datasets.Value(known)
    if types <= {list, tuple}:
        items = [item for value in present for item in value]
        present = [item for item in items if item is not None]
        return list_of(_python_feature(present) if present else datasets.Value("null"))
    if types == {dict} and (names := _names_of_strings(present)):
        # Not Json where it can be helped: a trainer that maps messages to text would have the text taken apart into
        # characters, for `datasets` (5.2) tries the old feature first, and a list of Json takes any string.
        return {name: datasets.Value("string") for name in names}
    if HAS_JSON:
        return datasets.Json()
    # Without Json: a struct, in which Arrow fills the keys that a row lacks with None; sets it would make lists.
    for value in present:
        json.dumps(_with_string_keys(value))
    return feature_of_arrow_type(pa.array([own(value) for value in present]).type)


def _names_of_strings(values: list[dict[Any, Any]]) -> tuple[str, ...]:
    """The keys of dictionaries that all have the same ones, and strings under each; else none."""
    names = tuple(values[0])
    if not all(isinstance(name, str) for name in names):
        return ()
    if any(tuple(value) != names or not all(type(item) is str for item in value.values()) for value in values):
        return ()
    return names


def column_of(name: str, chunks: list[tuple[Column, int]]) -> tuple[pa.ChunkedArray, Any]:
    """A column of a snapshot, from its chunks and their numbers of rows; a chunk without it holds only None.

    Raises:
        TypeError: for values that Arrow cannot hold, or that change their type.
    """
    present = [column.values for column, _ in chunks if len(column.values)]
    dense = [values for values in present if isinstance(values, torch.Tensor)]
    flat = [values.flat.dtype for values in present if isinstance(values, FreshRows)]
    with _naming(name):
        if len(flat) == len(present) and len(set(flat)) == 1:
            feature = _tensor_feature(flat[0], 1)
        elif len(dense) == len(present) and len({(values.dtype, values.dim()) for values in dense}) == 1:
            feature = _feature_of(dense[0])
        else:
            feature = _feature_of([value for values in present for value in _listed(values)])
        type_ = datasets.Features({name: feature}).arrow_schema.field(name).type
        arrays = [
            _array(column.values, feature, type_) if len(column.values) else pa.nulls(size, type_)
            for column, size in chunks
        ]
    return pa.chunked_array(arrays, type_), feature


def _listed(values: Values) -> list[Any]:
    return list(values.unbind(0) if isinstance(values, torch.Tensor) else values)


def _array(values: Values, feature: Any, type_: pa.DataType) -> pa.Array:
    if not _is_json(feature):
        if isinstance(values, torch.Tensor):
            return _dense_array(values)
        if isinstance(values, FreshRows):
            return _list_array(values.lengths, _flat(values.flat))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if tensors and all(value.dim() == 1 for value in tensors):
            return _ragged_array(values, tensors)
    plain = [value.tolist() if isinstance(value, torch.Tensor) else own(value) for value in _listed(values)]
    return _python_array(plain, feature, type_)


def _is_json(feature: Any) -> bool:
    return HAS_JSON and isinstance(feature, datasets.Json)


def _flat(tensor: torch.Tensor) -> pa.Array:
    tensor = tensor.detach().cpu().contiguous().reshape(-1)
    return pa.array(tensor.float().numpy() if _has_no_numpy_dtype(tensor.dtype) else tensor.numpy())


def _dense_array(tensor: torch.Tensor) -> pa.Array:
    array = _flat(tensor)
    for dim in reversed(range(1, tensor.dim())):
        array = _list_array(np.full(math.prod(tensor.shape[:dim]), tensor.shape[dim]), array)
    return array


def _ragged_array(values: list[Any], tensors: list[torch.Tensor]) -> pa.Array:
    return _list_array([0 if value is None else len(value) for value in values], _flat(torch.cat(tensors)), values)


def _list_array(lengths: Any, items: pa.Array, values: list[Any] | None = None) -> pa.Array:
    """Lists of the given lengths; None where ``values`` is None."""
    # Arrow's lists count in 32 bits; the conversion raises where that is too little.
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)).cast(pa.int32())
    missing = None if values is None or all(value is not None for value in values) else [v is None for v in values]
    return pa.ListArray.from_arrays(offsets, items, mask=None if missing is None else pa.array(missing))


def _python_array(values: list[Any], feature: Any, type_: pa.DataType) -> pa.Array:
    if _is_json(feature):
        # Encoded here: `Json` itself takes a string for JSON if it happens to read as such, and "4" comes back as 4.
        texts = [
            None if value is None else json.dumps(_with_string_keys(value), ensure_ascii=False) for value in values
        ]
        return pa.array(texts, pa.string()).cast(type_)
    if pa.types.is_list(type_):
        items = [item for value in values for item in value or ()]
        return _list_array(
            [len(value or ()) for value in values], _python_array(items, item_of(feature), type_.value_type), values
        )
    return pa.array(values, type_)


def _with_string_keys(value: Any) -> Any:
    """The value, if JSON can give it back: it would turn other keys into strings."""
    if isinstance(value, dict) and (other := [key for key in value if not isinstance(key, str)]):
        raise TypeError(f"a dictionary has the key {other[0]!r}, and only strings can be keys")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _with_string_keys(item)
    return value
