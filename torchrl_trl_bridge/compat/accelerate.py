"""What accelerate does with a dataset on several ranks."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

__all__ = ["dispatches"]


def dispatches() -> bool:
    """Whether accelerate draws the rows of all ranks on rank 0, for whom the caller runs, and sends each rank its part.

    It does so with iterable datasets, by default; TRL 1.x turns it off (``dispatch_batches=False``). A dataset is not
    told, and the other ranks do not iterate it: so the calling frames are looked through for methods of the loader that
    does it (accelerate 1.x).
    """
    loader: Any = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderDispatcher", None)
    methods = {_code(loader, name) for name in ("__iter__", "_fetch_batches")} - {None}
    frame: FrameType | None = sys._getframe(1)
    while methods and frame is not None:
        if frame.f_code in methods:
            return True
        frame = frame.f_back
    return False


def _code(loader: Any, name: str) -> CodeType | None:
    return getattr(getattr(loader, name, None), "__code__", None)
