"""Drawing from a replay buffer with other parts than its own: generator, sampler, and how rows are stacked.

What is drawn from is a shallow copy, which shares all other parts with the buffer: no other thread sees the exchange.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torchrl.data.replay_buffers as torchrl_buffers
from tensordict import is_tensor_collection, lazy_stack
from torch.utils._pytree import tree_flatten_with_path
from torchrl.data.replay_buffers import ListStorage, ReplayBuffer, ReplayBufferEnsemble

from torchrl_trl_bridge.compat.tensordict import stacked_rows, with_own_structure

# Came with torchrl 0.12; an empty tuple makes `isinstance` false before.
_STALENESS_AWARE: Any = getattr(torchrl_buffers, "StalenessAwareSampler", ())

__all__ = ["as_stored", "may_give_stored_rows", "seeded", "shallow_copy"]


def shallow_copy(part: Any) -> Any:
    """A copy that shares all it holds. ``copy.copy`` would go through what pickling does."""
    copied = object.__new__(type(part))
    copied.__dict__.update(part.__dict__)
    return copied


def _exchanged(replay_buffer: Any, **fields: Any) -> Any:
    clone = shallow_copy(replay_buffer)
    # Without prefetching: what was drawn ahead was drawn with the buffer's own parts. And without a word on the batch
    # size, which the user has named.
    vars(clone).update(fields, _prefetch=False, _warned_batch_size_conflict=True)
    return clone


# Seeded draws


@contextlib.contextmanager
def seeded(replay_buffer: Any, seed: int, sampler: Any) -> Iterator[Any]:
    """The buffer as it draws with ``sampler`` and a generator of its own; ``sampler`` None is the buffer's own one."""
    used = replay_buffer._sampler if sampler is None else sampler
    fields = {"_sampler": used, **_stacking(replay_buffer)}
    pending = vars(replay_buffer).get("_sample_dependency")
    if pending is not None:  # updates under way (torchrl 0.14), which want the locks that are taken here
        pending.result()
        fields["_sample_dependency"] = None
    device = getattr(replay_buffer._storage, "device", None)  # random indices are drawn where the storage is
    generator = torch.Generator(device if isinstance(device, torch.device) else "cpu").manual_seed(seed)
    with contextlib.ExitStack() as stack:
        # The storage and the sampler have the generator, and other threads have these. The locks in the order in which
        # `sample` takes them: a buffer that prefetches waits for its draws, which need the second, while it holds the
        # first.
        for buffer in [replay_buffer, *getattr(replay_buffer, "_rbs", ())]:
            stack.enter_context(buffer._futures_lock)
            stack.enter_context(buffer._replay_lock)
        holders = _holders(replay_buffer._storage, "_storages") + _holders(used, "_samplers")
        stack.enter_context(_generator_of(holders, generator))
        stack.enter_context(_global_generator(used, seed))
        yield _exchanged(replay_buffer, **fields)


@contextlib.contextmanager
def _generator_of(holders: list[Any], generator: torch.Generator) -> Iterator[None]:
    generators = [holder._rng for holder in holders]
    try:
        for holder in holders:
            holder._rng = generator
        yield
    finally:
        # An ensemble sets the generator of its members with its own, so that its members come after it.
        for holder, own_generator in zip(holders, generators, strict=True):
            holder._rng = own_generator


def _holders(part: Any, of_members: str) -> list[Any]:
    return [part, *(holder for member in getattr(part, of_members, ()) for holder in _holders(member, of_members))]


@contextlib.contextmanager
def _global_generator(sampler: Any, seed: int) -> Iterator[None]:
    """Seeds torch's global generator for the samplers that draw from it (torchrl 0.12 to 0.14: the stale-row one)."""
    if not any(isinstance(holder, _STALENESS_AWARE) for holder in _holders(sampler, "_samplers")):
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# Stacking: the rows of a ListStorage are stacked into tensors, which gives rows of several dtypes the widest one, and
# so changes values: 2**53 + 1 beside a float, True beside an int. Those of a LazyStackStorage are the stored ones, into
# which a transform, or a TensorDictReplayBuffer, writes (torchrl 0.11 to 0.14).


def as_stored(replay_buffer: Any) -> Any:
    """The buffer as it gives rows with their values as they are stored. A ``collate_fn`` of the user's own stays."""
    fields = _stacking(replay_buffer) if isinstance(replay_buffer, ReplayBuffer) else {}
    return _exchanged(replay_buffer, **fields) if fields else replay_buffer


