"""The rows of a buffer dataset, iteration by iteration: drawn here or on rank 0, kept where unused, resumed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchrl_trl_bridge.buffers.fingerprints import describe
from torchrl_trl_bridge.buffers.ranks import Ranks, RanksOf
from torchrl_trl_bridge.buffers.sampling import Batch, Draws, Share, draw_batches, loses_unused_rows
from torchrl_trl_bridge.buffers.transfer import to_rows
from torchrl_trl_bridge.buffers.workers import check_worker, in_worker, worker_seed
from torchrl_trl_bridge.compat.accelerate import dispatches
from torchrl_trl_bridge.compat.exchanging import may_give_stored_rows
from torchrl_trl_bridge.rollouts import Column

STATE_VERSION = 1


def new_place() -> dict[str, Any]:
    """The beginning of an iteration.

    A place says which row of which batch comes next. The draws of a buffer that grows cannot be repeated: ``drawn``
    holds the columns of that batch, ``sampler`` the state of a seeded stream's own sampler after it. In data-loader
    workers, whose buffers stay as they are, both are None; ``seed`` is what those drew with.
    """
    return {"version": STATE_VERSION, "batch": 0, "row": 0, "seed": None, "drawn": None, "sampler": None}


class Stream:
    """Gives rows, and knows where it is.

    Args:
        replay_buffer: the buffer.
        draws: what to draw from it.
        read: gives the columns of a batch, by flat name; ``first`` says that it is the first of an iteration.
        device: where tensors go.
        settings: what must not differ between the ranks of a run, by the name that the user knows it by.
    """

    def __init__(
        self,
        replay_buffer: Any,
        draws: Draws,
        read: Callable[..., dict[str, Column]],
        device: torch.device | None,
        settings: dict[str, Any],
    ) -> None:
        self.replay_buffer, self._draws, self._read, self._device = replay_buffer, draws, read, device
        self._settings = settings
        self._unused: deque[Batch] = deque()
        self._ranks = RanksOf()
        self._passes = 0
        self._place: dict[str, Any] = new_place()
        self._resume: dict[str, Any] | None = None
        self.record: Record | None = None

    def rows(
        self,
        *,
        epoch: int,
        share: Share,
        names: Sequence[str] = (),
        scalars: bool = False,
        place: dict[str, Any] | None = None,
        keeps_looks: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """The rows of one iteration.

        Args:
            epoch: the epoch, for a seeded dataset.
            share: the part of the stream to give here.
            names: columns that each row has, whether the buffer holds them or not.
            scalars: give 0-d tensors as Python numbers and booleans.
            place: where to begin, kept up to date (see `new_place`); by default where `load_state_dict` says.
            keeps_looks: an iteration that is dropped after its first row was a look at the data, and that row is given
                again where the sampler would lose it.

        Raises:
            RuntimeError: if a batch holds no rows, as that of a transform which drops them.
        """
        if in_worker():
            check_worker(self.replay_buffer, self._ranks)
        ranks = self._ranks_at_work()
        place = self._begin(epoch) if place is None else place
        keeps = not in_worker() and loses_unused_rows(self.replay_buffer, self._draws)
        batches: Iterator[Batch]
        if ranks is None:
            batches = self._draw(epoch, share, place, keeps)
        else:
            batches = ranks.stream(
                lambda: self._draw(epoch, share, place, keeps), lambda: describe(self.replay_buffer, self._settings)
            )
        repeats = in_worker()
        keeps = keeps and (ranks is None or ranks.draws)
        copies = keeps or may_give_stored_rows(self.replay_buffer)
        seen = dict.fromkeys(names)
        first = True
        for batch in batches:
            size = batch.size
            if not size:
                raise RuntimeError(
                    "a batch of the replay buffer holds no rows: has its transform dropped them all? Rows that are not "
                    "to be drawn should not be written."
                )
            columns = batch.columns
            if list(seen) != list(columns):
                nothing = Column([None] * size)
                columns = {name: columns.get(name, nothing) for name in {**seen, **columns}}
                seen = dict.fromkeys(columns)
            # Rows are views of the columns, which must stay as they are where they may be given again.
            rows = to_rows(columns, device=self._device, scalars=scalars, copy=copies or self.record is not None)
            if not repeats:
                place["drawn"] = {name: [c.metadata, c.values] for name, c in columns.items()}
                place["sampler"] = batch.sampler
            place["batch"], position, last = batch.number, batch.start, size - 1
            # Each row is let go of as it is given: Python's garbage collector looks at all that are there, again and
            # again, which took as long as making rows of 14 tensors does.
            rows = rows[batch.start :]
            rows.reverse()
            try:
                for position in range(batch.start, size):
                    if position < last:
                        place["row"] = position + 1
                    else:
                        place["batch"], place["row"], place["drawn"] = batch.number + 1, 0, None
                    yield rows.pop()
                    if first:
                        first = False
                        if ranks is not None:
                            ranks.confirm()
            except GeneratorExit:
                start = position if first and keeps_looks else position + 1
                if keeps and start <= last:
                    self._unused.append(Batch(0, columns, start))
                raise

    def _ranks_at_work(self) -> Ranks | None:
        """This rank's part where all ranks iterate the stream; None where one alone does."""
        return None if in_worker() or dispatches() else self._ranks.get(self._draws.timeout)

    def agreed(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives, or raises: on rank 0, where there are several ranks."""
        ranks = self._ranks_at_work()
        return compute() if ranks is None else ranks.agree(compute)

    def _begin(self, epoch: int) -> dict[str, Any]:
        resume, self._resume = self._resume, None
        self._place = resume if resume is not None and resume["epoch"] == epoch else new_place()
        self._place["epoch"] = epoch
        return self._place

    def _draw(self, epoch: int, share: Share, place: dict[str, Any], keeps: bool) -> Iterator[Batch]:
        """The batches that are drawn in this process."""
        start, row, sampler = place["batch"], place["row"], place["sampler"]
        record = self.record
        if place["drawn"] is not None:
            columns = {name: Column(values, meta) for name, (meta, values) in place["drawn"].items()}
            yield Batch(start, columns, row, sampler)
            start, row = start + 1, 0
        elif record is not None and not start:
            yield from record.begin(epoch, place)
            start, sampler = record.next, record.sampler
        elif keeps and not start and (unused := self._take_unused()):
            yield unused
            start = 0 if unused.start else 1  # a part of a batch comes on top
        draws = self._draws
        if draws.seed is None and in_worker():
            # Without a seed each worker would draw with its own copy of the buffer's generator, all alike. This one is
            # the same for all workers of a loader. Persistent workers keep it for all their passes.
            place["seed"] = worker_seed(self._passes) if place["seed"] is None else place["seed"]
            draws, epoch = draws.seeded(place["seed"]), 0
            self._passes += 1
        first = True
        drawing = draw_batches(self.replay_buffer, draws, epoch=epoch, share=share, start=start, sampler_state=sampler)
        for number, drawn, sampler in drawing:
            batch = Batch(number, self._read(drawn, first=first), row if number == start else 0, sampler)
            first = False
            if record is not None:
                record.add(batch)
            yield batch

    def _take_unused(self) -> Batch | None:
        try:  # of two iterators, one gets it
            return self._unused.popleft()
        except IndexError:
            return None

    def state_dict(self) -> dict[str, Any]:
        """The place of the latest iteration."""
        return copy.deepcopy(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration of that epoch begin at a place.

        Raises:
            ValueError: if it is no such place, or that of a newer release.
        """
        if not isinstance(state, dict):
            raise TypeError(f"the state of a TorchRLBufferDataset is a dict, what state_dict() gives, not {state!r}.")
        missing = [name for name in (*new_place(), "epoch") if name not in state]
        if missing:
            raise ValueError(f"this is no state of a TorchRLBufferDataset: it lacks {missing}.")
        if state["version"] > STATE_VERSION:
            raise ValueError(
                f"this state has version {state['version']}, of a newer torchrl-trl-bridge; this one reads versions up "
                f"to {STATE_VERSION}. Upgrade it."
            )
        self._resume = copy.deepcopy(state)

    def __getstate__(self) -> dict[str, Any]:
        # For a worker process: what this one drew stays here, and so do its connections to other ranks. The buffer goes
        # with the dataset.
        state = {**self.__dict__, "_unused": deque(), "replay_buffer": None}
        return {**state, "_ranks": self._ranks.alone(), "record": None, "_place": new_place()}


class Record:
    """The batches that a stream drew last, so that a resumed one gives the same although the buffer has moved on.

    A trainer that resumes lets the stream begin anew and skips what it has trained on. That is not drawn again.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._reset()
        self._replayed: list[Batch] | None = None
        self._skipped = 0

    def _reset(self) -> None:
        self.batches = []
        self._first_rows: dict[int, int] = {}  # of each batch, its first row's number in the stream
        self._next, self._end, self._base = 0, 0, 0
        self._consumed, self._marked = 0, 0
        self.sampler: dict[str, Any] | None = None
        """The state of the stream's own sampler after the last draw."""

    def begin(self, epoch: int, place: dict[str, Any]) -> Iterator[Batch]:
        """An iteration begins, with these batches of the resumed one, those long trained on as so many other rows."""
        self._epoch, self._place = epoch, place
        if self._replayed is None:
            self._reset()
            return
        batches, self._replayed = self._replayed, None
        for number in range(self._skipped):
            yield Batch(number, batches[0].columns)
        yield from batches

    @property
    def next(self) -> int:
        """The number of the next batch to draw."""
        return self._next

    def add(self, batch: Batch) -> None:
        """A batch was drawn."""
        self.batches.append(batch)
        self._first_rows[batch.number] = self._end
        self._next, self._end = batch.number + 1, self._end + batch.size
        self.sampler = batch.sampler

    def mark(self, consumed: int) -> None:
        """A trainer has taken a step.

        Args:
            consumed: how many of its own batches it took for it.
        """
        self._consumed += consumed
        # Forgets what was drawn two steps ago. The last batch drawn until then may have been given in part.
        self.batches = [batch for batch in self.batches if batch.number >= self._marked - 1]
        self._first_rows = {batch.number: self._first_rows[batch.number] for batch in self.batches}
        self._marked = self._next

    def state(self) -> dict[str, Any]:
        """What `resume` needs beside the batches: numbers, and tensors of the sampler's."""
        given = self._first_rows.get(self._place["batch"], self._end) + self._place["row"]
        return {
            "epoch": self._epoch,
            "next": self._next,
            "end": self._end,
            "base": self._base,
            "given": given,
            "consumed": self._consumed,
            "marked": self._marked,
            "first_rows": [self._first_rows[batch.number] for batch in self.batches],
            "sampler": self.sampler,
        }

    def resume(self, state: dict[str, Any], batches: list[Batch], *, skipping: bool) -> None:
        """Lets the next iteration give what the recorded one would have given.

        Args:
            state: what `state` gave.
            batches: the `batches` of then.
            skipping: whether the trainer will skip what it has trained on.

        Raises:
            ValueError: if the stream has no batches to go on from, or the row to go on from cannot be told.
        """
        if state["epoch"] or not batches:
            raise ValueError(
                f"the stream had ended {state['epoch']} times by this checkpoint, and a trainer counts what it skips "
                "from the first beginning. To resume, train from a stream without end: num_batches=None."
            )
        self._next, self._end, self._base = state["next"], state["end"], state["base"]
        self._consumed, self._marked = state["consumed"], state["marked"]
        self.sampler = state["sampler"]
        first_rows = state["first_rows"]
        self._first_rows = {batch.number: row for batch, row in zip(batches, first_rows, strict=True)}
        self.batches, self._replayed = batches, batches
        if skipping:
            self._skipped = batches[0].number
            return
        # The trainer has taken one batch more than it has trained on.
        trained, rest = divmod((state["given"] - self._base) * self._consumed, self._consumed + 1)
        trained += self._base
        if rest or trained < first_rows[0]:
            raise ValueError(
                f"the stream had given {state['given']} rows for {self._consumed + 1} batches of the trainer, so that "
                "the row to go on from cannot be told. Resume with ignore_data_skip=False."
            )
        starts = [max(trained - row, 0) for row in first_rows]
        self._replayed = [
            Batch(batch.number, batch.columns, start)
            for batch, start in zip(batches, starts, strict=True)
            if start < batch.size
        ]
        self._base, self._consumed = trained, 0
