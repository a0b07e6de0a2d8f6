"""The metadata, and the wheel that users install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torchrl_trl_bridge

ROOT = Path(__file__).parents[1]


def test_one_version() -> None:
    assert f'\nversion = "{torchrl_trl_bridge.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_changelog_knows_the_version() -> None:
    assert f"\n## [{torchrl_trl_bridge.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: list[str]) -> None:
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "torchrl_trl_bridge").rglob("*.py")}
    packed = {name for name in wheel if ".dist-info/" not in name}
    assert packed == source | {"torchrl_trl_bridge/py.typed"}


def test_the_wheel_has_the_command_and_the_licence(wheel: list[str]) -> None:
    names = {name.split(".dist-info/")[1] for name in wheel if ".dist-info/" in name}
    assert {"entry_points.txt", "licenses/LICENSE"} <= names
