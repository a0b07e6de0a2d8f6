"""The tool that runs the matrix: its rows, what it reads from a run, and what it writes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchrl_trl_bridge.compat.versions import LIBRARIES

ROOT = Path(__file__).parents[2]


def load_matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix_tool", ROOT / "tools" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["matrix_tool"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


matrix = load_matrix()
ROWS = {row.name: row for row in matrix.all_rows()}


def test_the_rows_of_every_run_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--list"]) == 0
    assert json.loads(capsys.readouterr().out) == [name for name, row in ROWS.items() if not row.by_hand]


def test_a_row_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--row", "torchrl9-trl9"])
    assert "no such row: torchrl9-trl9" in capsys.readouterr().err


def test_make_passes_the_rows_on() -> None:
    recipe = re.search(r"^matrix:\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "$(PYTHON) tools/matrix.py $(foreach row,$(ROW),--row $(row))"


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"python": "3.11.7", "trl": "1.0", "torchrl-trl-bridge": "0.1.0"}, []),
        ({"python": "3.11.7", "trl": "1.1", "torchrl-trl-bridge": "0.1.0"}, ["trl 1.1 instead of 1.0"]),
        ({"python": "3.1.1", "trl": "1.0", "torchrl-trl-bridge": "0.1.0"}, ["Python 3.1.1 instead of 3.11"]),
        ({"python": "3.11.7", "trl": "1.0", "torchrl-trl-bridge": None}, ["torchrl-trl-bridge is not installed"]),
        ({}, ["trl None instead of 1.0", "Python None instead of 3.11", "torchrl-trl-bridge is not installed"]),
    ],
)
def test_an_environment_that_is_not_what_the_file_says(found: dict[str, Any], wrong: list[str]) -> None:
    assert matrix.mismatches(matrix.Row("row", "3.11", {"trl": "1.0"}, False), found) == wrong


def test_a_file_without_its_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "row.txt"
    path.write_text("trl==1.0\n")
    with pytest.raises(matrix.RowError, match="has to begin with"):
        matrix.read_row(path)


REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><error message="no"/></testcase>
<testcase name="d"><skipped type="pytest.skip" message="torchrl has no X">t.py:1: torchrl has no X</skipped></testcase>
<testcase name="e"><skipped type="pytest.skip" message="torchrl has no X">t.py:2: torchrl has no X</skipped></testcase>
<testcase name="f"><skipped type="pytest.skip" message="collection skipped">
('t.py', 3, 'Skipped: no oracle')</skipped></testcase>
</testsuite></testsuites>"""


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert matrix.read_report(tmp_path / "report.xml") == {
        "passed": 1, "failed": 2, "skipped": {"no oracle": 1, "torchrl has no X": 2}
    }  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    versions = dict.fromkeys(["python", *LIBRARIES], "1.0")
    return {
        "versions": versions,
        "date": "2026-12-01",
        "passed": 5,
        "failed": 0,
        "skipped": {"why": 2},
        "seconds": 9,
        **changes,
    }


def test_the_table_shows_failures_and_reasons_and_the_readme_no_failed_row() -> None:
    results = {"good": result(), "bad": result(failed=1), "broken": result(passed=0, error="cannot be installed")}
    printed = matrix.summary(results)
    assert printed.count("| 1.0 ") >= 3
    assert "broken: cannot be installed" in printed
    assert "    2 why" in printed
    assert len(matrix.readme_section(results).splitlines()) == 5
    assert '"good"' in matrix.tested_module(results)
    assert '"bad"' not in matrix.tested_module(results)
    assert '"broken"' not in matrix.tested_module(results)
