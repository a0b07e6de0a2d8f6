"""The example: a dataset fills a buffer, the policy's own rollouts another, and the reward rises."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.features import needs


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "offline_to_online.py"
    spec = importlib.util.spec_from_file_location("offline_to_online", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs("streams in GRPO")
def test_the_reward_rises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = example().run(steps=8, pairs=64, samples=64, seed=0, scratch=tmp_path)
    assert list(rewards) == ["untrained", "after DPO", "after GRPO", "after SFT"]
    assert rewards["after GRPO"] > rewards["untrained"]
    assert rewards["after SFT"] > rewards["untrained"] + 0.1
    assert "GRPO left 256 rollouts in the buffer." in capsys.readouterr().out
