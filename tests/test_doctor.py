"""``torchrl-trl-bridge doctor``, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchrl_trl_bridge
from torchrl_trl_bridge import doctor

ROOT = Path(__file__).parents[1]
NAMES = {name for name in torchrl_trl_bridge.__all__ if name != "__version__"}


def run(*arguments: str, before: str = "", path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    code = f"import sys\n{before}\nfrom torchrl_trl_bridge.cli import main\nsys.exit(main(['doctor', *{arguments!r}]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_every_public_name_has_a_trial() -> None:
    assert set(doctor.SMOKE_CHECKS) == NAMES


def test_all_is_well_here() -> None:
    done = run("--json")
    found = json.loads(done.stdout)  # nothing else is printed
    assert {check["name"]: (check["status"], check["why"]) for check in found["checks"]} == dict.fromkeys(
        NAMES, ("passed", "")
    )
    assert all(check["seconds"] >= 0 for check in found["checks"])
    assert (found["schema"], found["strict"], found["exit_status"], done.returncode) == (1, False, 0, 0)
    assert set(found) == {
        *("schema", "bridge", "tested_set", "versions", "features", "checks", "strict", "exit_status"),
    }


def block(*libraries: str) -> str:
    return "\n".join(f"sys.modules[{library!r}] = None" for library in libraries)


def test_without_the_optional_libraries_their_trials_are_skipped() -> None:
    done = run("--json", before=block("accelerate", "datasets", "transformers", "tokenizers", "trl", "ray", "peft"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["PreferencePairs"]["status"] == "passed"
    assert checks["extend_from_dataset"] == {
        **checks["extend_from_dataset"], "status": "skipped", "why": "datasets is not installed"
    }  # fmt: skip
    assert checks["CollectCallback"]["why"] == "transformers is not installed"
    features = {feature["name"]: feature for feature in found["features"]}
    assert not features["Ray"]["live"]
    assert not features["streams in GRPO"]["live"]


def fake(folder: Path, name: str, version: str) -> Path:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize(("arguments", "status"), [(["--json"], 0), (["--json", "--strict"], 2)])
def test_a_newer_version_fails_under_strict_alone(arguments: list[str], status: int, tmp_path: Path) -> None:
    done = run(*arguments, path=fake(tmp_path, "accelerate", "99.0"))
    assert done.returncode == status, done.stdout
    (row,) = [row for row in json.loads(done.stdout)["versions"] if row["name"] == "accelerate"]
    assert (row["version"], row["status"]) == ("99.0", "newer")


def test_an_older_version_fails_every_trial_with_what_works(tmp_path: Path) -> None:
    done = run("--json", path=fake(tmp_path, "trl", "0.20.0"))
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert all(check["status"] == "failed" and "It works with Python" in check["why"] for check in found["checks"])


def _broken() -> None:
    raise ValueError("one is two")


def test_a_failed_trial_is_told_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "SMOKE_CHECKS", {"DatasetType": _broken})
    assert doctor.run(as_json=False, strict=False) == 1
    printed = capsys.readouterr().out
    assert "ValueError: one is two" in printed
    assert "1 of 1 trials failed" in printed


def test_the_tables_need_no_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "SMOKE_CHECKS", {})
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert doctor.run(as_json=False, strict=False) == 0
    lines: list[Any] = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["library", "version"] for line in lines)
    assert any(line.startswith("torchrl ") for line in lines)
