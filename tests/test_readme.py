"""What README.md shows is true: its code runs as it stands, and its versions are the pinned ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def support_table() -> list[dict[str, str]]:
    """The rows of the table under "Tested with"."""
    section = README.split("## Tested with", 1)[1].split("\n## ", 1)[0]
    header, _, *rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_code_runs_as_it_stands(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^3 rewards, loss \d+\.\d\d after 5 steps$", done.stdout, re.MULTILINE), done.stdout


def test_there_is_one_complete_program() -> None:
    (program,) = PROGRAMS
    assert len([line for line in program.splitlines() if line]) <= 18


@pytest.mark.parametrize("row", support_table(), ids=lambda row: f"torchrl{row['torchrl']}-trl{row['trl']}")
def test_the_versions_are_the_pinned_ones(row: dict[str, str]) -> None:
    pinned = (ROOT / "constraints" / f"torchrl{row['torchrl']}-trl{row['trl']}.txt").read_text()
    versions = dict(line.split("==") for line in pinned.splitlines() if "==" in line)
    libraries = {name: version for name, version in row.items() if name != "Python"}
    assert libraries == {name: versions[name] for name in libraries}
    assert f"# Python {row['Python']}." in pinned


def test_each_pinned_set_has_its_row() -> None:
    files = {path.stem for path in (ROOT / "constraints").glob("*.txt")}
    assert {f"torchrl{row['torchrl']}-trl{row['trl']}" for row in support_table()} == files


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_the_commands_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
