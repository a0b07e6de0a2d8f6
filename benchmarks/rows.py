"""Rows a second of a buffer dataset, beside torchrl's own class and beside what a user writes by hand.

By hand is ``sample`` and ``unbind``. Of a ``LazyStackStorage`` that gives the stored tensors themselves, so that an
edit of a row is one of the buffer. The bridge's rows are dicts of copies; by hand with the same is measured too. The
stream goes on and on, as in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from measuring import Report, Times, Ways, in_turns, main
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens
from torchrl.modules.llm.trl_interop import TorchRLBufferDataset as TorchRLsOwn

from torchrl_trl_bridge import TorchRLBufferDataset

TOKENS = 512
ROWS = 4096


def filled(storage: type, rows: Any) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(storage=storage(len(rows)))
    replay_buffer.extend(rows)
    return replay_buffer


def dense(rows: int = ROWS) -> Any:
    return TensorDict({"input_ids": torch.randint(1000, (rows, TOKENS))}, [rows])


def ragged(rows: int = ROWS) -> Any:
    return lazy_stack([TensorDict({"input_ids": torch.randint(1000, (TOKENS - i % 64,))}) for i in range(rows)])


def rollouts(rows: int = 1024) -> Any:
    """Rollouts as a collector writes them, of one length and without text: 14 leaves, most in tensor classes."""

    def ids(length: int = TOKENS) -> torch.Tensor:
        return torch.randint(1000, (rows, length))

    half, yes = TOKENS // 2, torch.ones(rows, TOKENS, dtype=torch.bool)
    ended = {name: torch.ones(rows, 1, dtype=torch.bool) for name in ("done", "terminated")}
    batch = TensorDict({**ended, "next": TensorDict({**ended, "reward": torch.zeros(rows, 1, 1)}, [rows])}, [rows])
    batch["tokens"] = Tokens(full=ids(), prompt=ids(half), response=ids(half), batch_size=[rows])
    batch["masks"] = Masks(all_attention_mask=yes, all_assistant_mask=yes.clone(), batch_size=[rows])
    log_probs = {
        "full": torch.zeros(rows, TOKENS),
        "prompt": torch.zeros(rows, half),
        "response": torch.zeros(rows, half),
    }
    batch["log_probs"] = LogProbs(**log_probs, batch_size=[rows])
    return batch


def nested(rows: int = 1024) -> Any:
    """The same leaves in plain tensordicts."""
    return TensorDict({key: plain(value) for key, value in rollouts(rows).items()}, [rows])


def plain(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else value.to_tensordict()


def taking(rows: Iterable[Any], count: int) -> Callable[[], Any]:
    """Takes so many rows from a stream that goes on, and keeps none."""
    stream = iter(rows)

    def take() -> None:
        for _ in itertools.islice(stream, count):
            pass

    return take


def ways(replay_buffer: ReplayBuffer, batch_size: int, keys: Any = None) -> Ways:
    endless: dict[str, Any] = {"keys": keys, "num_batches": None}
    ours = TorchRLBufferDataset(replay_buffer, batch_size, **endless)
    return {
        "bridge": taking(ours, batch_size),
        "Hugging Face stream": taking(ours.as_hf_dataset(), batch_size),
        "torchrl's class": taking(TorchRLsOwn(replay_buffer, batch_size, **endless), batch_size),
        "sample alone": lambda: replay_buffer.sample(batch_size),
    }


def by_hand(replay_buffer: ReplayBuffer, batch_size: int, copy: bool) -> Callable[[], Any]:
    """``sample`` and ``unbind``; with ``copy``, rows of the bridge's form, which share nothing with the buffer."""

    def batch() -> Any:
        return replay_buffer.sample(batch_size).get("input_ids").unbind(0)

    def batch_of_rows() -> Any:
        return [row.get("input_ids") for row in replay_buffer.sample(batch_size).unbind(0)]

    lazy = hasattr(replay_buffer.sample(2), "tensordicts")
    values = batch_of_rows if lazy else batch
    if not copy:
        return values
    if lazy:
        return lambda: [{"input_ids": value.clone()} for value in values()]
    return lambda: [{"input_ids": value} for value in values()]  # the sample is a copy


