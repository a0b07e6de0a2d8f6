"""Draws batches from a replay buffer: how many, by which seed, for which data-loader worker, and waiting for rows."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.utils.data

from torchrl_trl_bridge.compat import torchrl as compat

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Draws:
    """How a stream draws its batches.

    Args:
        batch_size: rows a batch.
        num_batches: batches in all, over all workers; None for no end.
        seed: makes the stream a function of ``(seed, epoch)``. None draws as the buffer itself does.
        timeout: seconds to wait for an empty buffer; None raises at once.
    """

    batch_size: int
    num_batches: int | None
    seed: int | None
    timeout: float | None


@dataclass(frozen=True)
class Share:
    """Which batches of a stream are for this consumer: each ``count``-th, from ``index`` on."""

    index: int = 0
    count: int = 1


def of_worker() -> Share:
    """The share of the data-loader worker that this process is, or the whole stream outside of one."""
    worker = torch.utils.data.get_worker_info()
    return Share() if worker is None else Share(worker.id, worker.num_workers)


def loses_unused_rows(replay_buffer: Any, draws: Draws) -> bool:
    """Whether rows that were drawn for a stream, and not used, are lost to the streams after it."""
    own_place = draws.seed is not None and compat.private_sampler(replay_buffer) is not None
    return not own_place and compat.consumes(replay_buffer)


def draw_batches(replay_buffer: Any, draws: Draws, *, epoch: int, share: Share, start: int = 0) -> Iterator[Any]:
    """Draws the batches of one stream.

    Args:
        replay_buffer: the buffer.
        draws: what to draw.
        epoch: with a seed, each epoch has draws of its own.
        share: which of the batches to draw here.
        start: number of the first batch.

    Yields:
        Batches as the buffer samples them; of an ensemble, a list of rows.

    Raises:
        RuntimeError: if the buffer is empty, or its sampler cannot serve a batch, and there is no timeout.
        TimeoutError: if that is still so after the timeout.
    """
    seed = _seed_in_worker() if draws.seed is None else draws.seed
    sampler = None if seed is None else compat.private_sampler(replay_buffer)
    ensemble = compat.members(replay_buffer) is not None
    counter = itertools.count(start) if draws.num_batches is None else range(start, draws.num_batches)
    for number in counter:
        ours = number % share.count == share.index
        if not ours and sampler is None:
            continue
        wait_for_rows(replay_buffer, draws)
        if seed is None:
            batch = replay_buffer.sample(draws.batch_size)
        else:
            # A pass without replacement is shared out: each worker draws all of it, and keeps its batches.
            batch, sampler = compat.sample_seeded(
                replay_buffer, draws.batch_size, _seed_of(seed, epoch, number), sampler
            )
        if ours:  # an ensemble gives a batch of batches, one a member, which may differ in their keys
            yield [row for part in batch.unbind(0) for row in part.unbind(0)] if ensemble else batch


def wait_for_rows(replay_buffer: Any, draws: Draws) -> None:
    """Returns as soon as the buffer can serve a batch; raises as `draw_batches` says otherwise."""
    if compat.can_sample(replay_buffer, draws.batch_size):
        return
    if draws.timeout is None:
        raise RuntimeError(
            f"{_state(replay_buffer, draws)}. Fill it before iterating, or pass timeout=<seconds> to wait for rows."
        )
    deadline = time.monotonic() + draws.timeout
    while time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, draws.timeout))
        if compat.can_sample(replay_buffer, draws.batch_size):
            return
    raise TimeoutError(
        f"waited {draws.timeout:g} s for rows: {_state(replay_buffer, draws)}. Is its collector still running?"
    )


def _state(replay_buffer: Any, draws: Draws) -> str:
    rows = compat.row_count(replay_buffer)
    name = type(replay_buffer).__name__
    if rows == 0:
        return f"the replay buffer ({name}) is empty"
    return (
        f"the replay buffer ({name}) holds {rows} rows, but its sampler cannot draw a batch of {draws.batch_size} "
        "from them (consumed, stale or too few)"
    )


def _seed_in_worker() -> int | None:
    """A seed that the workers of one data loader share, new each time the loader is iterated.

    Without one, each worker would draw with its own copy of the buffer's generator, all alike.
    """
    worker = torch.utils.data.get_worker_info()
    return None if worker is None else worker.seed - worker.id


def _seed_of(seed: int, epoch: int, number: int) -> int:
    """Mixes the position of a batch into the seed, so that neighbouring seeds and epochs share no draws."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # generators take 63 bits
