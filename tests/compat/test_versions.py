"""The versions are checked when the first public name is loaded. What is installed is told by metadata on the path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_trl_bridge.compat import check, versions
from torchrl_trl_bridge.compat.tested import TESTED
from torchrl_trl_bridge.compat.versions import (
    LIBRARIES,
    OLDEST,
    UNKNOWN,
    findings,
    matching_set,
    newest,
    supported,
)

ROOT = Path(__file__).parents[2]
LOAD = "from torchrl_trl_bridge import DatasetType"


def with_versions(folder: Path, code: str, **installed: str) -> subprocess.CompletedProcess[str]:
    """Runs code where libraries claim other versions: their metadata comes first on the path."""
    for name, version in installed.items():
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"PYTHONPATH": path}
    )


@pytest.mark.filterwarnings("ignore:torchrl-trl-bridge is not tested")  # a row that is new to the matrix
def test_what_is_installed_here_is_supported() -> None:
    check()
    assert all(version for version in versions().values())


@pytest.mark.parametrize("name", [name for name in OLDEST if name != "python"])
def test_an_older_release_is_an_import_error_that_says_which_versions_work(name: str, tmp_path: Path) -> None:
    done = with_versions(tmp_path, LOAD, **{name: "0.1.0"})
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: torchrl-trl-bridge does not work with {name} 0.1.0.")
    assert supported() in error
    assert f'pip install --upgrade "{name}>={OLDEST[name]}"' in error


def test_every_import_fails_while_a_release_is_too_old(tmp_path: Path) -> None:
    code = f"for _ in range(2):\n    try:\n        {LOAD}\n    except ImportError as error:\n        print('no')"
    assert with_versions(tmp_path, code, trl="0.20.0").stdout.split() == ["no", "no"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_newer_release_is_tried_with_one_warning_at_the_users_line(name: str, tmp_path: Path) -> None:
    done = with_versions(tmp_path, f"\n\n{LOAD}\nfrom torchrl_trl_bridge import PreferencePairs", **{name: "99.1.2"})
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "torchrl-trl-bridge is not tested" in line]
    assert warning.startswith("<string>:3: UserWarning:")
    assert f"{name} 99.1.2 (the newest tested is {newest(name)})" in warning


@pytest.mark.parametrize("version", ["{}.999", "{}.999+cu128", "{}.999.post1"])
def test_a_newer_patch_release_is_no_news(version: str, tmp_path: Path) -> None:
    done = with_versions(tmp_path, LOAD, torchrl=version.format(newest("torchrl")))
    assert done.returncode == 0, done.stderr
    assert "torchrl " not in done.stderr, "of other libraries, the row that is being tested may be the first"


@pytest.mark.parametrize("version", ["unknown", "2026-12-01", "main.dirty"])
def test_a_version_that_is_none_stops_nobody(version: str, tmp_path: Path) -> None:
    done = with_versions(tmp_path, f"{LOAD}\nprint('loaded')", torchrl=version)
    assert "loaded" in done.stdout, done.stderr


def test_a_library_without_metadata_is_unknown_and_a_bare_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "accelerate_from_sources.py").touch()
    (tmp_path / "only_a_folder").mkdir()
    code = (
        "from torchrl_trl_bridge.compat import versions as module\n"
        "from torchrl_trl_bridge.compat.versions import _version_of\n"
        "print(_version_of('accelerate_from_sources'), _version_of('only_a_folder'), _version_of('not_there'))"
    )
    assert with_versions(tmp_path, code).stdout.split() == [UNKNOWN, "None", "None"]


def test_a_nightly_build_counts_for_its_library(tmp_path: Path) -> None:
    code = "from torchrl_trl_bridge.compat.versions import _version_of; print(_version_of('somelib'))"
    assert with_versions(tmp_path, code, somelib_nightly="2026.12.1").stdout.strip() == "2026.12.1"


def test_checking_loads_no_library(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom torchrl_trl_bridge.compat import check\ncheck()\n"
        f"print([name for name in {LIBRARIES} if name in sys.modules])"
    )
    assert with_versions(tmp_path, code).stdout.strip() == "[]"


def test_findings_name_each_library() -> None:
    found = {finding.name: finding for finding in findings()}
    assert list(found) == ["python", *LIBRARIES]
    assert all(finding.status not in ("older", "unknown", "missing") for finding in found.values())


@pytest.mark.parametrize("name", TESTED)
def test_a_tested_set_is_known_whatever_its_patch_levels(name: str) -> None:
    row = TESTED[name]
    moved = {library: ".".join([*version.split(".")[:2], "77"]) for library, version in row.items()}
    known = matching_set(moved)
    assert known is not None
    assert {k: v.split(".")[:2] for k, v in TESTED[known].items()} == {k: v.split(".")[:2] for k, v in row.items()}
    assert matching_set({**moved, "trl": "99.0.0"}) is None


def test_the_bounds_are_those_of_the_package() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={OLDEST["python"]}"' in metadata
    bounds = dict(re.findall(r'"([a-z]+)>=([\d.]+)"', metadata))
    assert bounds == {name: version for name, version in OLDEST.items() if name != "python"}
