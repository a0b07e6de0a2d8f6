"""Run the test suite with every pinned set of versions, each in its own environment, and print one table.

    python tools/matrix.py [--row NAME ...] [--jobs N] [-- PYTEST_ARGUMENT ...]

A row is a file of constraints/. Its environment is made in .venv-matrix/NAME, and made anew when what is installed in
it differs from the file. What ran is written to constraints/matrix.json; the tables of README.md and of
torchrl_trl_bridge/compat/tested.py are written from that. A run of a part of the tests writes nothing.

Needs Python 3.10 or later and the Python of each row; no packages.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints"
RESULTS = CONSTRAINTS / "matrix.json"
ENVIRONMENTS = ROOT / ".venv-matrix"
LIBRARIES = ["torch", "torchrl", "tensordict", "trl", "transformers", "datasets", "accelerate"]
MEMORY_PER_ROW = 5e9
"""Bytes: Ray, two gloo processes and the trainers of one run."""

BY_HAND = "By hand"
"""What the first line of a constraints file says if its row runs only when it is named."""

_ASK_VERSIONS = """
import importlib.metadata, json, platform, sys
names = json.loads(sys.argv[1])
found = {}
for name in names:
    try:
        found[name] = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps({"python": platform.python_version(), **found}))
"""


@dataclasses.dataclass
class Row:
    """A pinned set of versions."""

    name: str
    python: str
    pins: dict[str, str]
    by_hand: bool

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def versions(self) -> dict[str, str]:
        return {"python": self.python, **{name: self.pins[name] for name in LIBRARIES}}


class RowError(Exception):
    """A row that could not be run."""


def read_row(path: Path) -> Row:
    """A constraints file: its first line says which Python, each other line pins a package."""
    header, *lines = path.read_text().splitlines()
    python = re.match(r"# Python (3\.\d+)\.", header)
    if python is None:
        raise RowError(f'{path.name} has to begin with "# Python 3.<minor>.", not with {header!r}')
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return Row(path.stem, python[1], pins, BY_HAND in header)


def all_rows() -> list[Row]:
    """The rows of the matrix, the newest first."""
    rows = [read_row(path) for path in CONSTRAINTS.glob("*.txt")]
    return sorted(rows, key=lambda row: [_numbers(row.pins["trl"]), _numbers(row.python)], reverse=True)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


# Environments


def find_python(version: str) -> str:
    """A Python of this minor version: what the environment variable PYTHON_3_x names, on the path, or pyenv's."""
    named = os.environ.get(f"PYTHON_{version.replace('.', '_')}")
    installed = sorted(glob.glob(str(Path.home() / f".pyenv/versions/{version}.*/bin/python")))
    for candidate in [named, shutil.which(f"python{version}"), *installed, sys.executable]:
        if candidate and _minor_of(candidate) == version:
            return candidate
    raise RowError(f"there is no Python {version} here: install it, or name one in PYTHON_{version.replace('.', '_')}")


