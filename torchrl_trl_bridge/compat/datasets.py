"""What differs between releases of ``datasets``, and the private names of it that a stream needs.

``datasets`` has no public way to make a stream of known features whose rows are passed on as they are: the public
``IterableDataset.from_generator`` pickles the generator, and with it the buffer, for a fingerprint.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from datasets.fingerprint import generate_random_fingerprint
from datasets.iterable_dataset import TakeExamplesIterable
from datasets.iterable_dataset import _BaseExamplesIterable as ExamplesIterable

from torchrl_trl_bridge.compat.trl import cuts_rows

__all__ = [
    "HAS_JSON",
    "ExamplesIterable",
    "TableDataset",
    "UnshuffledStream",
    "feature_of_arrow_type",
    "item_of",
    "list_of",
]

HAS_JSON = hasattr(datasets, "Json")
"""``datasets.Json``, for values whose keys differ between rows, came with datasets 4.7."""


def list_of(feature: Any) -> Any:
    """The feature of a list. A ``Sequence`` of a struct is a struct of lists, and ``List`` came with datasets 4."""
    if not isinstance(feature, dict):
        return datasets.Sequence(feature)
    return datasets.List(feature) if hasattr(datasets, "List") else [feature]


def feature_of_arrow_type(type_: Any) -> Any:
    """The feature of an Arrow type (not exported by ``datasets``, 3.1 to 5.2)."""
    return datasets.features.features.generate_from_arrow_type(type_)


def item_of(feature: Any) -> Any:
    """The feature of the items of a list."""
    return feature[0] if isinstance(feature, list) else feature.feature


# Each returns a plain `IterableDataset`, written out by name (datasets 3.1 to 5.2).
_DERIVING = (
    "add_column",
    "batch",
    "cast",
    "cast_column",
    "repeat",
    "shard",
    "skip",
    "with_format",
)


class UnshuffledStream(datasets.IterableDataset):  # type: ignore[misc]
    """A stream of rows that are drawn at random already: ``shuffle`` collects none before the first is used.

    What is derived from it by ``map`` and the like is one too.
    """

    _ex_iterable: Any

    @property
    def source(self) -> Any:
        """Where the rows come from; None while a stream is being made."""
        return getattr(self, "_ex_iterable", None)

    @property
    def column_names(self) -> list[str] | None:
        """The names of the features. datasets 3.1 would not ask a sub-class, which may come to know them later."""
        return None if self.features is None else list(self.features)

    @property
    def stated_features(self) -> datasets.Features | None:
        """The features that the stream was given (datasets 3.1 to 5.2 keep them as a private field)."""
        return self._info.features

    @stated_features.setter
    def stated_features(self, features: datasets.Features | None) -> None:
        self._info.features = features

    def map(self, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cuts_rows(function):  # a row at a time: none waits for a thousand others
            function, kwargs = _Cut(function), {**kwargs, "batch_size": 1}
        return _unshuffled(super().map(function, *args, **kwargs))

    def filter(self, *args: Any, **kwargs: Any) -> Any:
        # Where features are stated, `datasets` (4.4) puts a step in between that loses those of the rows, and fails.
        stated, self.stated_features = self.stated_features, None
        try:
            derived = _unshuffled(super().filter(*args, **kwargs))
        finally:
            self.stated_features = stated
        derived.stated_features = stated
        return derived

    def take(self, n: int) -> Any:
        derived = _unshuffled(super().take(n))
        derived._ex_iterable.__class__ = _Taken
        return derived

    # `datasets` keeps the features over these, and then turns each row into what they say: tensors into lists of
    # numbers, and a number of another type than the first rows had into theirs (datasets 4 to 5.2). Mapped, rows are
    # passed on as they are.

    def rename_column(self, original_column_name: str, new_column_name: str) -> Any:
        return self.rename_columns({original_column_name: new_column_name})

    def rename_columns(self, column_mapping: dict[str, str]) -> Any:
        self._check_columns(column_mapping)
        names = {name: column_mapping.get(name, name) for name in self.column_names or ()}
        if len(set(names.values())) < len(names):
            raise ValueError(f"renaming {column_mapping} gives two columns one name: {list(names.values())}.")
        # All columns, where they are known, so that they keep their order.
        return self._passed_on(_Renamed(names or column_mapping), list(names or column_mapping), names)

    def remove_columns(self, column_names: str | list[str]) -> Any:
        removed = [column_names] if isinstance(column_names, str) else list(column_names)
        self._check_columns(removed)
        names = {name: name for name in self.column_names or () if name not in removed}
        return self._passed_on(None, removed, names)

    def select_columns(self, column_names: str | list[str]) -> Any:
        selected = [column_names] if isinstance(column_names, str) else list(column_names)
        if self.features is None:  # what to remove is not known, and there is nothing that rows could be turned into
            return _unshuffled(super().select_columns(selected))
        self._check_columns(selected)
        removed = [name for name in self.column_names or () if name not in selected]
        return self._passed_on(_Selected(selected), removed, {name: name for name in selected})

    def _check_columns(self, names: Any) -> None:
        known = self.column_names
        if known is not None and (unknown := [name for name in names if name not in known]):
            raise ValueError(f"the stream has no columns {unknown}. Its columns are {known}.")

    def _passed_on(self, function: Any, removed: list[str], names: dict[str, str]) -> Any:
        known = self.features
        derived = self.map(function, remove_columns=removed)
        if known is not None:
            features = datasets.Features({new: known[old] for old, new in names.items()})
            derived._ex_iterable = _Typed(derived._ex_iterable, features)
            derived._info.features = features
        return derived

    def shuffle(self, *args: Any, **kwargs: Any) -> UnshuffledStream:
        """Returns the stream itself. ``datasets`` would hold back 1000 rows, on which the policy then trains late."""
        return self

    if hasattr(datasets.IterableDataset, "_effective_generator"):
        # Up to datasets 4.4 the epoch reaches what is shuffled, and nothing else: a seeded stream would give the same
        # rows in every epoch. Later releases hand it to each source, as this does. Can go when 4.4 leaves the matrix.
        def _prepare_ex_iterable_for_iteration(self, *args: Any, **kwargs: Any) -> Any:
            source = self._ex_iterable
            self._ex_iterable = _at_epoch(source, self.epoch)
            try:
                return super()._prepare_ex_iterable_for_iteration(*args, **kwargs)
            finally:
                self._ex_iterable = source


def _unshuffled(derived: Any) -> Any:
    """What ``datasets`` derived from a stream, as a stream that holds no rows back either."""
    if type(derived) is datasets.IterableDataset:
        derived.__class__ = UnshuffledStream
    return derived


def _at_epoch(source: Any, epoch: int) -> Any:
    """A source, and what is mapped and filtered from one, at an epoch; the one that is given stays as it is."""
    if not hasattr(source, "ex_iterable"):
        return source.shift_rngs(epoch) if hasattr(source, "shift_rngs") else source
    clone = copy.copy(source)
    clone.ex_iterable = _at_epoch(source.ex_iterable, epoch)
    return clone


class _Taken(TakeExamplesIterable):  # type: ignore[misc]
    """The first rows of a stream. ``datasets`` (3.1 to 5.2) asks for one more, which a consuming sampler would lose."""

    def __iter__(self) -> Iterator[Any]:
        state = self._state_dict or {}
        taken = state.get("taken", state.get("num_taken", 0))  # renamed after datasets 3.1
        return itertools.islice(super().__iter__(), max(self.n - taken, 0))


class _Renamed:
    """Gives the renamed columns of a row. A class, since a local function cannot be sent to a worker."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {new: row[old] for old, new in self.names.items()}


