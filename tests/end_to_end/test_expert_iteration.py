"""The example runs, and does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_iteration.py"


def test_the_mean_reward_rises() -> None:
    before, after = runpy.run_path(str(EXAMPLE))["main"](steps=12)
    assert 0 < before < 0.25, "an untrained model writes anything"
    assert after > before + 0.03