def _minor_of(python: str) -> str | None:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def installed_versions(row: Row) -> dict[str, str | None]:
    """What the environment of a row says that it holds; nothing if there is none."""
    if not row.interpreter.exists():
        return {}
    command = [str(row.interpreter), "-c", _ASK_VERSIONS, json.dumps([*row.pins, "torchrl-trl-bridge"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, str | None] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def mismatches(row: Row, found: dict[str, str | None]) -> list[str]:
    """How an environment differs from the file of its row."""
    wrong = [f"{name} {found.get(name)} instead of {pin}" for name, pin in row.pins.items() if found.get(name) != pin]
    if not (found.get("python") or "").startswith(f"{row.python}."):
        wrong.append(f"Python {found.get('python')} instead of {row.python}")
    if found.get("torchrl-trl-bridge") is None:
        wrong.append("torchrl-trl-bridge is not installed")
    return wrong


def prepare(row: Row) -> None:
    """Makes the environment of a row, unless it is there as its file says, and asserts what is in it."""
    if mismatches(row, installed_versions(row)):
        log = ENVIRONMENTS / f"{row.name}.install.log"
        ENVIRONMENTS.mkdir(exist_ok=True)
        with log.open("w") as out:
            pip = [str(row.interpreter), "-m", "pip", "install", "--disable-pip-version-check"]
            file = ["--constraint", str(CONSTRAINTS / f"{row.name}.txt")]
            for command in (
                [find_python(row.python), "-m", "venv", "--clear", str(row.folder)],
                [*pip, *file, "--editable", f"{ROOT}[test]"],
            ):
                if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode:
                    raise RowError(f"the set cannot be installed: see {log.relative_to(ROOT)}")
    wrong = mismatches(row, installed_versions(row))
    if wrong:
        raise RowError(f"the environment is not what the file says: {', '.join(wrong)}")


# Runs


def run_tests(row: Row, threads: int, arguments: list[str]) -> dict[str, Any]:
    """Runs the tests of a row, and returns what came of them."""
    report = ENVIRONMENTS / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    settings = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(threads)}
    # Tests call programs of their environment by name.
    settings["PATH"] = f"{row.interpreter.parent}{os.pathsep}{os.environ['PATH']}"
    # What was found by the run before says nothing about this one.
    options = ["-p", "no:cacheprovider", "--ignore=tests/compat/test_results.py", f"--junit-xml={report}"]
    command = [str(row.interpreter), "-m", "pytest", *options, *arguments]
    started = time.monotonic()
    with (ENVIRONMENTS / f"{row.name}.log").open("w") as out:
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    seconds = round(time.monotonic() - started)
    if not report.exists():
        raise RowError(f"pytest gave no report (status {status}): see .venv-matrix/{row.name}.log")
    return {**read_report(report), "seconds": seconds}


def read_report(path: Path) -> dict[str, Any]:
    """The numbers of a JUnit report: passed, failed (errors too), and the skipped by reason."""
    passed = failed = 0
    skipped: collections.Counter[str] = collections.Counter()
    for case in ET.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif (skip := case.find("skipped")) is not None:
            skipped[_reason(skip)] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": dict(sorted(skipped.items()))}


def _reason(skip: ET.Element) -> str:
    reason = skip.get("message") or skip.text or "no reason"
    if reason == "collection skipped":  # a whole module; the reason stands in its repr
        found = re.search(r"Skipped: (.*?)'?\)?$", (skip.text or "").strip())
        reason = found[1] if found else reason
    return reason.removeprefix("Skipped: ").strip()


def run_row(row: Row, threads: int, arguments: list[str]) -> dict[str, Any]:
    """Prepares and runs a row. An error is a result too."""
    result: dict[str, Any] = {"versions": row.versions, "date": datetime.date.today().isoformat()}
    try:
        prepare(row)
        return {**result, **run_tests(row, threads, arguments)}
    except RowError as error:
        return {**result, "passed": 0, "failed": 0, "skipped": {}, "seconds": 0, "error": str(error)}


def is_supported(result: dict[str, Any]) -> bool:
    """A row is supported because it passed."""
    return result["passed"] > 0 and not result["failed"] and "error" not in result


def how_many_at_once(rows: int) -> int:
    """As many rows as there are processors and memory for."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = MEMORY_PER_ROW
    return max(1, min(rows, os.cpu_count() or 1, int(free // MEMORY_PER_ROW)))


# Tables

COLUMNS = ["Python", *LIBRARIES, "passed", "skipped", "seconds", "run on"]


def table(results: dict[str, dict[str, Any]], columns: list[str]) -> list[str]:
    """A Markdown table of results, one line a row."""
    lines = [columns, ["-" for _ in columns]]
    for result in results.values():
        cells = {
            **result["versions"],
            **result,
            "Python": result["versions"]["python"],
            "skipped": sum(result["skipped"].values()),
            "run on": result["date"],
        }
        lines.append([str(cells[column]) for column in columns])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines[1] = ["-" * width for width in widths]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]


def summary(results: dict[str, dict[str, Any]]) -> str:
    """What is printed at the end: the table, and why tests were skipped or rows did not run."""
    lines = table(results, [*COLUMNS[:-3], "failed", *COLUMNS[-3:]])
    for name, result in results.items():
        if "error" in result:
            lines += ["", f"{name}: {result['error']}"]
        if result["skipped"]:
            lines += ["", f"{name}: skipped"]
            lines += [f"{count:5} {reason}" for reason, count in result["skipped"].items()]
    return "\n".join(lines)


def readme_section(results: dict[str, dict[str, Any]]) -> str:
    """The table of README.md, between its marks."""
    lines = table({name: result for name, result in results.items() if is_supported(result)}, COLUMNS)
    return "\n".join(["<!-- matrix: written by `make matrix` -->", *lines, "<!-- end of matrix -->"])


def with_section(readme: str, section: str) -> str:
    """README.md with another table."""
    return re.sub(r"<!-- matrix: .*?<!-- end of matrix -->", lambda _: section, readme, flags=re.DOTALL)


def tested_module(results: dict[str, dict[str, Any]]) -> str:
    """The source of ``torchrl_trl_bridge/compat/tested.py``."""
    lines = [
        '"""The sets of versions that the test suite passed with, by name. Written by ``make matrix``: not by hand."""',
        "",
        "TESTED: dict[str, dict[str, str]] = {",
    ]
    for name, result in results.items():
        if is_supported(result):
            lines += [f'    "{name}": {{']
            lines += [f'        "{library}": "{version}",' for library, version in result["versions"].items()]
            lines += ["    },"]
    return "\n".join([*lines, "}", ""])


def write(results: dict[str, dict[str, Any]]) -> None:
    """Writes the results, and what is made of them."""
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    (ROOT / "torchrl_trl_bridge/compat/tested.py").write_text(tested_module(results))
    readme = ROOT / "README.md"
    readme.write_text(with_section(readme.read_text(), readme_section(results)))


def merged(rows: list[Row], results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The new results with the older ones of rows that did not run now, in the order of the rows."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = {**before, **results}
    return {row.name: known[row.name] for row in rows if row.name in known}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit status is 0 if every row passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", default=[], help="only this row; may be given several times")
    parser.add_argument("--jobs", type=int, help="rows that run at once; default: what processors and memory allow")
    parser.add_argument("--list", action="store_true", help="print the names of the rows as JSON, and stop")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args(arguments)
    rows = all_rows()
    unknown = set(options.row) - {row.name for row in rows}
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}. There are {', '.join(row.name for row in rows)}")
    chosen = [row for row in rows if (row.name in options.row if options.row else not row.by_hand)]
    if options.list:
        print(json.dumps([row.name for row in chosen]))
        return 0
    jobs = options.jobs or how_many_at_once(len(chosen))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    started = time.monotonic()
    print(f"{len(chosen)} rows, {jobs} at once", flush=True)
    results: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run_row, row, threads, options.pytest): row for row in chosen}
        for run in concurrent.futures.as_completed(runs):
            name, result = runs[run].name, run.result()
            results[name] = result
            print(f"{name}: {'passed' if is_supported(result) else 'FAILED'} in {result['seconds']} s", flush=True)
    results = {row.name: results[row.name] for row in chosen}
    print(f"\n{summary(results)}\n\n{time.monotonic() - started:.0f} s in all")
    if not options.pytest:
        write(merged(rows, results))
    return 0 if all(map(is_supported, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
