"""What is installed, and what of it is supported. The metadata of packages is asked: nothing is imported for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import warnings
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from torchrl_trl_bridge.compat.tested import TESTED

__all__ = [
    "LIBRARIES",
    "OLDEST",
    "UNKNOWN",
    "Finding",
    "check",
    "findings",
    "matching_set",
    "newest",
    "supported",
    "versions",
]

LIBRARIES = ("torch", "torchrl", "tensordict", "trl", "transformers", "datasets", "accelerate")

OLDEST = {
    "python": "3.10",
    "torchrl": "0.11",
    "tensordict": "0.11",
    "trl": "0.24",
    "transformers": "4.56",
    "datasets": "3.1",
}
"""The first supported releases. What is not named here is bounded by those that are: TRL asks for its accelerate."""

UNKNOWN = "unknown"
"""The version of a library that is there without metadata, such as one imported from its sources."""


@dataclass(frozen=True)
class Finding:
    """What is to be said of one library."""

    name: str
    version: str | None
    status: str
    """``"tested"``: its minor release is in a tested set. ``"untested"``: it lies between such. ``"newer"``: than all
    of them. ``"older"``: than the first supported one. ``"unknown"``: it does not say. ``"missing"``: not installed."""


def versions() -> dict[str, str | None]:
    """The installed versions of Python and the libraries between which this package bridges.

    Returns:
        By name: the version; ``"unknown"`` for a library without metadata; None for one that is not installed.

    Examples:
        >>> versions()["torchrl"]
        '0...'
    """
    return {"python": platform.python_version(), **{name: _version_of(name) for name in LIBRARIES}}


def _version_of(library: str) -> str | None:
    for distribution in (library, f"{library}-nightly"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return UNKNOWN if _can_be_found(library) else None


def _can_be_found(library: str) -> bool:
    try:
        spec = importlib.util.find_spec(library)
    except ValueError:  # a stand-in without a spec
        return True
    # A folder of that name, without a module in it, is none: `datasets/` in the working directory is common.
    return spec is not None and spec.origin is not None


def _minor(version: str) -> Version | None:
    """The release of a version without its patch level, or None for what is no version (PEP 440)."""
    try:
        return Version(".".join(map(str, [*Version(version).release, 0][:2])))
    except InvalidVersion:
        return None


def newest(name: str) -> str:
    """The newest tested minor release of Python or a library."""
    return str(max(Version(".".join(row[name].split(".")[:2])) for row in TESTED.values()))


def findings() -> list[Finding]:
    """What is to be said of Python and each library."""
    return [Finding(name, version, _status(name, version)) for name, version in versions().items()]


def _status(name: str, version: str | None) -> str:
    if version is None:
        return "missing"
    minor = _minor(version)
    if minor is None:
        return "unknown"
    if name in OLDEST and minor < Version(OLDEST[name]):
        return "older"
    if minor > Version(newest(name)):
        return "newer"
    return "tested" if minor in {_minor(row[name]) for row in TESTED.values()} else "untested"


def matching_set(installed: dict[str, str | None] | None = None) -> str | None:
    """The name of the tested set whose minor releases are those that are installed, or None."""
    installed = versions() if installed is None else installed
    present = {name: _minor(version) for name, version in installed.items() if version is not None}
    for name, row in TESTED.items():
        if all(_minor(row[library]) == minor for library, minor in present.items()):
            return name
    return None


def supported() -> str:
    """The supported releases, in words."""
    names = {"python": "Python"}
    return ", ".join(f"{names.get(name, name)} {oldest} to {newest(name)}" for name, oldest in OLDEST.items())


def check(stacklevel: int = 1) -> None:
    """Checks the installed versions. It runs when the first public name is loaded, and imports no library.

    Args:
        stacklevel: which of the callers a warning points to: 1 is the one of this function.

    Raises:
        ImportError: if one is older than what is supported; it says which versions are.

    Warns:
        UserWarning: if one has a newer minor release than any that was tested; it names the newest tested.

    Examples:
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # what is newer than tested
        ...     check()
    """
    older = [finding for finding in findings() if finding.status == "older"]
    if older:
        found = ", ".join(f"{finding.name} {finding.version}" for finding in older)
        upgrades = " ".join(f'"{finding.name}>={OLDEST[finding.name]}"' for finding in older)
        raise ImportError(
            f"torchrl-trl-bridge does not work with {found}. It works with {supported()}. "
            + (f"Write: pip install --upgrade {upgrades}" if older[0].name != "python" else "Use a newer Python.")
        )
    newer = [finding for finding in findings() if finding.status == "newer"]
    if newer:
        found = ", ".join(
            f"{finding.name} {finding.version} (the newest tested is {newest(finding.name)})" for finding in newer
        )
        warnings.warn(
            f"torchrl-trl-bridge is not tested with {found}. It is tried; `torchrl-trl-bridge doctor` checks it.",
            stacklevel=stacklevel + 1,
        )
