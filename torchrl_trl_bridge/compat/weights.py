"""The weights of a trained model, whatever accelerate, torch or peft have wrapped around it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

__all__ = ["copy_weights", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers and ``torch.compile``."""
    while True:
        # `_orig_mod` is where torch.compile keeps the module (torch 2.0 to 2.13); it has no public name.
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


@torch.no_grad()
def copy_weights(model: nn.Module, target: nn.Module) -> bool:
    """Gives ``target`` the weights of ``model``.

    Args:
        model: the trained model, unwrapped.
        target: the same model, or the one inside its adapters: nothing to do. Another one of its kind: gets all
            weights. One with adapters of its own: gets those. One without, for a model with adapters: merged weights.

    Returns:
        Whether anything was copied.

    Raises:
        RuntimeError: if the two have parameters of other names or shapes, or share only some.
    """
    target = unwrapped(target)
    trained = {id(parameter) for parameter in model.parameters()}
    shared = [id(parameter) in trained for parameter in target.parameters()]
    if all(shared):
        return False
    if not _has_adapters(model):
        target.load_state_dict(model.state_dict())
    elif _has_adapters(target):
        import peft

        peft.set_peft_model_state_dict(target, peft.get_peft_model_state_dict(model))
    else:
        target.load_state_dict(_merged(model))
    return True


def _has_adapters(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _merged(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the base model with the active adapters added in.

    peft merges for good, or leaves its names in the state dict (0.21): ``base_layer`` for what an adapter is laid over,
    ``original_module`` and ``modules_to_save.<adapter>`` for what is trained in full.
    """
    model.merge_adapter()
    try:
        weights = {name: value.clone() for name, value in model.get_base_model().state_dict().items()}
    finally:
        model.unmerge_adapter()
    saved = f".modules_to_save.{model.active_adapter}."
    merged = {}
    for name, value in weights.items():
        if ".lora_" in name or ".original_module." in name or (".modules_to_save." in name and saved not in name):
            continue
        merged[name.replace(".base_layer.", ".").replace(saved, ".")] = value
    return merged
