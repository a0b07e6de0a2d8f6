"""The example: a collector in one process fills a Ray buffer, and two ranks in others train from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.features import needs

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_buffer.py"


@needs("streams in GRPO")
@needs("clients of Ray buffers")
def test_no_group_is_mixed_while_a_collector_writes() -> None:
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "8"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) rollouts collected; (\d+) groups trained on, (\d+) of them mixed", done.stdout)
    assert found is not None, done.stdout
    rows, groups, mixed = map(int, found.groups())
    assert rows >= 8
    assert groups == 8 * 2 * 16 // 4
    assert mixed == 0
