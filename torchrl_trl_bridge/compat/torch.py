"""What torch's data loader needs to be told about datasets on a replay buffer, and its process groups asked."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data

__all__ = ["World", "fork_workers_of", "open_side_group", "world"]

_FORKED: tuple[type, ...] = ()


def fork_workers_of(dataset_type: type) -> None:
    """Makes data loaders fork their workers for datasets of this type, unless they are told a start method.

    ``import torchrl`` (0.11 to 0.14) sets the start method of the whole process to spawn. A data loader follows it, and
    then a script without ``if __name__ == "__main__":`` starts itself again in each worker, and what TRL's trainers put
    into their datasets and collators, local functions, cannot be sent to one. The start method itself stays as it is:
    TorchRL's collectors rely on it. Instead the data loader gets ``multiprocessing_context="fork"``, its default on
    Linux, where all of this holds:

    - it has workers, and was given no ``multiprocessing_context``;
    - its dataset, or one that this wraps, is of a type named here;
    - the start method is spawn, this system can fork, and CUDA is not in use, which does not survive a fork.

    Can go when torchrl leaves the start method alone.
    """
    global _FORKED
    if not _FORKED:
        _wrap_data_loader()
    if dataset_type not in _FORKED:
        _FORKED += (dataset_type,)


def _wrap_data_loader() -> None:
    data_loader: Any = torch.utils.data.DataLoader
    original = data_loader.__init__
    parameters = list(inspect.signature(original).parameters)
    # Positions are read below. torch 2.5 to 2.13.
    expected = ["self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers"]
    if parameters[:7] != expected or parameters.index("multiprocessing_context") != 12:
        raise RuntimeError(
            f"torch {torch.__version__} has another DataLoader than expected: {parameters}. Use a torch that this "
            "package was tested with: `torchrl-trl-bridge doctor` lists them."
        )

    @functools.wraps(original)
    def __init__(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        workers = kwargs.get("num_workers", args[4] if len(args) > 4 else 0)
        told = len(args) > 10 or kwargs.get("multiprocessing_context") is not None
        if workers and not told and _is_forked(dataset) and _can_fork():
            kwargs["multiprocessing_context"] = "fork"
        original(self, dataset, *args, **kwargs)

    data_loader.__init__ = __init__


def _is_forked(dataset: Any) -> bool:
    for _ in range(8):  # accelerate and others wrap a dataset in one of their own
        if dataset is None or isinstance(dataset, _FORKED):
            break
        dataset = getattr(dataset, "dataset", None)
    return isinstance(dataset, _FORKED)


def _can_fork() -> bool:
    return (
        multiprocessing.get_start_method(allow_none=True) == "spawn"
        and "fork" in multiprocessing.get_all_start_methods()
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    )


@dataclass(frozen=True)
class World:
    """The process group that this process is part of."""

    group: Any
    rank: int
    size: int
    timeout: timedelta


def world() -> World | None:
    """The default process group, or None where there is none or this process is alone in it."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group: Any = dist.group.WORLD
    return World(group, dist.get_rank(), dist.get_world_size(), _timeout_of(group))


def _timeout_of(group: Any) -> timedelta:
    # The timeout that a group was made with has no public getter (torch 2.5 to 2.13).
    for kind in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError, ValueError):
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)  # torch's default


def open_side_group(world: World, name: str, timeout: timedelta) -> tuple[Any, Any]:
    """A gloo group of the same ranks, for messages whose order is no matter to the trainer's own, and its store.

    ``torch.distributed.new_group`` would do, but has to be called by all ranks in the order of all other groups, and
    waits for them: one rank that looks at its data before the others would stop there. This may be called in a thread.
    """
    # The default store has no public getter (torch 2.5 to 2.13). Its clone has a connection of its own, so that waiting
    # in one thread does not keep others from asking.
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    store = c10d.PrefixStore(name, store.clone() if hasattr(store, "clone") else store)
    return c10d.ProcessGroupGloo(store, world.rank, world.size, timeout), store
