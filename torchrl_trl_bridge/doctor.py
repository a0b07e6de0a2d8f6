"""``torchrl-trl-bridge doctor``: what is installed, what of it works, and a small trial of every public name."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from torchrl_trl_bridge.compat import report

__all__ = ["SMOKE_CHECKS", "UNSUPPORTED", "examine", "run"]

UNSUPPORTED = ("older", "newer", "unknown")
"""The statuses of a version that ``--strict`` does not let pass."""


def run(*, as_json: bool, strict: bool) -> int:
    """Prints the findings.

    Returns:
        The exit status: 2 if ``strict`` and a version is not a supported one; else 1 if a check failed; else 0.
    """
    findings = examine(strict=strict)
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        _print(findings)
    status: int = findings["exit_status"]
    return status


def examine(*, strict: bool = False) -> dict[str, Any]:
    """The findings of :func:`torchrl_trl_bridge.compat.report`, and the trials.

    Returns:
        What that gives, and:

        - ``checks``: one dict for each public name, with ``name``, ``status`` (``"passed"``, ``"failed"`` or
          ``"skipped"``), ``why`` (str: the error, or the library that is missing) and ``seconds`` (float);
        - ``strict`` (bool) and ``exit_status`` (int).
    """
    # What libraries print while they load would stand between the lines of the report.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = report()
        checks = [_tried(name, check) for name, check in SMOKE_CHECKS.items()]
    status = 0
    if any(check["status"] == "failed" for check in checks):
        status = 1
    if strict and any(version["status"] in UNSUPPORTED for version in found["versions"]):
        status = 2
    return {**found, "checks": checks, "strict": strict, "exit_status": status}


def _tried(name: str, check: Callable[[], None]) -> dict[str, Any]:
    started = time.perf_counter()
    status, why = "passed", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check()
        except Exception as error:  # what goes wrong is what this is for
            status, why = "failed", f"{type(error).__name__}: {error}"
            missing = _missing(error)
            if missing is not None:
                status, why = "skipped", f"{missing} is not installed"
    return {"name": name, "status": status, "why": why, "seconds": round(time.perf_counter() - started, 3)}


def _missing(error: BaseException) -> str | None:
    """The library whose lack is behind an error, if it is not installed."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or name.partition(".")[0] == "torchrl_trl_bridge":
        return _missing(error.__cause__) if error.__cause__ is not None else None
    return name


def _equal(found: Any, expected: Any) -> None:
    if found != expected:
        raise AssertionError(f"expected {expected!r}, got {found!r}")


# The trials: a few rows each, made here. They load the name from the package, as a user does, and raise on a wrong
# answer. What needs an optional library raises ModuleNotFoundError without it.


