"""How the reward model is called: with gradients as it is, or under inference mode in eval mode."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchrl_trl_bridge.modes import eval_mode

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_NEW_LOCK = threading.Lock()


@contextmanager
def scoring(model: nn.Module, inference_mode: bool) -> Iterator[None]:
    """The context in which a reward model scores.

    Args:
        model: the reward model.
        inference_mode: True runs under :func:`torch.inference_mode` with the model and all its submodules in eval mode,
            and gives each submodule its own flag back, also after an error. False changes nothing: gradients reach the
            model unless the caller turned them off, and dropout is active if the model is in train mode.

    Threads that score with one model take turns: the padding id in its config is that of one call.
    """
    with _NEW_LOCK:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        if not inference_mode:
            yield
            return
        with eval_mode(model), torch.inference_mode():
            yield
