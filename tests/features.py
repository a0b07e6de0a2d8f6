"""What the installed versions lack: a test for it is skipped, and the table of `make matrix` counts the reasons."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _has_trl_interop() -> bool:
    return importlib.util.find_spec("torchrl.modules.llm.trl_interop") is not None


def _has_sampler(name: str) -> Callable[[], bool]:
    return lambda: hasattr(_module("torchrl.data.replay_buffers"), name)


def _has_json() -> bool:
    return hasattr(_module("datasets"), "Json")


def _streams(trainer: str) -> Callable[[], bool]:
    def ask() -> bool:
        from torchrl_trl_bridge.compat.trl import takes_streams

        return takes_streams(getattr(_module("trl"), trainer))

    return ask


def _has_plain_parsers() -> bool:
    parameters = inspect.signature(_module("torchrl.envs.llm").GSM8KRewardParser).parameters
    return parameters["tokenizer"].default is None


def _has_can_sample() -> bool:
    return hasattr(_module("torchrl.data").ReplayBuffer, "can_sample")


def _has_plain_names() -> bool:
    from torchrl_trl_bridge.compat.trl import token_names_of_pairs

    return token_names_of_pairs()[0] == "chosen_ids"


def _has_log_extra() -> bool:
    from torchrl_trl_bridge.compat.trl import arguments_of_reward_functions

    return "log_extra" in arguments_of_reward_functions()


def _has_async() -> bool:
    return "asyncio" in inspect.getsource(_module("trl.trainer.grpo_trainer"))


def _has_clients() -> bool:
    return hasattr(_module("torchrl.data").RayReplayBuffer, "client")


def _has_extension() -> bool:
    try:
        _module("torchrl._torchrl")
    except ImportError:
        return False
    return True


# By name: the question, and the reason for a skip.
FEATURES: dict[str, tuple[Callable[[], bool], str]] = {
    "trl_interop": (_has_trl_interop, "torchrl has trl_interop, the oracle, from 0.14 on"),
    "ConsumingSampler": (_has_sampler("ConsumingSampler"), "torchrl has ConsumingSampler from 0.14 on"),
    "StalenessAwareSampler": (_has_sampler("StalenessAwareSampler"), "torchrl has StalenessAwareSampler from 0.12 on"),
    "Json": (_has_json, "datasets has Json from 4.7 on"),
    "plain names of tokens": (_has_plain_names, "RewardTrainer reads chosen_ids from trl 0.29 on"),
    "parsers without tokenizer": (_has_plain_parsers, "TorchRL's reward parsers ask for a tokenizer up to 0.12"),
    "can_sample": (_has_can_sample, "a replay buffer tells whether it can be sampled from torchrl 0.14 on"),
    "streams in GRPO": (_streams("GRPOTrainer"), "GRPO and RLOO take streams from trl 1.9 on"),
    "streams in KTO": (_streams("KTOTrainer"), "KTO takes streams from trl 1.8 on"),
    "async": (_has_async, "reward functions may be async from trl 0.27 on"),
    "snapshots with Json in SFT": (
        lambda: not hasattr(_module("trl.data_utils"), "truncate_dataset"),
        "SFT up to trl 0.29 cuts the rows of a snapshot with Arrow, which fails on datasets.Json",
    ),
    "clients of Ray buffers": (
        _has_clients,
        "Ray buffers give clients, which can be sent, from torchrl 0.14 on",
    ),
    "log_extra": (_has_log_extra, "reward functions get log_extra and log_metric from trl 1.0 on"),
    "extension": (_has_extension, "TorchRL's C++ extension does not load with this torch"),
}


@functools.cache
def has(feature: str) -> bool:
    """Whether what is installed has a feature."""
    return FEATURES[feature][0]()


def needs(feature: str) -> pytest.MarkDecorator:
    """Marks a test that needs a feature."""
    return pytest.mark.skipif(not has(feature), reason=FEATURES[feature][1])


def skip_without(feature: str) -> None:
    """Skips the test, or the module, that calls it."""
    if not has(feature):
        pytest.skip(FEATURES[feature][1], allow_module_level=True)


def sampler_class(name: str) -> Any:
    """A sampler of TorchRL, or None where this release has none of that name."""
    return getattr(_module("torchrl.data.replay_buffers"), name, None)


def sampler_param(name: str) -> Any:
    """A sampler as a parameter of tests, which are skipped where this release has none of that name."""
    return pytest.param(sampler_class(name), marks=needs(name), id=name)


def optional(module: str, name: str) -> Any:
    """A name that some releases lack, or None: for the parameters of tests that are skipped without it."""
    try:
        return getattr(_module(module), name)
    except (ImportError, AttributeError):
        return None


def trl_class(name: str) -> Any:
    """A trainer or configuration of TRL, wherever this release keeps it, or None if it has none of that name."""
    package = name.removesuffix("Trainer").removesuffix("Config").lower()
    for module in ("trl", f"trl.experimental.{package}"):
        try:
            return getattr(_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


def needs_trl_class(name: str) -> pytest.MarkDecorator:
    """Marks a test of a trainer that a release of TRL may lack."""
    return pytest.mark.skipif(trl_class(name) is None, reason=f"this trl has no {name}")


def takes_streams(trainer_class: type) -> bool:
    """Whether a trainer of the installed TRL trains from a stream, for tests of what it does where it does not."""
    from torchrl_trl_bridge.compat.trl import takes_streams

    return takes_streams(trainer_class)
