"""What the doctor finds without touching data: versions, and which features of them are live."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from torchrl_trl_bridge.compat.versions import findings, matching_set, newest

__all__ = ["FEATURES", "SCHEMA", "report"]

SCHEMA = 1
"""The version of the report's form. It rises when a key goes or changes its meaning, not when one is added."""


def report() -> dict[str, Any]:
    """The installed versions, whether they are tested, and which features are live. Imports the libraries to ask them.

    Returns:
        Plain data, as JSON takes it:

        - ``schema`` (int): 1;
        - ``bridge`` (str): the version of this package;
        - ``tested_set`` (str or None): the set of versions, tested together, that is installed, patch levels aside;
        - ``versions``: one dict each for Python and the libraries, with ``name``, ``version`` (str or None), ``status``
          (``"tested"``, ``"untested"``, ``"newer"``, ``"older"``, ``"unknown"`` or ``"missing"``) and
          ``newest_tested`` (str);
        - ``features``: one dict each, with ``name``, ``live`` (bool) and ``why`` (str): what makes it so.

    Examples:
        >>> report()["schema"]
        1
    """
    from torchrl_trl_bridge import __version__

    return {
        "schema": SCHEMA,
        "bridge": __version__,
        "tested_set": matching_set(),
        "versions": [
            {
                "name": finding.name,
                "version": finding.version,
                "status": finding.status,
                "newest_tested": newest(finding.name),
            }
            for finding in findings()
        ],
        "features": [_asked(name, ask) for name, ask in FEATURES.items()],
    }


def _asked(name: str, ask: Callable[[], tuple[bool, str]]) -> dict[str, Any]:
    try:
        live, why = ask()
    except ModuleNotFoundError as error:
        live, why = False, f"{error.name} is not installed"
    except Exception as error:  # a library that fails to load is a finding, and the others are still to be asked
        live, why = False, f"{type(error).__name__}: {_first_line(error)}"
    return {"name": name, "live": live, "why": why}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _extension() -> tuple[bool, str]:
    import torch
    import torchrl

    try:
        # Private, but the only module to ask (torchrl 0.11 to 0.14).
        importlib.import_module("torchrl._torchrl")
    except ImportError:
        return False, (
            f"the one of torchrl {torchrl.__version__} does not load with torch {torch.__version__}: install the torch "
            "that it was built for. PrioritizedSampler needs it"
        )
    return True, "prioritized replay buffers work"


def _installed(library: str, use: str, install: str) -> Callable[[], tuple[bool, str]]:
    def ask() -> tuple[bool, str]:
        if importlib.util.find_spec(library) is None:
            return False, f'not installed: pip install "{install}". {use}'
        importlib.import_module(library)
        return True, use

    return ask


def _gpu() -> tuple[bool, str]:
    import torch

    if torch.cuda.is_available():
        return True, torch.cuda.get_device_name(0)
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    return False, "torch finds no GPU" if built else "this torch is built for the CPU"


def _streams(trainer: str) -> Callable[[], tuple[bool, str]]:
    def ask() -> tuple[bool, str]:
        trl = importlib.import_module("trl")
        from torchrl_trl_bridge.compat.trl import takes_streams

        if takes_streams(getattr(trl, trainer)):
            return True, f"{trainer} takes as_hf_dataset()"
        return False, f"{trainer} of trl {trl.__version__} takes no stream: write as_hf_dataset(streaming=False)"

    return ask


def _json() -> tuple[bool, str]:
    from torchrl_trl_bridge.compat.datasets import HAS_JSON

    if HAS_JSON:
        return True, "datasets.Json keeps the keys of each message of a snapshot"
    return False, "before datasets 4.7 a snapshot fills the keys that a message lacks with None"


def _sampler(name: str, since: str) -> Callable[[], tuple[bool, str]]:
    def ask() -> tuple[bool, str]:
        buffers = importlib.import_module("torchrl.data.replay_buffers")
        return (True, f"torchrl has {name}") if hasattr(buffers, name) else (False, f"came with torchrl {since}")

    return ask


def _forks() -> tuple[bool, str]:
    if sys.platform == "linux":
        return True, "data loaders fork their workers"
    return False, f"{sys.platform} starts workers anew: they take no ListStorage"


FEATURES: dict[str, Callable[[], tuple[bool, str]]] = {
    "C++ extension of TorchRL": _extension,
    "GPU": _gpu,
    "Ray": _installed("ray", "Replay buffers in Ray actors", "ray"),
    "PEFT": _installed("peft", "Policies and reward models with adapters", "peft"),
    "math_verify": _installed("math_verify", "TRL's accuracy_reward", "math-verify"),
    "streams in GRPO": _streams("GRPOTrainer"),
    "streams in RLOO": _streams("RLOOTrainer"),
    "streams in KTO": _streams("KTOTrainer"),
    "messages with keys of their own": _json,
    "ConsumingSampler": _sampler("ConsumingSampler", "0.14"),
    "StalenessAwareSampler": _sampler("StalenessAwareSampler", "0.12"),
    "workers of data loaders by fork": _forks,
}
"""The features that depend on what is installed; each is asked for when the report is made."""
