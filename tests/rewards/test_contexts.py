from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from torchrl_trl_bridge.modes import eval_mode
from torchrl_trl_bridge.rewards.contexts import scoring


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))).train()
    model[1].eval()  # a frozen part inside a training model
    return model


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_inference_mode_is_eval_inside_and_restores_each_flag(model):
    before = flags(model)
    with scoring(model, inference_mode=True):
        assert torch.is_inference_mode_enabled()
        assert not any(flags(model))
    assert flags(model) == before == [True, True, False, True, True]
    assert not torch.is_inference_mode_enabled()


def test_flags_are_restored_after_an_error(model):
    before = flags(model)
    with pytest.raises(ZeroDivisionError), scoring(model, inference_mode=True):
        raise ZeroDivisionError
    assert flags(model) == before
    assert not torch.is_inference_mode_enabled()


def test_gradient_mode_changes_nothing(model):
    with scoring(model, inference_mode=False):
        assert torch.is_grad_enabled()
        assert flags(model) == [True, True, False, True, True]
    with torch.no_grad(), scoring(model, inference_mode=False):
        assert not torch.is_grad_enabled(), "the caller's own context is kept"


def test_eval_methods_of_modules_are_not_called(model):
    class Merging(nn.Module):
        def train(self, mode: bool = True) -> nn.Module:
            raise AssertionError("such as LoRA layers that merge their weights on eval()")

    model.append(Merging())
    with scoring(model, inference_mode=True):
        assert not model[-1].training
    assert model[-1].training


def test_threads_take_turns_with_one_model(model):
    before, seen = flags(model), []

    def other() -> None:
        with scoring(model, inference_mode=True):
            seen.append(flags(model))

    with scoring(model, inference_mode=True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        assert not seen, "the other would find eval mode, and leave the model so or in train mode during this call"
    thread.join(10)
    assert not any(seen[0])
    assert flags(model) == before


def test_flags_are_restored_after_the_last_of_overlapping_calls(model):
    before = flags(model)
    first, second = eval_mode(model), eval_mode(model[0])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [model[0].training, model[2].training] == [False, True]
    second.__exit__(None, None, None)
    assert flags(model) == before
