"""What README.md shows is true: its code runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_code_runs_as_it_stands(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "\n".join(PROGRAMS)]  # each goes on from the one before
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for line in (
        r"3 rewards, loss \d+\.\d\d after 5 steps",
        "4 rows, the same again: True",
        r"rewards of shape \(2, 1, 1\)",
        "1 reward for TRL",
    ):
        assert re.search(f"^{line}$", done.stdout, re.MULTILINE), done.stdout


def test_the_first_program_is_short() -> None:
    assert len([line for line in PROGRAMS[0].splitlines() if line]) <= 18


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_the_commands_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
