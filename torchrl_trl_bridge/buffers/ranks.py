"""One stream for all ranks of a process group: rank 0 draws, and tells the others what it drew.

accelerate lets each rank iterate the whole stream and keep its slice, so that all ranks must see one and the same row
sequence. Rank 0 alone draws. It never waits for another rank to take what it tells: trainers let rank 0 look at the
first row before the others may (``main_process_first``), and would stop there. A thread does the waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import pickle
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch

from torchrl_trl_bridge.buffers.fingerprints import difference
from torchrl_trl_bridge.buffers.packing import FIRST_FRAME, framed, next_frame_size, pack, too_large, unpack
from torchrl_trl_bridge.buffers.sampling import Batch
from torchrl_trl_bridge.compat.torch import World, open_side_group, world
from torchrl_trl_bridge.rollouts import Column

Batches = Iterator[Batch]

MESSAGES_AHEAD = 128
"""How far rank 0 may run ahead. A look through a batched ``map`` draws a thousand rows before the others draw any."""

CONFIRMATION_SECONDS = 10.0
"""How long rank 0 waits after the first row of a stream for the others to agree. Later it only looks.

That long in vain once: a trainer that lets rank 0 look at rows before the others may does so several times.
"""

_LOOK_SECONDS = 0.25
_UNDER_WAY = 8

_opened = 0


class Ranks(Protocol):
    """This rank's part in telling all ranks the same."""

    draws: bool

    def stream(self, draw: Callable[[], Batches], describe: Callable[[], dict[str, Any]]) -> Batches:
        """The batches of one stream; ``draw`` draws them, on rank 0, ``describe`` says what must not differ."""

    def agree(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives, or raises, on rank 0."""

    def confirm(self) -> None:
        """Gives the other ranks time to agree with the first batch of a stream."""


class RanksOf:
    """The part of this process, found when it is asked for: the process group may be made after the dataset."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._ranks: Ranks | None = None
        self._was_one_of_several = False

    @property
    def several(self) -> bool:
        """Whether this process, or the one that sent it the dataset, is one of several ranks."""
        return self._was_one_of_several or world() is not None

    def alone(self) -> RanksOf:
        """What a copy in another process begins with."""
        copy = RanksOf()
        copy._was_one_of_several = self.several
        return copy

    def get(self, patience: float | None) -> Ranks | None:
        """None where this process is on its own.

        Args:
            patience: seconds that rank 0 may wait for rows.
        """
        current = world()
        if current is None:
            return None
        if self._ranks is None or self._world is None or self._world.group is not current.group:
            global _opened
            name = f"torchrl_trl_bridge/{_opened}"
            _opened += 1
            timeout = current.timeout + timedelta(seconds=patience or 0)
            self._world = current
            self._ranks = (Follower if current.rank else Leader)(current, name, timeout)
        return self._ranks


class Leader:
    """Rank 0: draws, and tells."""

    draws = True

    def __init__(self, world: World, name: str, timeout: timedelta) -> None:
        self._outbox = _Outbox(world, timeout)
        self._number = 0
        self._outbox.thread = threading.Thread(target=_send, args=(self._outbox, name), name=name, daemon=True)
        self._outbox.thread.start()
        weakref.finalize(self, self._outbox.close).atexit = False
        _OUTBOXES.add(self._outbox)

    def agree(self, compute: Callable[[], Any]) -> Any:
        head: dict[str, Any] = {"kind": "answer", "stream": self._number}
        try:
            value = compute()
        except Exception as error:
            self._outbox.put(head | {"error": _sendable(error)})
            raise
        self._outbox.put(head | {"value": value})
        return value

    def stream(self, draw: Callable[[], Batches], describe: Callable[[], dict[str, Any]]) -> Batches:
        self._number += 1
        number, batches = self._number, 0
        outbox = self._outbox
        head: dict[str, Any] = {"stream": number}
        outbox.number = number
        try:
            head["described"] = describe()
            for batch in draw():
                outbox.check(number, batches)
                about = {"kind": "batch", "number": batch.number, "start": batch.start}
                outbox.put(head | about, batch.columns, batches)
                head = {"stream": number}
                batches += 1
                yield batch
        except GeneratorExit:
            outbox.leave(number, batches)
            raise
        except Exception as error:
            if outbox.faulty != number:
                outbox.put(head | {"kind": "error", "error": _sendable(error)}, batches=batches - 1)
            raise
        outbox.put(head | {"kind": "end"}, batches=batches - 1)
        outbox.wait_until_read(number, batches)

    def confirm(self) -> None:
        self._outbox.wait_until_seen(self._number)


class Follower:
    """Any other rank: hears what rank 0 drew."""

    draws = False

    def __init__(self, world: World, name: str, timeout: timedelta) -> None:
        self._rank, self._timeout = world.rank, timeout
        self._group, self._store = open_side_group(world, name, timeout)
        self._number = 0
        self._awaited: tuple[torch.Tensor, Any] | None = None
        self._frame_size = FIRST_FRAME
        self._early: deque[Any] = deque()

    def agree(self, compute: Callable[[], Any]) -> Any:
        head, columns = self._receive(self._number)
        if head["kind"] != "answer":  # rank 0 did not ask: it knew nothing either
            self._early.append((head, columns))
            return None
        if "error" in head:
            raise head["error"]
        return head["value"]

    def stream(self, draw: Callable[[], Batches], describe: Callable[[], dict[str, Any]]) -> Batches:
        self._number += 1
        number, batches = self._number, 0
        try:
            while True:
                head, columns = self._receive(number)
                if head["kind"] == "answer":
                    continue
                if "described" in head:
                    self._compare(number, describe(), head["described"])
                if head["kind"] == "end":
                    self._report(number, "end", batches)
                    return
                if head["kind"] == "error":
                    raise head["error"]
                assert columns is not None
                batches += 1
                yield Batch(head["number"], columns, head["start"])
        except GeneratorExit:
            self._report(number, "left", batches)
            raise

    def confirm(self) -> None:
        """Rank 0 waits for this one, not the other way round."""

    def _compare(self, number: int, mine: dict[str, Any], leaders: dict[str, Any]) -> None:
        what = difference(leaders, mine, self._rank)
        self._report(number, "differs" if what else "agrees", 0, what)
        if what:
            raise RuntimeError(_disagreement(what))

    def _report(self, number: int, state: str, batches: int, what: str | None = None) -> None:
        report = json.dumps({"stream": number, "state": state, "batches": batches, "what": what})
        self._store.set(f"rank{self._rank}", report)

    def _receive(self, number: int) -> Any:
        """The next message of a stream, past what is left of those before."""
        while True:
            message = self._early.popleft() if self._early else unpack(self._next_message())
            stream = message[0]["stream"]
            if stream > number:
                self._early.appendleft(message)
                raise RuntimeError(
                    f"rank 0 has left iteration {number} of this dataset and begun iteration {stream}; rank "
                    f"{self._rank} is still in {number}. Every rank has to iterate it alike."
                )
            if stream == number:
                return message

    def _next_message(self) -> torch.Tensor:
        # A frame that was waited for in vain is waited for again: it will take what rank 0 says next.
        if self._awaited is None:
            frame = torch.empty(self._frame_size, dtype=torch.uint8)
            self._awaited = frame, self._group.broadcast(frame, 0)
        message, work = self._awaited
        try:
            _finish(work, self._timeout, self._check_leader)
            self._awaited = None
            if size := too_large(message):
                message = torch.empty(size, dtype=torch.uint8)
                self._frame_size = next_frame_size(self._frame_size, size)
                _finish(self._group.broadcast(message, 0), self._timeout, lambda: None)
        except _LostError as error:
            raise self._lost(error) from error
        return message

    def _check_leader(self) -> None:
        if not self._store.check(["rank0"]):
            return
        left = json.loads(self._store.get("rank0"))
        if left["stream"] == self._number and "fault" in left:
            raise RuntimeError(left["fault"])
        if left["stream"] == self._number:
            raise RuntimeError(
                f"rank 0 has stopped iterating after {left['batches']} batches; rank {self._rank} asks for more. "
                "Every rank has to iterate the dataset alike."
            )

    def _lost(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"rank {self._rank} heard nothing from rank 0, which draws the rows of all ranks: it has died, or does not "
            f"iterate this dataset, which every rank has to iterate alike (with accelerate: dispatch_batches=False). "
            f"Waited up to {self._timeout.total_seconds():g} s. {error}"
        )


class _Outbox:
    """What rank 0 has to tell, and what the others reported. Shared by the main thread and the one that sends."""

    def __init__(self, world: World, timeout: timedelta) -> None:
        self.world, self.timeout = world, timeout
        self._frame_size = FIRST_FRAME
        self.messages: queue.Queue[list[torch.Tensor] | str] = queue.Queue(MESSAGES_AHEAD)
        self.closed = False
        self.thread: threading.Thread | None = None
        self.keeps: Any = None
        self.notice: str | None = None
        self.number = self.faulty = 0
        self._patience = CONFIRMATION_SECONDS
        self.reports: dict[int, dict[str, Any]] = {}
        self.changed = threading.Condition()
        self.eager = False
        self.failure: Exception | None = None

    def put(self, head: dict[str, Any], columns: dict[str, Column] | None = None, batches: int = -1) -> None:
        """Lets the others be told this, which comes after so many batches; waits while too much is to be told."""
        packed = pack(head, columns, room=self._frame_size)
        message = framed(packed, self._frame_size)
        self._frame_size = next_frame_size(self._frame_size, packed.numel())
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            self._raise_failure()
            try:
                return self.messages.put(message, timeout=_LOOK_SECONDS)
            except queue.Full:
                self.check(self.number, batches)
                if time.monotonic() > deadline:
                    raise self._fault(self._silent("take no more batches")) from None

    def leave(self, number: int, batches: int) -> None:
        """Lets whoever asks for more know, in the store: nobody may be there to take a message."""
        with contextlib.suppress(queue.Full):
            self.messages.put_nowait(json.dumps({"stream": number, "batches": batches}))

    def _fault(self, what: str) -> RuntimeError:
        """An error that all others are told of at once, although one of them may take no more messages."""
        self.faulty = self.number
        self.notice = json.dumps({"stream": self.number, "fault": what})
        self.wake()
        return RuntimeError(what)

    def close(self) -> None:
        self.closed = True
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(queue.Full):
            self.messages.put_nowait("")

    def check(self, number: int, batches: int) -> None:
        """Raises if another rank disagrees, or has stopped before the batch of this number."""
        self._raise_failure()
        for rank, report in sorted(self.reports.items()):
            if report["state"] == "differs":
                raise self._fault(_disagreement(report["what"]))
            if report["state"] == "left" and report["stream"] == number and report["batches"] <= batches:
                raise self._fault(
                    f"rank {rank} has stopped iterating after {report['batches']} batches; rank 0 goes on. "
                    "Every rank has to iterate the dataset alike."
                )

    def wait_until_seen(self, number: int) -> None:
        if self._wait(lambda: all(report["stream"] >= number for report in self._all_reports()), self._patience):
            self._patience = CONFIRMATION_SECONDS
            self.check(number, 1)
        else:
            self._patience = _LOOK_SECONDS
        self._raise_failure()

    def wait_until_read(self, number: int, batches: int) -> None:
        def read() -> bool:
            reports = self._all_reports()
            return all((r["stream"], r["state"] != "agrees") >= (number, True) for r in reports)

        def stopped() -> bool:
            return any(
                (r["stream"], r["state"]) == (number, "left") and r["batches"] < batches for r in self._all_reports()
            )

        done = self._wait(lambda: stopped() or read(), self.timeout.total_seconds())
        self.check(number, batches - 1)
        if not done:
            raise self._fault(self._silent("have not taken all batches"))

    def _all_reports(self) -> list[dict[str, Any]]:
        nothing = {"stream": 0, "state": "nothing"}
        return [self.reports.get(rank, nothing) for rank in range(1, self.world.size)]

    def _wait(self, predicate: Callable[[], bool], seconds: float) -> bool:
        self.eager = True
        self.wake()
        try:
            with self.changed:
                return self.changed.wait_for(
                    lambda: self.failure is not None or self._disagrees() or predicate(), seconds
                )
        finally:
            self.eager = False

    def _disagrees(self) -> bool:
        return any(report["state"] == "differs" for report in self.reports.values())

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self._fault(self._silent(f"cannot be told ({self.failure})")) from self.failure

    def _silent(self, what: str) -> str:
        return (
            f"rank 0 draws the rows of all {self.world.size} ranks, but others {what}: they have died, or do not "
            "iterate this dataset, which every rank has to iterate alike (with accelerate: dispatch_batches=False). "
            f"Waited up to {self.timeout.total_seconds():g} s."
        )


_OUTBOXES: weakref.WeakSet[_Outbox] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that is inside torch when the interpreter ends would end the process with SIGABRT.
    for outbox in list(_OUTBOXES):
        outbox.close()
        if outbox.thread is not None:
            outbox.thread.join(5)


def _send(outbox: _Outbox, name: str) -> None:
    """Sends the messages of an outbox, one after the other, and collects the reports of the other ranks."""
    try:
        group, store = open_side_group(outbox.world, name, outbox.timeout)
        outbox.keeps = group  # its end waits for the other ranks: leave that to the end of the process

        def look() -> None:
            if outbox.closed:
                raise _LostError("the dataset is gone")
            if outbox.notice is not None:
                store.set("rank0", outbox.notice)
                outbox.notice = None
            _collect(outbox, store)

        looked = 0.0
        under_way: deque[Any] = deque()
        while True:
            # Each wait ends with one for the interpreter, which the main thread keeps busy: several messages are sent
            # at a time.
            while len(under_way) > _UNDER_WAY or (under_way and outbox.messages.empty()):
                _finish(under_way.popleft(), outbox.timeout, look)
            try:
                message = outbox.messages.get(timeout=0.002 if outbox.eager else _LOOK_SECONDS)
            except queue.Empty:
                message = ""
            if isinstance(message, list):
                under_way += [group.broadcast(part, 0) for part in message]
            elif message:
                store.set("rank0", message)
            elif outbox.closed:
                return
            if outbox.eager or outbox.notice is not None or time.monotonic() - looked > _LOOK_SECONDS:
                look()
                looked = time.monotonic()
    except Exception as error:
        with outbox.changed:
            outbox.failure = error
            outbox.changed.notify_all()


class _LostError(Exception):
    """A message could not be sent or received."""


def _finish(work: Any, timeout: timedelta, look: Callable[[], None]) -> None:
    """Waits for an operation of a group, and looks around from time to time."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            work.wait(timedelta(seconds=_LOOK_SECONDS))
            return
        except RuntimeError as error:
            if work.is_completed() or time.monotonic() > deadline:
                raise _LostError(str(error)) from error
        look()


def _collect(outbox: _Outbox, store: Any) -> None:
    found = {}
    for rank in range(1, outbox.world.size):
        if outbox.reports.get(rank, {}).get("state") != "differs" and store.check([f"rank{rank}"]):
            found[rank] = json.loads(store.get(f"rank{rank}"))
    with outbox.changed:
        outbox.reports.update(found)
        outbox.changed.notify_all()


def _disagreement(what: str) -> str:
    return (
        f"the ranks of this run do not iterate the same dataset: {what}. Rank 0 draws the rows of all ranks: make the "
        "same dataset on each of them, and either fill the buffer on rank 0 only, or alike on all (a RolloutRecorder "
        "does so with ranks='first')."
    )


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} on rank 0: {error}")
    return error
