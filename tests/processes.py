"""Ranks of a process group, as processes of this machine."""

from __future__ import annotations

import contextlib
import datetime
import functools
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(
    function: Callable[..., Any], rank: int, size: int, port: int, timeout: float, answers: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        answers.put((rank, function(rank, *args), None))
        with contextlib.suppress(RuntimeError):  # one of them may be dead
            dist.barrier()  # rank 0 keeps the store of all
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 30, dying: int | None = None
) -> Any:
    """What ``function(rank, *args)`` gives in each of ``size`` ranks of a gloo group.

    Args:
        function: what each rank calls, in a fork of this process.
        size: number of ranks.
        timeout: that of the process group, in seconds.
        dying: a rank that is not expected to answer.
    """
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=functools.partial(_rank, function, rank, size, port, timeout, answers, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    given = {}
    try:
        for _ in range(size - (dying is not None)):
            rank, answer, error = answers.get(timeout=120)
            if error is not None:
                pytest.fail(f"rank {rank}:\n{error}")
            given[rank] = answer
    finally:
        for process in processes:
            process.join(20 if len(given) == size else 1)
            process.kill()
    return [given.get(rank) for rank in range(size)]
