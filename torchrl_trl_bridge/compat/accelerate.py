"""What accelerate does with a dataset on several ranks."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torchrl_trl_bridge.compat.frames import calling_frames

__all__ = ["dispatches"]


def dispatches() -> bool:
    """Whether accelerate draws the rows of all ranks on rank 0, for whom the caller runs, and sends each rank its part.

    It does so with iterable datasets, by default; TRL 1.x turns it off (``dispatch_batches=False``). A dataset is not
    told, and the other ranks do not iterate it: so the calling frames are looked through for methods of the loader that
    does it (accelerate 1.x).
    """
    loader: Any = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderDispatcher", None)
    methods = {_code(loader, name) for name in ("__iter__", "_fetch_batches")} - {None}
    return bool(methods) and any(frame.f_code in methods for frame in calling_frames())


def _code(loader: Any, name: str) -> CodeType | None:
    return getattr(getattr(loader, name, None), "__code__", None)