def _stacking(replay_buffer: Any) -> dict[str, Any]:
    """The fields of a buffer that hold TorchRL's functions to stack rows, with others in their place."""
    if isinstance(replay_buffer, ReplayBufferEnsemble):
        return {
            "_collate_fn_val": _value_keeping(replay_buffer._collate_fn_val),
            "_collate_fns": list(map(_value_keeping, replay_buffer._collate_fns)),
        }
    collate = replay_buffer._collate_fn
    if _changes_values(collate):
        if _writes_to_batches(replay_buffer):
            return {"_collate_fn": _value_keeping(collate)}
        return {"_collate_fn": functools.partial(_side_by_side, collate)}  # which is also the fastest
    gives_stored_rows = isinstance(replay_buffer._storage, ListStorage) and _name(collate) == "_collate_id"
    return {"_collate_fn": _copied} if gives_stored_rows and _writes_to_batches(replay_buffer) else {}


def _writes_to_batches(replay_buffer: Any) -> bool:
    """Whether the buffer may set something in what it has drawn. A transform of ours that only reads says so."""
    transforms = replay_buffer._transform if replay_buffer._transform is not None else ()
    return type(replay_buffer) is not ReplayBuffer or not all(
        getattr(transform, "only_reads", False) for transform in transforms
    )


def _name(function: Any) -> str | None:
    return getattr(function, "__name__", None)


def _copied(batch: Any) -> Any:
    rows = stacked_rows(batch)
    return batch.copy() if rows is None else lazy_stack(list(map(with_own_structure, rows)))


def _changes_values(collate: Any) -> bool:
    # By name: the function is another object after its first call, which picks the one for the torch that there is.
    return _name(collate) == "_stack_anything"


def _value_keeping(collate: Any) -> Any:
    return functools.partial(_stacked_if_of_one_dtype, collate) if _changes_values(collate) else collate


def _side_by_side(stack: Callable[[Any], Any], rows: list[Any]) -> Any:
    return lazy_stack(rows) if is_tensor_collection(rows[0]) else _stacked_if_of_one_dtype(stack, rows)


def _stacked_if_of_one_dtype(stack: Callable[[Any], Any], rows: list[Any]) -> Any:
    """Stacks rows or batches, or puts them side by side where stacking would change their values.

    Raises:
        ValueError: for rows of several dtypes that are no tensordicts, which cannot be put so.
    """
    dtypes: dict[Any, set[torch.dtype]] = collections.defaultdict(set)
    for row in rows:
        for key, leaf in _tensors_of(row):
            dtypes[key].add(leaf.dtype)
    mixed = {key: kinds for key, kinds in dtypes.items() if len(kinds) > 1}
    if not mixed:
        return stack(rows)
    if is_tensor_collection(rows[0]):
        return lazy_stack(list(map(with_own_structure, rows)))
    key, kinds = next(iter(mixed.items()))
    raise ValueError(
        f"the rows of a ListStorage hold {''.join(map(str, key)) or 'tensors'} as {sorted(map(str, kinds))}, which "
        "TorchRL stacks into one dtype, so that values change. Write rows of one dtype, or tensordicts."
    )


def _tensors_of(row: Any) -> Iterable[tuple[Any, torch.Tensor]]:
    if not is_tensor_collection(row):
        return ((key, leaf) for key, leaf in tree_flatten_with_path(row)[0] if isinstance(leaf, torch.Tensor))
    rows = stacked_rows(row)
    if rows is not None:
        return (item for inner in rows for item in _tensors_of(inner))
    return ((key, leaf) for key, leaf in row.items(True, True) if isinstance(leaf, torch.Tensor))


def may_give_stored_rows(replay_buffer: Any) -> bool:
    """Whether a tensor of a batch may be one that the buffer stores, as a ``collate_fn`` of the user's own can give."""
    parts = vars(replay_buffer)  # those of a remote buffer are elsewhere, and its batches have come from there
    functions = [parts[name] for name in ("_collate_fn", "_collate_fn_val") if name in parts]
    functions += parts.get("_collate_fns", [])
    return not {_name(function) for function in functions} <= {"_collate_id", "_stack_anything", "lazy_stack"}
