"""What differs between releases of TorchRL, and the private names of its replay buffers that the bridge uses."""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data
import torchrl.data.replay_buffers as torchrl_buffers
from tensordict import is_non_tensor, is_tensor_collection
from torch.utils._pytree import tree_leaves, tree_map
from torchrl.data.replay_buffers import (
    LazyMemmapStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers.samplers import SamplerEnsemble

from torchrl_trl_bridge.compat.exchanging import as_stored, seeded, shallow_copy
from torchrl_trl_bridge.compat.tensordict import MetaData

# Came with torchrl 0.14; an empty tuple makes `isinstance` false on older ones.
_CONSUMING: Any = getattr(torchrl_buffers, "ConsumingSampler", ())

__all__ = [
    "advance_seeded",
    "append_transform",
    "can_sample",
    "capacity",
    "consumes",
    "consumes_for_good",
    "held_still",
    "holds_python_values",
    "is_remote",
    "is_replay_buffer",
    "keep_whole_in_forks",
    "keeps_objects",
    "keys_added_by_sampling",
    "members",
    "part_names",
    "place",
    "private_sampler",
    "read_rows",
    "reason_not_to_sample",
    "remove_transform",
    "row_count",
    "run_beside",
    "sample",
    "sample_seeded",
    "score_step",
    "scores_steps",
    "sent_parts",
    "set_content",
    "set_state",
    "shares_strings_between_rows",
    "state_of",
    "stays_in_its_process",
    "storage_of_one_shape",
    "stored_content",
    "stored_rows",
    "without_prefetched",
]


def is_replay_buffer(value: object) -> bool:
    """Whether ``value`` has the interface of a TorchRL replay buffer, or of a client of one."""
    if isinstance(value, ReplayBuffer):
        return True
    return hasattr(type(value), "__len__") and all(
        callable(getattr(value, name, None)) for name in ("sample", "extend")
    )


def run_beside(replay_buffer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(buffer, *args)`` where the buffer lives: here, or in the Ray actor of a remote buffer.

    A remote buffer forwards public methods only, so what needs its sampler or storage has to run beside it.
    """
    actor = _actor(replay_buffer)
    if actor is None:
        return function(replay_buffer, *args)
    import ray

    try:
        return ray.get(actor.__ray_call__.remote(function, *args))
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(
            f"the Ray actor of the replay buffer ({type(replay_buffer).__name__}) is gone, and its rows with it. Make "
            f"the buffer again, and fill it or load what save_buffer saved of it. {error}"
        ) from error


def _actor(replay_buffer: Any) -> Any:
    # `RayReplayBuffer` keeps its actor as `_rb`, the clients that it hands out as `_actor` (torchrl 0.11 to 0.14).
    actor = getattr(replay_buffer, "_rb", None) or getattr(replay_buffer, "_actor", None)
    return actor if hasattr(actor, "__ray_call__") else None


def members(replay_buffer: Any) -> list[Any] | None:
    """The buffers of an ensemble, or None for a single buffer."""
    return list(replay_buffer._rbs) if isinstance(replay_buffer, ReplayBufferEnsemble) else None


def keys_added_by_sampling(replay_buffer: Any) -> list[tuple[str, ...]]:
    """The keys, of integers, that ``sample`` adds to the rows and indexing the buffer does not: where they stand."""
    if isinstance(replay_buffer, ReplayBufferEnsemble):
        return [("index", "buffer_ids"), ("index", "index")]
    return [("index",)] if isinstance(replay_buffer, TensorDictReplayBuffer) else []


def row_count(replay_buffer: Any) -> int:
    """The number of rows. The length of an ensemble is the number of its members."""
    return int(run_beside(replay_buffer, _row_count))


def _row_count(replay_buffer: Any) -> int:
    buffers = members(replay_buffer)
    return len(replay_buffer) if buffers is None else sum(map(_row_count, buffers))


def can_sample(replay_buffer: Any, batch_size: int) -> bool:
    """Whether the buffer holds rows, and its sampler will serve a batch as far as it can tell beforehand."""
    return bool(run_beside(replay_buffer, _can_sample, batch_size))


def _can_sample(replay_buffer: Any, batch_size: int) -> bool:
    buffers = members(replay_buffer)
    if buffers is not None:
        return all(_can_sample(buffer, batch_size) for buffer in buffers)
    if len(replay_buffer) == 0:
        return False
    # Asks the sampler too (rows consumed, stale, or too few for `drop_last`); torchrl 0.14 has it.
    ask = getattr(type(replay_buffer), "can_sample", None)
    return True if ask is None else bool(ask(replay_buffer, batch_size))


def sample(replay_buffer: Any, batch_size: int) -> Any:
    """A batch as the buffer itself draws it, or None where `can_sample` says no: one call of a remote buffer."""
    return run_beside(replay_buffer, _sample, batch_size)


def _sample(replay_buffer: Any, batch_size: int) -> Any:
    if _iterates_itself(replay_buffer, batch_size) and _can_sample(replay_buffer, batch_size):
        return next(iter(as_stored(replay_buffer).as_dataset(num_batches=1)))
    return _drawn(as_stored(replay_buffer), batch_size)


def _drawn(replay_buffer: Any, batch_size: int) -> Any:
    return replay_buffer.sample(batch_size) if _can_sample(replay_buffer, batch_size) else None


def _iterates_itself(replay_buffer: Any, batch_size: int) -> bool:
    """Whether the buffer's own dataset gives what is drawn here.

    ``ReplayBuffer.as_dataset(num_batches)`` is announced for torchrl 0.15: batches of the buffer's own size, from its
    own sampler, and in each data-loader worker from a copy of both. So it is right for a draw of that size outside of a
    worker, and wrong for other sizes, for seeded draws, and in workers, which share the batches here.
    """
    as_dataset = getattr(type(replay_buffer), "as_dataset", None)
    return (
        as_dataset is not None
        and "num_batches" in inspect.signature(as_dataset).parameters
        and getattr(replay_buffer, "batch_size", None) == batch_size
        and torch.utils.data.get_worker_info() is None
    )


def reason_not_to_sample(replay_buffer: Any, batch_size: int) -> str:
    """What the sampler itself says where `can_sample` says no."""
    return str(run_beside(replay_buffer, _reason_not_to_sample, batch_size))


def _reason_not_to_sample(replay_buffer: Any, batch_size: int) -> str:
    try:
        replay_buffer.sample(batch_size)
    except Exception as error:  # whatever it is, it is the answer
        return f"{type(error).__name__}: {error}"
    return "it can by now"


def consumes(replay_buffer: Any) -> bool:
    """Whether a drawn row is gone for later draws, of this pass or for good, so that no drawn row may be dropped."""
    return bool(run_beside(replay_buffer, _consumes))


def _consumes(replay_buffer: Any) -> bool:
    return _sampler_consumes(replay_buffer.sampler)


def _sampler_consumes(sampler: Any) -> bool:
    if isinstance(sampler, SamplerEnsemble):
        return any(_sampler_consumes(member) for member in sampler._samplers)
    if isinstance(sampler, SamplerWithoutReplacement):
        return True
    # A sampler that is not known to draw independently may consume: keep its rows.
    return not isinstance(sampler, (RandomSampler, PrioritizedSampler, SliceSampler))


def consumes_for_good(replay_buffer: Any) -> bool:
    """Whether a drawn row is gone for all later draws."""
    return bool(run_beside(replay_buffer, _consumes_for_good))


def _consumes_for_good(replay_buffer: Any) -> bool:
    samplers = getattr(replay_buffer.sampler, "_samplers", [replay_buffer.sampler])
    return any(isinstance(sampler, _CONSUMING) for sampler in samplers)


def is_remote(replay_buffer: Any) -> bool:
    """Whether the buffer lives in a Ray actor."""
    return _actor(replay_buffer) is not None


def place(replay_buffer: Any) -> str | None:
    """Where a buffer lives that several processes may share: its actor or its files. None for one in memory."""
    actor = _actor(replay_buffer)
    if actor is not None:
        return f"actor {actor._actor_id.hex()}"
    folder = getattr(getattr(replay_buffer, "storage", None), "scratch_dir", None)
    return f"files in {folder}" if folder is not None else None


def stored_rows(replay_buffer: Any, indices: list[int]) -> list[Any]:
    """Rows as they are stored, without transforms; none of an ensemble, or of a storage of several dimensions."""
    if members(replay_buffer) is not None or getattr(replay_buffer.storage, "ndim", 1) > 1:
        return []
    with replay_buffer._replay_lock:
        return [replay_buffer.storage.get(index) for index in indices]


def stays_in_its_process(replay_buffer: Any) -> str | None:
    """The storage that refuses to be sent to another process, by name, or None."""
    for buffer in members(replay_buffer) or [replay_buffer]:
        if isinstance(buffer.storage, ListStorage):
            return type(buffer.storage).__name__
    return None


def sent_parts(replay_buffer: Any) -> list[tuple[str, Any]]:
    """The parts of a buffer that a user gives it, and that may not be picklable, by the user's words for them."""
    buffers = members(replay_buffer)
    if buffers is not None:
        return [part for buffer in buffers for part in sent_parts(buffer)]
    parts = {"sampler": "_sampler", "writer": "_writer", "transform": "_transform", "collate_fn": "_collate_fn"}
    return [(part, vars(replay_buffer).get(field)) for part, field in parts.items()]


def without_prefetched(replay_buffer: Any) -> Any:
    """The buffer as it is sent to another process: without the batches that it has drawn ahead."""
    if _actor(replay_buffer) is not None:  # `RayReplayBuffer` cannot be pickled, its clients can (torchrl 0.14)
        return replay_buffer.client() if hasattr(replay_buffer, "client") else replay_buffer
    if not isinstance(replay_buffer, ReplayBuffer):
        return replay_buffer
    clone = shallow_copy(replay_buffer)
    # Pickling waits for the prefetching threads and takes along what they drew (torchrl 0.11 to 0.14).
    clone.__dict__["_prefetch_queue"] = collections.deque()
    buffers = members(replay_buffer)
    if buffers is not None:
        clone.__dict__["_rbs"] = type(replay_buffer._rbs)(map(without_prefetched, buffers))
        return clone
    # The storage refers to the buffers that use it, and the writer to the storage.
    storage = clone.__dict__["_storage"] = shallow_copy(replay_buffer._storage)
    attached = storage.__dict__.get("_attached_entities_list")
    if attached is not None:
        storage.__dict__["_attached_entities_list"] = [
            clone if entity is replay_buffer else entity for entity in attached
        ]
    writer = clone.__dict__["_writer"] = shallow_copy(replay_buffer._writer)
    if writer.__dict__.get("_storage") is replay_buffer._storage:
        writer.__dict__["_storage"] = storage
    return clone


_WHOLE_IN_FORKS: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_whole_in_forks(replay_buffer: Any) -> None:
    """Lets no process fork while another thread writes to the buffer or draws from it.

    A data-loader worker would get the buffer with a row half written, and locks that nobody opens.
    """
    if not _WHOLE_IN_FORKS and hasattr(os, "register_at_fork"):
        _watch_forks()
    for buffer in members(replay_buffer) or [replay_buffer]:
        if isinstance(buffer, ReplayBuffer) and _actor(buffer) is None:
            _WHOLE_IN_FORKS.add(buffer)


_watches = False


def _watch_forks() -> None:
    global _watches
    if _watches:
        return
    _watches = True
    held: list[Any] = []

    def acquire() -> None:
        for buffer in list(_WHOLE_IN_FORKS):
            # In the order in which the buffer itself takes them (torchrl 0.11 has no lock on the second).
            for lock in (getattr(buffer, "_futures_lock", None), getattr(buffer, "_replay_lock", None)):
                if lock is not None:
                    lock.acquire()
                    held.append(lock)

    def release() -> None:
        while held:
            held.pop().release()

    os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)


def shares_strings_between_rows(replay_buffer: Any) -> bool:
    """Whether the storage keeps the first row's Python values for every row, as a memory-mapped one does."""
    return bool(run_beside(replay_buffer, _shares_strings))


def _shares_strings(replay_buffer: Any) -> bool:
    buffers = members(replay_buffer)
    if buffers is not None:
        return any(_shares_strings(buffer) for buffer in buffers)
    return isinstance(replay_buffer.storage, LazyMemmapStorage)


def storage_of_one_shape(replay_buffer: Any) -> str | None:
    """The storage, by name, that holds all rows in tensors of one shape; None where there is none."""
    name: str | None = run_beside(replay_buffer, _storage_of_one_shape)
    return name


def _storage_of_one_shape(replay_buffer: Any) -> str | None:
    storages = [buffer.storage for buffer in members(replay_buffer) or [replay_buffer]]
    return next((type(storage).__name__ for storage in storages if isinstance(storage, TensorStorage)), None)


def read_rows(replay_buffer: Any, indices: torch.Tensor) -> Any:
    """Rows by their place in storage order, collated and transformed as ``sample`` does, without a draw.

    Of an ensemble, whose members may differ in their keys, a list of rows, member after member.
    """
    return run_beside(replay_buffer, _read_rows, indices)


def _read_rows(replay_buffer: Any, indices: torch.Tensor) -> Any:
    buffers = members(replay_buffer)
    if buffers is None and getattr(replay_buffer.storage, "ndim", 1) == 1:
        return as_stored(replay_buffer)[indices]
    if buffers is None:  # `ReplayBuffer.__getitem__` takes no coordinates, which storages of more dimensions need
        coordinates = torch.unravel_index(indices, replay_buffer.storage.shape)
        return _transformed(replay_buffer, replay_buffer._collate_fn(replay_buffer.storage.get(coordinates)))
    rows: list[Any] = []
    start = 0
    for buffer in buffers:
        here = indices[(indices >= start) & (indices < start + len(buffer))] - start
        start += len(buffer)
        if len(here):
            rows += _transformed(replay_buffer, _read_rows(buffer, here)).unbind(0)
    return rows


def _transformed(replay_buffer: Any, rows: Any) -> Any:
    transform = replay_buffer._transform
    if transform is None or not len(transform):
        return rows
    with rows.copy().unlock_() as rows:  # the members' own rows stay as they are
        return transform(rows)


def private_sampler(replay_buffer: Any) -> Any:
    """A sampler for a stream of its own: like the buffer's, at the start of a pass.

    Only samplers that keep a place within a pass need one. The others keep nothing (random, slices), or what they keep
    belongs to the buffer (priorities, what was consumed): for them it is the buffer's own sampler, given as None.
    """
    return run_beside(replay_buffer, _private_sampler_of)


def _private_sampler_of(replay_buffer: Any) -> Any:
    return _private(replay_buffer.sampler)


def _private(sampler: Any) -> Any:
    if isinstance(sampler, SamplerEnsemble):
        replaced = [_private(member) for member in sampler._samplers]
        if all(member is None for member in replaced):
            return None
        clone = copy.copy(sampler)
        clone._samplers = [new or old for new, old in zip(replaced, sampler._samplers, strict=True)]
        return clone
    if not isinstance(sampler, SamplerWithoutReplacement):
        return None
    clone = copy.copy(sampler)
    clone._empty()
    return clone


def sample_seeded(replay_buffer: Any, batch_size: int, seed: int, sampler: Any) -> tuple[Any, Any]:
    """Draws a batch with a generator of its own, and leaves all other generators as they were.

    Args:
        replay_buffer: the buffer.
        batch_size: number of rows.
        seed: seeds this draw.
        sampler: what `private_sampler` gave, or what the last draw gave back.

    Returns:
        The batch, or None where `can_sample` says no, and the sampler to pass to the next draw.
    """
    batch, sampler = run_beside(replay_buffer, _sample_seeded, batch_size, seed, sampler)
    return batch, sampler


def _sample_seeded(replay_buffer: Any, batch_size: int, seed: int, sampler: Any) -> tuple[Any, Any]:
    # `sample` itself is called, not its parts, because it adds what each kind of buffer adds to a batch.
    with seeded(replay_buffer, seed, sampler) as drawing:
        return _drawn(drawing, batch_size), sampler


def advance_seeded(replay_buffer: Any, batch_size: int, seeds: list[int], sampler: Any) -> Any:
    """A private sampler as it is after draws with these seeds, without reading the rows that they would draw."""
    return run_beside(replay_buffer, _advance_seeded, batch_size, seeds, sampler)


def _advance_seeded(replay_buffer: Any, batch_size: int, seeds: list[int], sampler: Any) -> Any:
    for seed in seeds:
        with seeded(replay_buffer, seed, sampler):
            sampler.sample(replay_buffer._storage, batch_size)
    return sampler


def append_transform(replay_buffer: Any, transform: Any) -> None:
    """Appends a transform, if it is not there. Not to a remote buffer, which would get a copy that tells nothing."""
    if _actor(replay_buffer) is None and _position(replay_buffer, transform) is None:
        replay_buffer.append_transform(transform)


def remove_transform(replay_buffer: Any, transform: Any) -> None:
    """Removes a transform, for which buffers have no method (torchrl 0.11 to 0.14)."""
    position = _position(replay_buffer, transform)
    if position is not None:
        replay_buffer._transform.pop(position)


def _position(replay_buffer: Any, transform: Any) -> int | None:
    transforms = getattr(replay_buffer, "_transform", None) or ()
    return next((i for i, present in enumerate(transforms) if present is transform), None)


def scores_steps(transform: Any) -> bool:
    """Whether this is a transform that scores a step, as TorchRL's reward parsers do."""
    return callable(getattr(transform, "_step", None)) and hasattr(transform, "set_container")


def score_step(transform: Any, before: Any, after: Any) -> Any:
    """What a transform makes of a step. Its method for that is private: environments call it (torchrl 0.11 to 0.14)."""
    return transform._step(before, after)


# Saving: TorchRL's own `dumps` and `state_dict` lose what is no tensor (0.11 to 0.14), so that the parts are read here.


def held_still(replay_buffer: Any) -> contextlib.AbstractContextManager[Any]:
    """Lets no other thread write to the buffer, or draw from it."""
    lock: contextlib.AbstractContextManager[Any] = replay_buffer._replay_lock
    return lock


def part_names(replay_buffer: Any) -> dict[str, str]:
    """The classes of a buffer's storage, sampler and writer."""
    return {part: type(getattr(replay_buffer, f"_{part}")).__name__ for part in ("storage", "sampler", "writer")}


def capacity(replay_buffer: Any) -> int:
    """How many rows a buffer can hold."""
    return int(replay_buffer._storage.max_size)


def stored_content(replay_buffer: Any, rows: bool = True) -> tuple[str, list[Any]]:
    """The kind of a storage, "list" or "tensor", and what it holds: its rows, or a copy of all of them as one batch.

    Rows of a list are replaced by what is written, and those of tensors overwritten.
    """
    storage = replay_buffer._storage
    if isinstance(storage, ListStorage):
        return "list", list(storage._storage) if rows else []
    if isinstance(storage, TensorStorage):
        if not rows or not len(storage):
            return "tensor", []
        written = slice(storage._len_along_dim0)
        stored: Any = storage._storage
        # torch takes a tensordict for a tree, and its metadata for a leaf.
        return "tensor", [
            stored[written].clone()
            if is_tensor_collection(stored)
            else tree_map(lambda leaf: leaf[written].clone(), stored)
        ]
    raise TypeError(
        f"a {type(storage).__name__} cannot be saved. Keep the rows in a ListStorage, LazyStackStorage, "
        "LazyTensorStorage or LazyMemmapStorage."
    )


def set_content(replay_buffer: Any, content: list[Any]) -> None:
    """The opposite of `stored_content`: replaces what the storage holds."""
    storage = replay_buffer._storage
    replay_buffer.empty()
    if isinstance(storage, ListStorage):
        storage._storage = content
        if hasattr(storage, "_bump_mutation_revision"):  # torchrl 0.14: what caches know the rows by
            storage._bump_mutation_revision()
    elif content:
        leaf = content[0] if is_tensor_collection(content[0]) else tree_leaves(content[0])[0]
        storage.set(range(leaf.shape[0]), content[0])


def keeps_objects(replay_buffer: Any) -> bool:
    """Whether the rows hold the very Python objects that were written, not copies of them."""
    return isinstance(replay_buffer._storage, ListStorage)


def holds_python_values(replay_buffer: Any) -> bool:
    """Whether a tensor storage holds values that are no tensors."""
    for buffer in members(replay_buffer) or [replay_buffer]:
        stored: Any = getattr(buffer._storage, "_storage", None)
        if is_tensor_collection(stored) and any(map(_is_python_leaf, stored.values(True))):
            return True
    return False


def _is_python_leaf(value: Any) -> bool:
    return is_non_tensor(value) and not isinstance(value, MetaData)


def state_of(replay_buffer: Any) -> dict[str, Any]:
    """The states of a buffer's parts, of plain values and tensors."""
    generator = replay_buffer._rng
    transform = replay_buffer._transform
    return {
        "sampler": dict(replay_buffer._sampler.state_dict()),
        "writer": None if members(replay_buffer) is not None else dict(replay_buffer._writer.state_dict()),
        "transform": dict(transform.state_dict()) if hasattr(transform, "state_dict") else None,
        "generator": None if generator is None else (generator.get_state(), str(generator.device)),
    }


def set_state(replay_buffer: Any, state: dict[str, Any]) -> None:
    """The opposite of `state_of`."""
    replay_buffer._sampler.load_state_dict(state["sampler"])
    if state["writer"] is not None:
        replay_buffer._writer.load_state_dict(state["writer"])
    if state["transform"] and hasattr(replay_buffer._transform, "load_state_dict"):
        replay_buffer._transform.load_state_dict(state["transform"])
    if state["generator"] is not None:
        values, device = state["generator"]
        generator = torch.Generator(device)
        generator.set_state(values)
        replay_buffer.set_rng(generator=generator)
