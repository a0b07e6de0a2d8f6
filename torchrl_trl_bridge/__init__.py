"""The bridge between TorchRL and Hugging Face TRL.

TorchRL collects and stores experience; TRL trains language models. Each public name is imported on first use, so that
``import torchrl_trl_bridge`` loads neither torch nor any Hugging Face library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_trl_bridge.buffers.collecting import CollectCallback
    from torchrl_trl_bridge.buffers.columns import DatasetType
    from torchrl_trl_bridge.buffers.dataset import TorchRLBufferDataset
    from torchrl_trl_bridge.buffers.preferences import PreferencePairs
    from torchrl_trl_bridge.rewards.model import HFRewardModelWrapper

__version__ = "0.1.0"

__all__ = [
    "CollectCallback",
    "DatasetType",
    "HFRewardModelWrapper",
    "PreferencePairs",
    "TorchRLBufferDataset",
    "__version__",
]

_MODULE_OF = {
    "CollectCallback": "torchrl_trl_bridge.buffers.collecting",
    "DatasetType": "torchrl_trl_bridge.buffers.columns",
    "HFRewardModelWrapper": "torchrl_trl_bridge.rewards.model",
    "PreferencePairs": "torchrl_trl_bridge.buffers.preferences",
    "TorchRLBufferDataset": "torchrl_trl_bridge.buffers.dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # so that the next use is an ordinary look-up
    return value


def __dir__() -> list[str]:
    return __all__
