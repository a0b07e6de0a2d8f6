"""What differs between releases of ``datasets``, and the private names of it that a stream needs.

``datasets`` has no public way to make a stream of known features whose rows are passed on as they are: the public
``IterableDataset.from_generator`` pickles the generator, and with it the buffer, for a fingerprint.
"""

from __future__ import annotations

import functools
from typing import Any

import datasets
from datasets.fingerprint import generate_random_fingerprint
from datasets.iterable_dataset import _BaseExamplesIterable as ExamplesIterable

__all__ = ["HAS_JSON", "ExamplesIterable", "UnshuffledStream", "dataset_of_table", "item_of", "list_of"]

HAS_JSON = hasattr(datasets, "Json")
"""``datasets.Json``, for values whose keys differ between rows, came with datasets 4.7."""


def list_of(feature: Any) -> Any:
    """The feature of a list. A ``Sequence`` of a struct is a struct of lists, and ``List`` came with datasets 4."""
    if not isinstance(feature, dict):
        return datasets.Sequence(feature)
    return datasets.List(feature) if hasattr(datasets, "List") else [feature]


def item_of(feature: Any) -> Any:
    """The feature of the items of a list."""
    return feature[0] if isinstance(feature, list) else feature.feature


# Each returns a plain `IterableDataset`, written out by name (datasets 3.0 to 5.2).
_DERIVING = (
    "add_column",
    "batch",
    "cast",
    "cast_column",
    "filter",
    "map",
    "remove_columns",
    "rename_column",
    "rename_columns",
    "repeat",
    "select_columns",
    "shard",
    "skip",
    "take",
    "with_format",
)


class UnshuffledStream(datasets.IterableDataset):  # type: ignore[misc]
    """A stream of rows that are drawn at random already: ``shuffle`` collects none before the first is used.

    What is derived from it by ``map`` and the like is one too.
    """

    @property
    def source(self) -> Any:
        """Where the rows come from; None while a stream is being made."""
        return getattr(self, "_ex_iterable", None)

    @property
    def stated_features(self) -> datasets.Features | None:
        """The features that the stream was given (datasets 3.0 to 5.2 keep them as a private field)."""
        return self._info.features

    @stated_features.setter
    def stated_features(self, features: datasets.Features | None) -> None:
        self._info.features = features

    def shuffle(self, *args: Any, **kwargs: Any) -> UnshuffledStream:
        """Returns the stream itself. ``datasets`` would hold back 1000 rows, on which the policy then trains late."""
        return self


def _deriving(name: str) -> Any:
    method = getattr(datasets.IterableDataset, name)

    @functools.wraps(method)
    def derive(self: UnshuffledStream, *args: Any, **kwargs: Any) -> Any:
        derived = method(self, *args, **kwargs)
        if type(derived) is datasets.IterableDataset:
            derived.__class__ = UnshuffledStream
        return derived

    return derive


for _name in _DERIVING:
    if hasattr(datasets.IterableDataset, _name):
        setattr(UnshuffledStream, _name, _deriving(_name))


def dataset_of_table(table: Any, features: datasets.Features) -> datasets.Dataset:
    """A ``Dataset`` on an Arrow table in memory, without the hash of all rows that is its default fingerprint."""
    return datasets.Dataset(
        datasets.table.InMemoryTable(table),
        info=datasets.DatasetInfo(features=features),
        fingerprint=generate_random_fingerprint(),
    )