class _Cut:
    """Gives TRL's function that cuts rows lists, for it passes over tensors."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, rows: dict[str, list[Any]]) -> Any:
        return self.function({name: [_listed(value) for value in column] for name, column in rows.items()})


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


class _Selected:
    """Gives some columns of a row."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in self.names}


class _Typed(ExamplesIterable):  # type: ignore[misc]
    """Rows that are passed on as they are, with the features that they have."""

    is_typed = True

    def __init__(self, ex_iterable: Any, features: datasets.Features) -> None:
        super().__init__()
        self.ex_iterable = ex_iterable
        self._features = features

    @property
    def features(self) -> datasets.Features:
        return self._features

    @property
    def num_shards(self) -> int:
        shards: int = self.ex_iterable.num_shards
        return shards

    @property
    def n_shards(self) -> int:  # its name before datasets 4
        return self.num_shards

    def __iter__(self) -> Any:
        return iter(self.ex_iterable)

    def _init_state_dict(self) -> Any:
        self._state_dict = self.ex_iterable._init_state_dict()
        return self._state_dict

    def shuffle_data_sources(self, generator: Any) -> _Typed:
        return _Typed(self.ex_iterable.shuffle_data_sources(generator), self._features)

    def shard_data_sources(self, *args: Any, **kwargs: Any) -> _Typed:
        return _Typed(self.ex_iterable.shard_data_sources(*args, **kwargs), self._features)


def _deriving(name: str) -> Any:
    method = getattr(datasets.IterableDataset, name)

    @functools.wraps(method)
    def derive(self: UnshuffledStream, *args: Any, **kwargs: Any) -> Any:
        return _unshuffled(method(self, *args, **kwargs))

    return derive


for _name in _DERIVING:
    if hasattr(datasets.IterableDataset, _name):
        setattr(UnshuffledStream, _name, _deriving(_name))


class TableDataset(datasets.Dataset):  # type: ignore[misc]
    """A ``Dataset`` on an Arrow table in memory. What is derived from it without a function is of its class too."""

    note: Any = None
    """What a sub-class wants to know of the rows, also where others are derived from them."""

    @classmethod
    def of_table(cls, table: Any, features: datasets.Features) -> Any:
        """Without the hash of all rows that is the default fingerprint."""
        return cls(
            datasets.table.InMemoryTable(table),
            info=datasets.DatasetInfo(features=features),
            fingerprint=generate_random_fingerprint(),
        )


# Each returns a plain `Dataset`, written out by name (datasets 3.1 to 5.2); the others copy what they are called on.
_DERIVING_TABLES = ("add_column", "filter", "select", "shard", "shuffle", "skip", "sort", "take", "train_test_split")


def _deriving_tables(name: str) -> Any:
    method = getattr(datasets.Dataset, name)

    @functools.wraps(method)
    def derive(self: TableDataset, *args: Any, **kwargs: Any) -> Any:
        derived = method(self, *args, **kwargs)
        for part in derived.values() if isinstance(derived, dict) else [derived]:
            part.__class__, part.note = type(self), self.note
        return derived

    return derive


for _name in _DERIVING_TABLES:
    setattr(TableDataset, _name, _deriving_tables(_name))
