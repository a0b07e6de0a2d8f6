"""Eval mode for the length of a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_HELD: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # how many calls need it in eval mode
_LOCK = threading.Lock()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model and all its submodules into eval mode, and restores each one's flag, after the last of the threads.

    Examples:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with eval_mode(model):
        ...     print([module.training for module in model.modules()])
        [False, False, False]
        >>> [module.training for module in model.modules()]
        [True, True, False]
    """
    with _LOCK:
        held = [module for module in model.modules() if module.training or module in _HELD]
        for module in held:
            _HELD[module] = _HELD.get(module, 0) + 1
            # The flag itself, not `.eval()`: some modules do more there, such as merging LoRA weights.
            module.training = False
    try:
        yield
    finally:
        with _LOCK:
            for module in held:
                _HELD[module] -= 1
                if not _HELD[module]:
                    del _HELD[module]
                    module.training = True
