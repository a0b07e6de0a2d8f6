"""The workflows: what they call exists, and what README.md shows fits them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchrl_trl_bridge.cli import _parser

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]


def workflow(name: str) -> dict[str, Any]:
    # A boolean to YAML 1.1: the key `on`.
    loaded: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return {("on" if key is True else key): value for key, value in loaded.items()}


INPUTS = workflow("compat.yml")["on"]["workflow_call"]["inputs"]
STEPS = workflow("compat.yml")["jobs"]["test"]["steps"]


def test_the_default_set_exists() -> None:
    for row in json.loads(INPUTS["rows"]["default"]):
        assert (ROOT / "constraints" / f"{row}.txt").exists()
    assert all({"description", "type", "default"} <= set(given) for given in INPUTS.values())


def test_every_input_is_used_and_every_one_that_is_used_is_declared() -> None:
    text = (ROOT / ".github/workflows/compat.yml").read_text()
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(INPUTS)


def test_what_comes_from_a_caller_reaches_the_shell_as_variables_only() -> None:
    commands = [step["run"] for step in STEPS if "run" in step]
    assert len(commands) == 3
    assert not any("${{" in command for command in commands)
    environment = workflow("compat.yml")["jobs"]["test"]["env"]
    used = set(re.findall(r"\$(\w+)", " ".join(commands)))
    assert used == set(environment)
    assert environment["CONSTRAINTS"] == ".torchrl-trl-bridge/constraints/${{ matrix.row }}.txt"


def test_the_doctor_is_called_as_it_takes_its_arguments() -> None:
    (command,) = [step["run"] for step in STEPS if step.get("name") == "Doctor"]
    for strict in ("--strict", ""):
        program, *arguments = command.replace("$STRICT", strict).split()
        assert program == "torchrl-trl-bridge"
        assert _parser().parse_args(arguments).strict is bool(strict)


def test_our_own_ci_calls_the_same_file() -> None:
    jobs = workflow("ci.yml")["jobs"]
    call = jobs["compat"]
    assert call["uses"] == "./.github/workflows/compat.yml"
    assert set(call["with"]) <= set(INPUTS)
    assert call["needs"] == "rows"
    assert "tools/matrix.py --list" in jobs["rows"]["steps"][-1]["run"]
    assert (ROOT / jobs["check"]["steps"][-1]["run"]).exists()


def test_readme_shows_a_call_that_fits() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(example.splitlines()) == 10
    (job,) = yaml.safe_load(example)["jobs"].values()
    path, ref = job["uses"].split("torchrl-trl-bridge/")[1].split("@")
    assert (ROOT / path).exists()
    assert ref == job["with"]["ref"]
    assert set(job["with"]) <= set(INPUTS)
    for row in json.loads(job["with"]["rows"]):
        assert (ROOT / "constraints" / f"{row}.txt").exists()
