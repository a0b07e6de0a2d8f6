"""The frames that called: what a dataset can know of who iterates it, for it is not told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

__all__ = ["calling_frames"]


def calling_frames() -> Iterator[FrameType]:
    """The frames of those who called, the nearest first, from the one that iterates this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
