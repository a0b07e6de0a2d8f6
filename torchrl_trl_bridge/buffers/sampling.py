"""Draws batches from a replay buffer: how many, by which seed, for which consumer, and waiting for rows."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchrl_trl_bridge.compat import torchrl as compat
from torchrl_trl_bridge.rollouts import Column

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

    def seeded(self, seed: int) -> Draws:
        """The same with a seed."""
        return replace(self, seed=seed)


@dataclass(frozen=True)
class Batch:
    """The columns of a batch, by flat name, its number in the stream, and the position of its first row to give.

    ``sampler`` is the state of the stream's own sampler after the draw, where it has one.
    """

    number: int
    columns: dict[str, Column]
    start: int = 0
    sampler: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """The number of rows."""
        return max((len(column.values) for column in self.columns.values()), default=0)


@dataclass(frozen=True)
class Share:
    """Which batches of a stream are for this consumer: each ``count``-th, from ``index`` on."""

    index: int = 0
    count: int = 1


def loses_unused_rows(replay_buffer: Any, draws: Draws) -> bool:
    """Whether rows that were drawn for a stream, and not used, are lost to the streams after it."""
    own_place = draws.seed is not None and compat.private_sampler(replay_buffer) is not None
    return not own_place and compat.consumes(replay_buffer)


def draw_batches(
    replay_buffer: Any,
    draws: Draws,
    *,
    epoch: int,
    share: Share,
    start: int = 0,
    sampler_state: dict[str, Any] | None = None,
) -> Iterator[tuple[int, Any, dict[str, Any] | None]]:
    """Draws the batches of one stream.

    Args:
        replay_buffer: the buffer.
        draws: what to draw.
        epoch: with a seed, each epoch has draws of its own.
        share: which of the batches to draw here.
        start: number of the first batch. With a seed the batches before it need no draw.
        sampler_state: the third of what was yielded with the batch before. Without it a sampler that keeps a place gets
            to the one that it would have had, had the buffer always held what it holds now.

    Yields:
        The numbers of the batches; these as the buffer samples them (of an ensemble, a list of rows); and the state of
        the stream's own sampler, where it has one.

    Raises:
        RuntimeError: if the buffer is empty, or its sampler cannot serve a batch, and there is no timeout.
        TimeoutError: if that is still so after the timeout.
    """
    seed = draws.seed
    sampler = None if seed is None else compat.private_sampler(replay_buffer)
    ensemble = compat.members(replay_buffer) is not None
    if sampler is not None and sampler_state is not None:
        sampler.load_state_dict(sampler_state)
    elif seed is not None and sampler is not None and start:
        seeds = [seed_of(seed, epoch, number) for number in range(start)]
        sampler = compat.advance_seeded(replay_buffer, draws.batch_size, seeds, sampler)
    counter = itertools.count(start) if draws.num_batches is None else range(start, draws.num_batches)
    for number in counter:
        ours = number % share.count == share.index
        if not ours and sampler is None:
            continue
        if seed is None:
            batch = _patiently(replay_buffer, draws, lambda: compat.sample(replay_buffer, draws.batch_size))
        else:
            # A pass without replacement is shared out: each worker draws all of it, and keeps its batches.
            def draw(number: int = number, seed: int = seed) -> Any:
                nonlocal sampler
                batch, sampler = compat.sample_seeded(
                    replay_buffer, draws.batch_size, seed_of(seed, epoch, number), sampler
                )
                return batch

            batch = _patiently(replay_buffer, draws, draw)
        if ours:  # an ensemble gives a batch of batches, one a member, which may differ in their keys
            rows = [row for part in batch.unbind(0) for row in part.unbind(0)] if ensemble else batch
            yield number, rows, None if sampler is None else dict(sampler.state_dict())


def _patiently(replay_buffer: Any, draws: Draws, draw: Callable[[], Any]) -> Any:
    """What ``draw`` gives, as soon as that is not None."""
    while (batch := draw()) is None:
        wait_for_rows(replay_buffer, draws)
    return batch


def wait_for_rows(replay_buffer: Any, draws: Draws, *, drawing: bool = True) -> None:
    """Returns as soon as the buffer can serve a batch; raises as `draw_batches` says otherwise.

    Args:
        replay_buffer: the buffer.
        draws: how large a batch, and how long to wait.
        drawing: whether the sampler has to serve it. Reading rows in their order needs rows only.
    """

    def ready() -> bool:
        return compat.can_sample(replay_buffer, draws.batch_size) if drawing else compat.row_count(replay_buffer) > 0

    if ready():
        return
    if draws.timeout is None:
        raise RuntimeError(
            f"{_state(replay_buffer, draws)}. Fill it before iterating (load_buffer does from a "
            "checkpoint), or pass timeout=<seconds> to wait for rows."
        )
    deadline = time.monotonic() + draws.timeout
    while time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, draws.timeout))
        if ready():
            return
    raise TimeoutError(
        f"waited {draws.timeout:g} s for rows: {_state(replay_buffer, draws)}. Is its collector still running?"
    )


def _state(replay_buffer: Any, draws: Draws) -> str:
    rows = compat.row_count(replay_buffer)
    name = type(replay_buffer).__name__
    if rows == 0:
        return f"the replay buffer ({name}) is empty"
    reason = compat.reason_not_to_sample(replay_buffer, draws.batch_size)
    return (
        f"the replay buffer ({name}) holds {rows} rows, but its sampler cannot draw a batch of {draws.batch_size} "
        f"from them (consumed, stale or too few). It says: {reason}"
    )


def seed_of(seed: int, epoch: int, number: int) -> int:
    """Mixes the position of a batch into the seed, so that neighbouring seeds and epochs share no draws."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # generators take 63 bits
