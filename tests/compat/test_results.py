"""What the latest run of the matrix found, and what is written from it. The rows themselves run without this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.test_matrix import ROWS, matrix
from torchrl_trl_bridge.compat.tested import TESTED
from torchrl_trl_bridge.compat.versions import LIBRARIES, OLDEST, newest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "constraints" / "matrix.json"
if not FILE.exists():
    pytest.skip("`make matrix` has not been run to its end yet", allow_module_level=True)
RESULTS: dict[str, Any] = json.loads(FILE.read_text())


def test_each_set_has_its_result() -> None:
    assert list(RESULTS) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_result_is_that_of_the_pinned_versions(name: str) -> None:
    assert RESULTS[name]["versions"] == ROWS[name].versions
    assert ROWS[name].pins["torchrl"] in name
    assert ROWS[name].pins["trl"] in name


def test_a_row_is_supported_because_it_passed() -> None:
    passed = [name for name, result in RESULTS.items() if result["passed"] and not result["failed"]]
    assert list(TESTED) == passed
    assert {name: RESULTS[name]["versions"] for name in passed} == TESTED


def test_what_is_written_from_the_results_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text()
    assert matrix.readme_section(RESULTS) in readme
    assert matrix.with_section(readme, matrix.readme_section(RESULTS)) == readme
    assert (ROOT / "torchrl_trl_bridge/compat/tested.py").read_text() == matrix.tested_module(RESULTS)


def test_the_rows_reach_the_oldest_releases() -> None:
    for name, oldest in OLDEST.items():
        assert oldest in {".".join(row[name].split(".")[:2]) for row in TESTED.values()}, name
    assert all(newest(name) for name in LIBRARIES)


def test_the_changelog_and_the_policy_name_the_bounds() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    words = {"python": "Python", "trl": "TRL"}
    for name, oldest in OLDEST.items():
        assert f"{words.get(name, name)} {oldest} to {newest(name)}" in changelog.replace("\n  ", " "), name