def _buffer() -> Any:
    """A buffer of two ragged rollouts in text."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyStackStorage, ReplayBuffer

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    for prompt, response in (("2 + 2 = ", "4"), ("11 + 11 = ", "22")):
        text = {"prompt": prompt, "response": response, "full": prompt + response}
        tokens = torch.arange(len(text["full"]))
        mask = torch.ones(len(tokens), dtype=torch.bool)
        row = {"text": text, "tokens": {"full": tokens}, "masks": {"all_attention_mask": mask}, "answer": response}
        replay_buffer.add(TensorDict(row))
    return replay_buffer


def _try_dataset() -> None:
    from torchrl_trl_bridge import TorchRLBufferDataset

    rows = list(TorchRLBufferDataset(_buffer(), 4, keys=[("text", "prompt"), ("tokens", "full")], seed=0))
    _equal(len(rows), 4)
    _equal({(row["text.prompt"], len(row["tokens.full"])) for row in rows}, {("2 + 2 = ", 9), ("11 + 11 = ", 12)})
    import datasets

    stream = TorchRLBufferDataset(_buffer(), 4, columns="prompt-completion").as_hf_dataset()
    _equal(isinstance(stream, datasets.IterableDataset), True)
    _equal((sorted(stream.column_names), len(list(stream))), (["completion", "prompt"], 4))
    snapshot = TorchRLBufferDataset(_buffer(), 4, columns={"solution": "answer"}).as_hf_dataset(streaming=False)
    _equal(snapshot[:], {"solution": ["4", "22"]})


def _try_dataset_type() -> None:
    from torchrl_trl_bridge import DatasetType, TorchRLBufferDataset

    row = next(iter(TorchRLBufferDataset(_buffer(), 2, columns=DatasetType("prompt-only", extra={"goal": "answer"}))))
    _equal(sorted(row), ["goal", "prompt"])


def _try_pairs() -> None:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyStackStorage, ReplayBuffer

    from torchrl_trl_bridge import PreferencePairs

    pairs = PreferencePairs(2, prompt_key=("text", "prompt"), reward_key="reward")
    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10), transform=pairs)
    text = {"prompt": ["2 + 2?", "2 + 2?"], "response": ["4", "5"]}
    replay_buffer.extend(TensorDict({"text": text, "reward": torch.tensor([1.0, 0.0])}, batch_size=[2]))
    row = replay_buffer[0]
    _equal((row["chosen"], row["rejected"], float(row["margin"])), ("4", "5", 1.0))


def _try_callback() -> None:
    import transformers
    from tensordict import TensorDict
    from torchrl.data import LazyStackStorage, ReplayBuffer

    from torchrl_trl_bridge import CollectCallback

    class Collector:
        """What the callback asks of a collector."""

        postproc: Any = None

        def __iter__(self) -> Any:
            while True:
                yield TensorDict({"text": ["4", "22"]}, batch_size=[2])

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    callback = CollectCallback(Collector(), replay_buffer)
    _equal(isinstance(callback, transformers.TrainerCallback), True)
    _equal((callback.collect(), len(replay_buffer)), (2, 2))


def _short(completions: Any, **kwargs: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def _try_recorder() -> None:
    from torchrl.data import LazyStackStorage, ReplayBuffer

    from torchrl_trl_bridge import RolloutRecorder

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    recorder = RolloutRecorder(replay_buffer, _short)
    rewards = recorder(prompts=["2 + 2?"] * 2, completions=["4", "four"], completion_ids=[[7], [8, 9]])
    _equal(rewards, [-1.0, -4.0])
    _equal((replay_buffer[1]["text"].response, float(replay_buffer[1]["next", "reward"])), ("four", -4.0))


def _try_importing() -> None:
    import datasets
    from torchrl.data import LazyStackStorage, ReplayBuffer

    from torchrl_trl_bridge import extend_from_dataset

    replay_buffer = ReplayBuffer(storage=LazyStackStorage(10))
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    rows = datasets.Dataset.from_list([{"messages": chat}])
    _equal(extend_from_dataset(replay_buffer, rows, progress=False), 1)
    _equal(list(replay_buffer[0]["history"].full.content), ["2 + 2?", "4"])


def _try_saving() -> None:
    from torchrl.data import LazyStackStorage, ReplayBuffer

    from torchrl_trl_bridge import load_buffer, save_buffer

    with tempfile.TemporaryDirectory() as folder:
        save_buffer(_buffer(), folder)
        restored = ReplayBuffer(storage=LazyStackStorage(10))
        load_buffer(restored, folder)
    _equal([row["answer"] for row in restored[:].unbind(0)], ["4", "22"])


def _try_checkpoint() -> None:
    import transformers

    from torchrl_trl_bridge import BufferCheckpoint, TorchRLBufferDataset

    callback = BufferCheckpoint(TorchRLBufferDataset(_buffer(), 2))
    _equal(isinstance(callback, transformers.TrainerCallback), True)


def _try_reward_model() -> None:
    import torch
    from tensordict import TensorDict

    from torchrl_trl_bridge import HFRewardModelWrapper
    from torchrl_trl_bridge.tiny import tiny_reward_model

    with tempfile.TemporaryDirectory() as folder:
        score = HFRewardModelWrapper(tiny_reward_model(folder), inference_mode=True)
    tokens = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
    mask = torch.tensor([[False, False, True, True], [True] * 4])
    batch = score(TensorDict({"tokens": {"full": tokens}, "masks": {"all_attention_mask": mask}}, [2]))
    alone = score(TensorDict({"tokens": {"full": tokens[:1, 2:]}, "masks": {"all_attention_mask": mask[:1, 2:]}}, [1]))
    _equal(torch.allclose(batch["reward"][:1], alone["reward"], atol=1e-5), True)


def _try_transform() -> None:
    from tensordict import TensorDict

    from torchrl_trl_bridge import TRLRewardTransform

    rollouts = TensorDict({"text": {"prompt": ["2 + 2?"] * 2, "response": ["4", "four"]}}, [2])
    _equal(TRLRewardTransform(_short)(rollouts)["next", "reward"].flatten().tolist(), [-1.0, -4.0])


def _try_reward_func() -> None:
    from tensordict.nn import TensorDictModule

    from torchrl_trl_bridge import as_trl_reward_func

    def high(ids: Any) -> Any:
        return ids.float().mean(-1)

    reward = as_trl_reward_func(TensorDictModule(high, in_keys=[("tokens", "response")], out_keys=["reward"]))
    _equal(reward(prompts=["2 + 2?"] * 2, completions=["4", "5"], completion_ids=[[7, 1], [8, 2]]), [4.0, 5.0])


SMOKE_CHECKS: dict[str, Callable[[], None]] = {
    "TorchRLBufferDataset": _try_dataset,
    "DatasetType": _try_dataset_type,
    "PreferencePairs": _try_pairs,
    "CollectCallback": _try_callback,
    "RolloutRecorder": _try_recorder,
    "extend_from_dataset": _try_importing,
    "save_buffer": _try_saving,
    "load_buffer": _try_saving,
    "BufferCheckpoint": _try_checkpoint,
    "HFRewardModelWrapper": _try_reward_model,
    "TRLRewardTransform": _try_transform,
    "as_trl_reward_func": _try_reward_func,
}
"""A trial for every public name."""


def _print(findings: dict[str, Any]) -> None:
    words = {
        "tested": "tested",
        "untested": "not tested, but between versions that are",
        "newer": "newer than {newest_tested}, the newest tested",
        "older": "too old",
        "unknown": "does not say its version",
        "missing": "not installed",
    }
    print(f"torchrl-trl-bridge {findings['bridge']}")
    _table(
        ["library", "version", ""],
        [
            [version["name"], version["version"] or "-", words[version["status"]].format(**version)]
            for version in findings["versions"]
        ],
    )
    together = findings["tested_set"]
    print(f"Tested together: {together}" if together else "These versions were not tested together.")
    _table(
        ["feature", "live", ""],
        [[feature["name"], "yes" if feature["live"] else "no", feature["why"]] for feature in findings["features"]],
    )
    _table(
        ["public name", "trial", ""],
        [[check["name"], check["status"], check["why"]] for check in findings["checks"]],
    )
    seconds = sum(check["seconds"] for check in findings["checks"])
    count = sum(check["status"] == "failed" for check in findings["checks"])
    print(f"{count} of {len(findings['checks'])} trials failed, in {seconds:.1f} s.")
    if findings["exit_status"] == 2:
        print("--strict: a version is not a supported one.")


def _table(header: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:  # part of the demo extra; a report without frames is one too
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(2)]
        for row in [header, *rows]:
            print(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip())
        print()
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
