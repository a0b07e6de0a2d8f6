"""A buffer dataset in data-loader workers: which batches each gives, and what cannot go there."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, cast

import torch.utils.data

from torchrl_trl_bridge.buffers.sampling import Share, seed_of
from torchrl_trl_bridge.compat import torchrl as compat

if TYPE_CHECKING:
    from torchrl_trl_bridge.buffers.ranks import RanksOf

_ALTERNATIVES = (
    "Give the data loader num_workers=0 (reading a buffer in memory needs no workers), or "
    'multiprocessing_context="fork" where the system has it'
)


def in_worker() -> bool:
    """Whether this process is a data-loader worker."""
    return torch.utils.data.get_worker_info() is not None


def of_worker() -> Share:
    """The share of the data-loader worker that this process is, or the whole stream outside of one."""
    worker = torch.utils.data.get_worker_info()
    return Share() if worker is None else Share(worker.id, worker.num_workers)


def worker_seed(passes: int) -> int:
    """A seed that the workers of one data loader share, new each time the loader is iterated.

    Args:
        passes: how often this worker has iterated before.
    """
    worker = torch.utils.data.get_worker_info()
    assert worker is not None
    return seed_of(worker.seed - worker.id, passes, 0)


def check_worker(replay_buffer: Any, ranks: RanksOf) -> None:
    """Checks that a worker's copy of a buffer can stand for the buffer.

    Raises:
        RuntimeError: if drawing from the buffer consumes its rows, if the buffer is a remote one, and in a process
            group of several ranks.
    """
    name = type(replay_buffer).__name__
    if compat.is_remote(replay_buffer):
        raise RuntimeError(
            f"a {name} cannot be read from a data-loader worker, which has no connection to Ray. Give the data loader "
            "num_workers=0: the buffer is in a process of its own already."
        )
    if compat.consumes_for_good(replay_buffer):
        raise RuntimeError(
            f"the sampler of the replay buffer ({name}) consumes the rows that it draws, but a data-loader worker "
            "draws from a copy: the buffer would keep them. Give the data loader num_workers=0, or the buffer another "
            "sampler."
        )
    if ranks.several:
        raise RuntimeError(
            "in a process group of several ranks, rank 0 draws the rows of all of them, and a data-loader worker "
            "cannot hear it. Give the data loader num_workers=0 (dataloader_num_workers=0 in a trainer's arguments)."
        )


def sendable_buffer(replay_buffer: Any) -> Any:
    """The buffer as it is pickled: without the batches that it drew ahead.

    Raises:
        RuntimeError: if it is to be sent to a worker, and its storage stays where it is.
    """
    if get_spawning_popen() is not None:
        storage = compat.stays_in_its_process(replay_buffer)
        if storage is not None:
            raise RuntimeError(
                f"a {storage} cannot be sent to another process, as the start methods spawn and forkserver do. "
                f"{_ALTERNATIVES}, or keep the rows in a LazyTensorStorage or LazyMemmapStorage."
            )
        for part, value in compat.sent_parts(replay_buffer):
            _check_sendable(part, value)
    return compat.without_prefetched(replay_buffer)


class _Trial:
    """Stands in for the process being started: nothing of what is pickled on trial is to be handed to that."""

    DupFd = staticmethod(int)

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor


def _check_sendable(part: str, value: Any) -> None:
    starting = get_spawning_popen()
    set_spawning_popen(cast(Any, _Trial()))
    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        raise RuntimeError(
            f"the {part} of the replay buffer ({type(value).__name__}) cannot be sent to another process, as the start "
            f"methods spawn and forkserver do: {error}. {_ALTERNATIVES}."
        ) from error
    finally:
        set_spawning_popen(starting)