def check_equal(replay_buffer: ReplayBuffer, batch_size: int, keys: Any = None, theirs: bool = True) -> None:
    """All ways give equal rows for equal draws."""
    datasets = [TorchRLBufferDataset(replay_buffer, batch_size, keys=keys)]
    datasets += [TorchRLsOwn(replay_buffer, batch_size, keys=keys)] if theirs else []
    drawn = []
    for rows in [*datasets, datasets[0].as_hf_dataset()]:
        torch.manual_seed(0)
        drawn.append(list(rows))
    for other in drawn[1:]:
        for row, same in zip(drawn[0], other, strict=True):
            assert row.keys() == same.keys()
            assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(same[name])) for name, value in row.items())
    if keys is None and list(drawn[0][0]) == ["input_ids"]:
        for copy in (False, True):
            draw = by_hand(replay_buffer, batch_size, copy)
            torch.manual_seed(0)
            for row, other in zip(drawn[0], draw(), strict=True):
                assert torch.equal(row["input_ids"], other["input_ids"] if copy else other)


def speeds(times: Times, rows: int) -> dict[str, str]:
    return {way: f"{times.speed(way, rows):,.0f} rows/s" for way in times.turns}


def one_key(report: Report, turns: int) -> None:
    targets: list[Any] = [
        (LazyTensorStorage, 32, dense, 6, 0.8),
        (LazyTensorStorage, 256, dense, 15, 0.8),
        (ListStorage, 256, dense, 1.8, 0.85),
        (LazyStackStorage, 256, ragged, None, 0.8),
    ]
    for storage, size, make, than_torchrl, than_hand in targets:
        replay_buffer = filled(storage, make())
        theirs = make is dense  # on ragged rows torchrl's class fails: "Failed to stack tensors"
        check_equal(replay_buffer, size, theirs=theirs)
        functions = ways(replay_buffer, size)
        functions["by hand"] = by_hand(replay_buffer, size, copy=False)
        functions["by hand, the same rows"] = by_hand(replay_buffer, size, copy=True)
        if not theirs:
            del functions["torchrl's class"]
        times = in_turns(functions, turns=turns)
        work = f"{storage.__name__}, {'ragged' if make is ragged else f'{TOKENS} tokens'}, batch {size}"
        given = speeds(times, size)
        if theirs:
            ratio = times.ratio("torchrl's class", "bridge")
            report.claim(work, ratio, "× torchrl's class", at_least=than_torchrl, ways=given)
        report.claim(work, times.ratio("by hand", "bridge"), "× sample + unbind", at_least=than_hand, ways=given)
        same = times.ratio("by hand, the same rows", "bridge")
        report.claim(work, same, "× sample + unbind, and rows that share nothing with the buffer")
        on_top = times.ratio("bridge", "Hugging Face stream")
        report.claim(work, on_top, "× the plain dataset, as a Hugging Face stream", at_least=0.6)


def collected(report: Report, turns: int) -> None:
    """Rows of 14 leaves. torchrl's class gives those of tensor classes only where they are named."""
    named: Any = [("tokens", "full")]
    cases: list[Any] = [
        ("14 plain leaves", nested, None),
        ("collector's tensor classes, one key named", rollouts, named),
    ]
    for storage, (name, make, keys) in itertools.product((LazyTensorStorage, ListStorage), cases):
        replay_buffer = filled(storage, make())
        check_equal(replay_buffer, 256, keys)
        times = in_turns(ways(replay_buffer, 256, keys), turns=turns)
        ratio = times.ratio("torchrl's class", "bridge")
        work = f"{storage.__name__}, {name}, batch 256"
        report.claim(work, ratio, "× torchrl's class", ways=speeds(times, 256))


def measure(report: Report) -> None:
    torch.manual_seed(0)
    turns = 3 if report.quick else 11
    one_key(report, turns)
    collected(report, turns)


if __name__ == "__main__":
    main(__doc__, measure)
