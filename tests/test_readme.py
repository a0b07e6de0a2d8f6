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


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_code_runs_as_it_stands(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^3 rewards, loss \d+\.\d\d after 5 steps$", done.stdout, re.MULTILINE), done.stdout


def test_there_is_one_complete_program() -> None:
    (program,) = PROGRAMS
    assert len([line for line in program.splitlines() if line]) <= 18


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_the_commands_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
