"""A TorchRL replay buffer as a dataset."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.utils.data

from torchrl_trl_bridge.arguments import is_integer, is_number
from torchrl_trl_bridge.buffers.checks import SCANNED_ROWS, check_stored_columns
from torchrl_trl_bridge.buffers.columns import ColumnPlan, DatasetType
from torchrl_trl_bridge.buffers.flattening import KeySelection, check_names, describe_missing, flat_name
from torchrl_trl_bridge.buffers.sampling import Draws, wait_for_rows
from torchrl_trl_bridge.buffers.streaming import Stream
from torchrl_trl_bridge.buffers.workers import of_worker, sendable_buffer
from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.compat.torch import fork_workers_of
from torchrl_trl_bridge.rollouts import Column, Path, read_columns

if TYPE_CHECKING:
    import datasets
    from tensordict.utils import NestedKey
    from torchrl.data import ReplayBuffer

Columns = dict[str, Column]

PEEKED_ROWS = 16
"""How many rows, spread over the buffer, are read to learn the columns of a stream."""


class TorchRLBufferDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A TorchRL replay buffer as a dataset: a live view that draws batches and gives them row by row.

    Each row is a flat dict. Nested keys are joined by dots (``("tokens", "full")`` becomes ``"tokens.full"``), tensors
    lose the batch dimension and carry no padding that was not stored, strings and other Python values come as they are
    (tuples as lists), and a ``History`` comes as Hugging Face messages: a list of ``{"role": ..., "content": ...}``. A
    leaf that is None in all rows is left out; a row that lacks a leaf which other rows of the stream have holds None
    there. A buffer of plain tensors gives the one column ``"value"``. Nothing that is done to a row reaches the buffer.

    Args:
        replay_buffer: a ``torchrl.data.ReplayBuffer`` of any kind, ensembles and Ray buffers included.
        batch_size: rows drawn from the buffer at a time.
        keys: the keys to give, each a string or a tuple of strings. The key of a sub-tensordict gives all leaves below
            it. A list, or a string with dots, is taken as the nested key that it spells. Default: all.
        columns: in place of ``keys``, the columns of a TRL dataset type: its name (``"language-modeling"``,
            ``"prompt-only"``, ``"prompt-completion"``, ``"preference"``, ``"unpaired-preference"``, ``"tokenized"``), a
            `DatasetType` for more choice, or a mapping from column names to the keys of single leaves, such as
            ``{"prompt": ("history", "prompt"), "solution": "answer"}``.
        device: where tensors are moved, once for each batch and column. Default: they stay where they are.
        num_batches: replay batches for each iteration; None never ends. Default: one.
        seed: makes the rows a function of seed and epoch (`set_epoch`), whatever the global generators and the buffer's
            own do; these are left as they are. A sampler without replacement starts a pass of its own; one that
            consumes rows consumes them all the same. Default: rows as the buffer draws them.
        timeout: seconds to wait for rows when there are none. Default: raise at once.

    Raises:
        TypeError: if ``replay_buffer`` is not a replay buffer, or a key not a nested key.
        ValueError: if ``batch_size`` or ``num_batches`` is not a positive integer, both ``keys`` and ``columns`` are
            given, or there is no such ``device``. While iterating: if the buffer holds nothing to make the ``columns``
            of, if two leaves flatten to one name, or the buffer has lost the values of a column (strings in a
            ``LazyMemmapStorage``).
        KeyError: at the first batch, if a key of ``keys`` holds nothing; it names the available keys.
        RuntimeError: while iterating, if the buffer is empty and ``timeout`` is None.
        TimeoutError: while iterating, if it still is after ``timeout`` seconds.

    Notes:
        Rows that an iteration drew and did not use are kept for the next one where the sampler would lose them. In
        `as_hf_dataset`, an iteration that is dropped after its first row was a trainer's look at the data, so that this
        row is kept too.

        The columns of a stream are those of its first batch, and of each later one as it comes.

        In a ``DataLoader`` with workers, batch ``i`` of the buffer comes from worker ``i % num_workers``, and from no
        other. The loader asks the workers in turn: with its own batch size that of this dataset, the order is that of
        one process. Workers draw from copies of the buffer, so that a sampler without replacement starts a pass in each
        iteration, and rows that they consume stay in the buffer of this process.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(100))
        >>> for n in (2, 3):
        ...     _ = rb.add(TensorDict({"tokens": {"full": torch.arange(n)}, "query": "hi"}))
        >>> row = next(iter(TorchRLBufferDataset(rb, batch_size=4)))
        >>> sorted(row)
        ['query', 'tokens.full']
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        batch_size: int,
        *,
        keys: Sequence[NestedKey] | None = None,
        columns: str | DatasetType | Mapping[str, NestedKey] | None = None,
        device: torch.device | str | None = None,
        num_batches: int | None = 1,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> None:
        if not compat.is_replay_buffer(replay_buffer):
            raise TypeError(
                f"replay_buffer must be a torchrl ReplayBuffer instance, got {type(replay_buffer).__name__}: "
                "pass the buffer itself, such as ReplayBuffer(storage=LazyStackStorage(1000))."
            )
        if not is_integer(batch_size, 1):
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}.")
        if num_batches is not None and not is_integer(num_batches, 1):
            raise ValueError(f"num_batches must be a positive integer or None, got {num_batches!r}.")
        if keys is not None and not len(keys):
            raise ValueError("keys=[] selects nothing. Name some keys, or leave keys out for all.")
        if seed is not None and not is_integer(seed):
            raise TypeError(f"seed must be an integer or None, got {seed!r}.")
        if timeout is not None and not (is_number(timeout) and timeout >= 0):
            raise ValueError(f"timeout must be a number of seconds from 0 on, or None, got {timeout!r}.")
        # Of NumPy's integers, Python's.
        batch_size, num_batches = int(batch_size), None if num_batches is None else int(num_batches)
        seed = None if seed is None else int(seed)
        self._replay_buffer = replay_buffer
        self._draws = Draws(batch_size, num_batches, seed, timeout)
        self._keys = keys
        self._selection = KeySelection(keys)
        self._rare: list[Path] = []  # what the keys mean, where a first batch lacked some of it
        if keys is not None and columns is not None:
            raise ValueError("keys and columns exclude each other: name further keys in columns={column: key}.")
        self._plan = None if columns is None else ColumnPlan(columns)
        self._device = None if device is None else _checked(torch.device(device))
        # In shared memory, so that it reaches the copies of this dataset in workers that outlive an epoch.
        self._epoch: torch.Tensor = torch.tensor(0).share_memory_()  # type: ignore[no-untyped-call]
        settings: dict[str, Any] = {"batch_size": batch_size, "num_batches": num_batches, "seed": seed}
        settings |= {"keys": None if keys is None else str(list(keys)), "columns": str(columns)}
        self.stream = Stream(replay_buffer, self._draws, self.read, self._device, settings)
        fork_workers_of(TorchRLBufferDataset)
        compat.keep_whole_in_forks(replay_buffer)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the iterations to come, in data-loader workers too. With a seed, each has its own draws."""
        if not is_integer(epoch):
            raise TypeError(f"epoch must be an integer, got {epoch!r}.")
        self._epoch.fill_(int(epoch))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.stream.rows(epoch=int(self._epoch), share=of_worker())

    def state_dict(self) -> dict[str, Any]:
        """The place of the latest iteration, of numbers, strings and tensors.

        It holds the rows that are drawn and not given. Those after them follow, with a seed, from that seed and what
        the buffer then holds; without one from the buffer's own generator and sampler, which `save_buffer` saves.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> _ = rb.extend(TensorDict({"x": torch.arange(100)}, batch_size=[100]))
            >>> dataset = TorchRLBufferDataset(rb, batch_size=4, num_batches=2, seed=0)
            >>> rows = iter(dataset)
            >>> before = [int(next(rows)["x"]) for _ in range(3)]
            >>> resumed = TorchRLBufferDataset(rb, batch_size=4, num_batches=2, seed=0)
            >>> resumed.load_state_dict(dataset.state_dict())
            >>> [int(row["x"]) for row in resumed] == [int(row["x"]) for row in rows]
            True
        """
        return self.stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lets the next iteration go on from a place that `state_dict` gave, and sets the epoch to that of the place.

        Raises:
            TypeError: if it is no dict.
            ValueError: if it is no such state, or that of a newer release.
        """
        self.stream.load_state_dict(state_dict)
        self.set_epoch(state_dict["epoch"])

    def read(self, batch: Any, *, first: bool = False, added: Sequence[Path] = ()) -> Columns:
        """The selected columns of a batch, by flat name.

        Args:
            batch: a batch as the buffer samples it.
            first: check it as the first batch of a stream: that all keys hold something, and that TorchRL has not lost
                what they held.
            added: keys, of integers, that the batch would also hold had it been sampled.
        """
        if self._plan is not None:
            return self._read_planned(self._plan, batch, first)
        columns = read_columns(batch, self._selection.paths)
        for path in added:
            columns.setdefault(path, Column(torch.zeros(_len(columns), dtype=torch.long)))
        if first:
            self._check_keys(columns)
        for path in self._rare:
            columns.setdefault(path, Column([None] * _len(columns)))
        leaves = self._selection.select(columns)
        check_names(leaves)
        if first:
            check_stored_columns(self._replay_buffer, {leaf: columns[leaf] for leaf in leaves})
        return {flat_name(leaf): columns[leaf] for leaf in leaves}

    def _check_keys(self, columns: Mapping[Path, Column]) -> None:
        """Raises KeyError for a key that no row holds. One that other rows hold is None in those that lack it."""
        if self._selection.missing(columns):
            held = read_columns(compat.read_rows(self._replay_buffer, torch.arange(min(self.row_count, SCANNED_ROWS))))
            if missing := self._selection.missing(held):
                raise KeyError(describe_missing(missing[0], held))
            self._rare = self._selection.select(held)

    def _read_planned(self, plan: ColumnPlan, batch: Any, first: bool) -> Columns:
        leaves = read_columns(batch, plan.paths)
        columns = plan.build(leaves, lambda: list(read_columns(batch)), first=first)
        if first:
            check_stored_columns(self._replay_buffer, {path: leaves[path] for path in plan.paths if path in leaves})
        return columns

    def peek(self, plan: ColumnPlan | None = None, *, complete: bool = False) -> Columns:
        """The columns of a few rows, spread over the buffer, without a draw. Waits for rows as an iteration does.

        Args:
            plan: which columns; those of this dataset by default.
            complete: raise, as the first batch of an iteration does, where a key holds nothing.
        """
        self.wait(drawing=False)
        size = self.row_count
        indices = torch.linspace(0, size - 1, min(size, PEEKED_ROWS)).long()
        batch = compat.read_rows(self._replay_buffer, indices)
        if plan is not None:
            return self._read_planned(plan, batch, True)
        return self.read(batch, first=complete, added=compat.keys_added_by_sampling(self._replay_buffer))

    def check(self, trainer_class: type, args: Any = None, *, streaming: bool = True) -> None:
        """Checks, before there is a trainer, that it would take the rows of this dataset. Draws none.

        TRL's own trainers are checked so by themselves when they are given `as_hf_dataset`, stream or snapshot, unless
        it is mapped before.

        Args:
            trainer_class: a trainer class of ``trl``, or a sub-class of one.
            args: its configuration, such as an ``SFTConfig``, for the checks that depend on it.
            streaming: what will be passed to `as_hf_dataset`.

        Raises:
            ValueError: if the trainer needs other columns (it names those, the ones that there are, and the
                ``columns=`` to write), if its release takes no stream, if SFT would train on the prompts of tokenized
                rows as well, and if the stream ends before one generation batch of GRPO, RLOO or distillation.
            KeyError: if a key of ``keys`` or ``columns`` holds nothing; it names the available keys.
            TypeError: if ``trainer_class`` is no trainer whose columns are known.
            RuntimeError: if the buffer is empty and ``timeout`` is None.
        """
        from torchrl_trl_bridge.buffers.trainers import check_trainer

        check_trainer(self, trainer_class, args, streaming=streaming)

    @overload
    def as_hf_dataset(self, streaming: Literal[True] = True) -> datasets.IterableDataset: ...

    @overload
    def as_hf_dataset(self, streaming: Literal[False]) -> datasets.Dataset: ...

    def as_hf_dataset(self, streaming: bool = True) -> datasets.IterableDataset | datasets.Dataset:
        """This dataset as a Hugging Face dataset, which TRL's trainers take.

        Args:
            streaming: True gives a live view: rows that the buffer gets later are seen, making it reads a few rows and
                copies none. False gives a snapshot of the whole buffer, in storage order, drawn by no sampler:
                ``batch_size``, ``num_batches`` and ``seed`` play no part in it.

        Returns:
            A ``datasets.IterableDataset`` of the same rows, with 0-d tensors as Python numbers and booleans and other
            tensors as they are; or a ``datasets.Dataset``, in which tensors become lists (bfloat16 as float32, which
            holds each of its values) and conversations keep the keys that they had.

        Raises:
            ImportError: if ``datasets`` is not installed.
            RuntimeError: for a snapshot of an empty buffer, unless ``timeout`` lets it fill.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> _ = rb.extend(TensorDict({"input_ids": torch.arange(6).view(3, 2)}, batch_size=[3]))
            >>> dataset = TorchRLBufferDataset(rb, batch_size=4)
            >>> dataset.as_hf_dataset().column_names
            ['input_ids']
            >>> dataset.as_hf_dataset(streaming=False)[:]
            {'input_ids': [[0, 1], [2, 3], [4, 5]]}
        """
        if importlib.util.find_spec("datasets") is None:
            raise ImportError(
                "as_hf_dataset needs the optional 'datasets' dependency: "
                'pip install "torchrl-trl-bridge[trl]" (or datasets alone).'
            )
        if not isinstance(streaming, bool):
            raise TypeError(f"streaming must be True (a stream) or False (a snapshot), got {streaming!r}.")
        from torchrl_trl_bridge.buffers import huggingface

        return huggingface.stream(self) if streaming else huggingface.snapshot(self)

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """The buffer that this dataset is a view of."""
        return self._replay_buffer

    @property
    def batch_size(self) -> int:
        """Rows drawn from the buffer at a time."""
        return self._draws.batch_size

    @property
    def row_count(self) -> int:
        """Rows that the buffer holds."""
        return compat.row_count(self._replay_buffer)

    @property
    def rows_per_iteration(self) -> int | None:
        """How many rows an iteration gives; None for no end."""
        return None if self._draws.num_batches is None else self._draws.num_batches * self._draws.batch_size

    def wait(self, *, drawing: bool = True) -> None:
        """Returns when the buffer holds rows (which its sampler can draw), and raises as an iteration would if not."""
        wait_for_rows(self._replay_buffer, self._draws, drawing=drawing)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replay_buffer": sendable_buffer(self._replay_buffer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stream.replay_buffer = self._replay_buffer

    def __repr__(self) -> str:
        if self._plan is not None and self._plan.form is None and self._plan.type and self.row_count:
            with contextlib.suppress(Exception):  # repr of a dataset that has no such rows is still a repr
                self.peek()
        columns = f"columns={self._plan}" if self._plan else f"keys={'<all>' if self._keys is None else self._keys}"
        extras = {"seed": self._draws.seed, "timeout": self._draws.timeout}
        return (
            f"{type(self).__name__}(replay_buffer={self._replay_buffer!r}, batch_size={self._draws.batch_size}, "
            f"{columns}, device={self._device}, "
            f"num_batches={self._draws.num_batches}"
            + "".join(f", {name}={value}" for name, value in extras.items() if value is not None)
            + ")"
        )


def _checked(device: torch.device) -> torch.device:
    """A device, if there is one: what its module in torch says, where it has one."""
    module = getattr(torch, device.type, None)
    there = getattr(module, "is_available", lambda: True)() and (
        device.index is None or device.index < getattr(module, "device_count", lambda: device.index + 1)()
    )
    if not there:
        raise ValueError(f"device={str(device)!r}: this machine has no such device, or this build of torch no support.")
    return device


def _len(columns: Mapping[Any, Column]) -> int:
    return max((len(column.values) for column in columns.values()), default=0)
