"""`make bench`: what it writes from figures. The figures themselves are no test's business."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # scripts import it by this name, and its dataclass looks there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The modules ``measuring`` and ``run``."""
    for name in ("measuring", "run"):
        monkeypatch.setitem(sys.modules, name, None)  # is put back to what was there before
    return load("measuring"), load("run")


def results_of(run: ModuleType, report: Any, **extra: Any) -> dict[str, Any]:
    scripts = {"rows": {"claims": report.claims, "curves": report.curves, "seconds": 1, **extra}}
    return {**run.environment(), "scripts": scripts, "seconds": 1}


def test_figures_become_lines_of_the_table(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measuring, run = bench
    report = measuring.Report()
    report.claim("fast", measuring.Figure(2.0, 1.9, 2.25), "× by hand", at_least=1.8)
    report.claim("large", 30.0, "MB", at_most=20, ways={"bridge": "30 MB"})
    report.claim("fast", 0.9, "× torchrl's class", at_least=0.5)
    report.claim("only reported", 1234.5, "rows/s")
    results = results_of(run, report)
    assert run.table(results)[3:] == [
        "| fast | 2 (1.9 to 2.25) × by hand | ≥ 1.8 | met |",
        "| large | 30 MB | ≤ 20 | not met |",
        "| fast | 0.9 × torchrl's class | ≥ 0.5 | met |",
        "| only reported | 1,234 rows/s |  |  |",
    ]
    section = run.readme_section(results)
    assert "| large | 30 MB (≤ 20, not met) |" in section
    assert "| fast | 2 × by hand (≥ 1.8); 0.9 × torchrl's class (≥ 0.5) |" in section
    assert "only reported" not in section
    assert "large" in capsys.readouterr().out


def test_a_script_that_fails_is_named(bench: Any, tmp_path: Path) -> None:
    _, run = bench
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    result = run.run(script, quick=True)
    assert "exit status 3" in result["error"]
    assert "failed" in run.table({"scripts": {"fails": result}})[-1]


def test_the_section_of_the_readme_is_replaced(bench: Any) -> None:
    measuring, run = bench
    section = run.readme_section(results_of(run, measuring.Report()))
    once = run.with_section("before\n<!-- bench: written by `make bench` -->\n<!-- end of bench -->\nafter\n", section)
    assert once == f"before\n{section}\nafter\n"
    assert run.with_section(once, section) == once


def test_curves_become_small_plots(bench: Any, tmp_path: Path) -> None:
    measuring, run = bench
    report = measuring.Report()
    report.curve("speed", "Speed", "rows", "rows a second", {"bridge": [(8, 10.0), (16, 20.0)]})
    run.write(results_of(run, report), tmp_path)
    assert (tmp_path / "plots" / "speed.png").stat().st_size < 50_000
    assert "![speed](plots/speed.png)" in (tmp_path / "results.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["scripts"]["rows"]["curves"][0]["name"] == "speed"


def test_ways_are_timed_in_turns_and_compared_within_a_turn(bench: Any) -> None:
    measuring, _ = bench
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = measuring.in_turns(ways, turns=3, run_time=0.0)
    changes = 1 + sum(before != after for before, after in itertools.pairwise(order))
    assert changes == 2 * (1 + 3)  # one turn to warm up
    assert {way: len(figures) for way, figures in times.turns.items()} == {"a": 3, "b": 3}
    fixed = measuring.Times({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 4.0]})
    assert fixed.ratio("a", "b") == measuring.Figure(2.0, 1.5, 2.5)


def test_every_script_can_be_run_by_name() -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--quick", "no-such-script"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    scripts = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("measuring", "run"))
    assert f"There are {', '.join(scripts)}" in done.stderr


@pytest.mark.skipif(not (FOLDER / "results.json").exists(), reason="`make bench` has not been run")
def test_the_readme_shows_the_results(bench: Any) -> None:
    _, run = bench
    results = json.loads((FOLDER / "results.json").read_text())
    assert run.readme_section(results) in (ROOT / "README.md").read_text()
    assert not [name for name, result in results["scripts"].items() if "error" in result]
