"""The bridge between TorchRL and Hugging Face TRL.

TorchRL collects and stores experience; TRL trains language models. Each public name is imported on first use, so that
``import torchrl_trl_bridge`` loads neither torch nor any Hugging Face library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_trl_bridge.buffers.checkpointing import BufferCheckpoint
    from torchrl_trl_bridge.buffers.collecting import CollectCallback
    from torchrl_trl_bridge.buffers.columns import DatasetType
    from torchrl_trl_bridge.buffers.dataset import TorchRLBufferDataset
    from torchrl_trl_bridge.buffers.importing import extend_from_dataset
    from torchrl_trl_bridge.buffers.preferences import PreferencePairs
    from torchrl_trl_bridge.buffers.recording import RolloutRecorder
    from torchrl_trl_bridge.buffers.saving import load_buffer, save_buffer
    from torchrl_trl_bridge.rewards.functions import TRLRewardTransform
    from torchrl_trl_bridge.rewards.model import HFRewardModelWrapper
    from torchrl_trl_bridge.rewards.scorers import as_trl_reward_func

__version__ = "0.1.0"

__all__ = [
    "BufferCheckpoint",
    "CollectCallback",
    "DatasetType",
    "HFRewardModelWrapper",
    "PreferencePairs",
    "RolloutRecorder",
    "TRLRewardTransform",
    "TorchRLBufferDataset",
    "__version__",
    "as_trl_reward_func",
    "extend_from_dataset",
    "load_buffer",
    "save_buffer",
]

_MODULE_OF = {
    "BufferCheckpoint": "torchrl_trl_bridge.buffers.checkpointing",
    "CollectCallback": "torchrl_trl_bridge.buffers.collecting",
    "DatasetType": "torchrl_trl_bridge.buffers.columns",
    "HFRewardModelWrapper": "torchrl_trl_bridge.rewards.model",
    "PreferencePairs": "torchrl_trl_bridge.buffers.preferences",
    "RolloutRecorder": "torchrl_trl_bridge.buffers.recording",
    "TRLRewardTransform": "torchrl_trl_bridge.rewards.functions",
    "TorchRLBufferDataset": "torchrl_trl_bridge.buffers.dataset",
    "as_trl_reward_func": "torchrl_trl_bridge.rewards.scorers",
    "extend_from_dataset": "torchrl_trl_bridge.buffers.importing",
    "load_buffer": "torchrl_trl_bridge.buffers.saving",
    "save_buffer": "torchrl_trl_bridge.buffers.saving",
}


_OPTIONAL = {"accelerate", "datasets", "transformers", "trl"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_versions()
    try:
        module = importlib.import_module(_MODULE_OF[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _OPTIONAL:
            raise
        raise ImportError(f'{name} needs {error.name}: pip install "torchrl-trl-bridge[trl]".') from error
    value = getattr(module, name)
    globals()[name] = value  # so that the next use is an ordinary look-up
    return value


_checked = False


def _check_versions() -> None:
    """Checks what is installed, when the first public name is loaded."""
    global _checked
    if not _checked:
        from torchrl_trl_bridge.compat.versions import check

        check(stacklevel=3)  # the line that imports the name
        _checked = True


def __dir__() -> list[str]:
    return __all__
