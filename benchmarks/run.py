"""Runs the scripts of this folder, and writes results.json, results.md, plots/ and the section of the README.

    python benchmarks/run.py [--quick] [NAME ...]

With ``--quick`` or names it writes nothing but to ``--to``. It needs the ``bench`` extra.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from measuring import as_text, target_text

HERE = Path(__file__).parent
LIBRARIES = ["torch", "torchrl", "tensordict", "trl", "transformers", "datasets", "accelerate", "torchrl-trl-bridge"]
SECONDS = 300
"""How long a script may take."""


def scripts() -> list[Path]:
    return sorted(path for path in HERE.glob("*.py") if path.stem not in ("measuring", "run"))


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def run(script: Path, quick: bool) -> dict[str, Any]:
    """What a script measured; an error is a result too."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, str(script), "--out", str(out), *(["--quick"] if quick else [])]
        # One thread: what is measured is the way of a batch, not how torch shares out a sum.
        settings = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        settings |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "RL_WARNINGS": "0", "RL_LOGGING_LEVEL": "ERROR"}
        result: dict[str, Any]
        try:
            subprocess.run(command, env=os.environ | settings, cwd=folder, timeout=SECONDS, check=True)
            result = json.loads(out.read_text())
        except (subprocess.SubprocessError, OSError) as error:
            result = {"claims": [], "curves": [], "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {**result, "seconds": round(time.monotonic() - started)}


def environment() -> dict[str, Any]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **found},
    }


def table(results: dict[str, Any]) -> list[str]:
    """The Markdown table of all figures, by script."""
    lines = ["| work | measured | target | |", "| --- | --- | --- | --- |"]
    for name, result in results["scripts"].items():
        lines += [f"| **`benchmarks/{name}.py`** | | | |"]
        for claim in result["claims"]:
            met = {True: "met", False: "not met", None: ""}[claim["met"]]
            lines += [f"| {claim['work']} | {as_text(claim)} | {target_text(claim)} | {met} |"]
        if "error" in result:
            lines += [f"| failed: {result['error']} | | | |"]
    return lines


def where(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    return f"{results['date']}, {results['processor']}, {results['cores']} cores; {versions}"


def page(results: dict[str, Any], plots: list[Path]) -> str:
    """results.md: all figures and plots."""
    lines = ["# Figures", "", f"Written by `make bench`: {where(results)}.", ""]
    lines += ["Medians, with their quartiles; ratios are within a turn. What each script does is said in it.", ""]
    lines += table(results)
    lines += ["", "What each way took:", ""]
    for work, claims in by_work(results).items():
        ways = {way: took for claim in claims for way, took in claim["ways"].items()}
        if ways:
            lines += [f"- {work}: {'; '.join(f'{way} {took}' for way, took in ways.items())}"]
    return "\n".join([*lines, "", *(f"![{plot.stem}](plots/{plot.name})" for plot in plots), ""])


def by_work(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The figures of each piece of work, over all scripts."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results["scripts"].values():
        for claim in result["claims"]:
            found.setdefault(claim["work"], []).append(claim)
    return found


def readme_section(results: dict[str, Any]) -> str:
    """What stands in the README, between its marks: the figures that have a target, without their spread."""
    lines = ["| work | measured (target) |", "| --- | --- |"]
    for work, claims in by_work(results).items():
        figures = [in_short(claim) for claim in claims if claim["met"] is not None]
        if figures:
            lines += [f"| {work} | {'; '.join(figures)} |"]
    versions = results["versions"]
    text = (
        f"Measured on {results['date']} with torchrl {versions['torchrl']} and TRL {versions['trl']}, one thread of "
        f'{results["processor"]}. "torchrl\'s class" is that of `torchrl.modules.llm.trl_interop`. `make bench` '
        "measures it anew; [benchmarks/README.md](benchmarks/README.md) says where the time goes, and why a "
        "target is not met."
    )
    parts = [
        "<!-- bench: written by `make bench` -->",
        "## How fast",
        "",
        *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False),
        "",
        *lines,
        "",
        "All figures, their spread, and how cost grows: [benchmarks/results.md](benchmarks/results.md).",
        "<!-- end of bench -->",
    ]
    return "\n".join(parts)


def in_short(claim: dict[str, Any]) -> str:
    """A figure without its spread, and its target: ``2.4 × torchrl's class (≥ 6, not met)``."""
    figure = as_text({**claim, "low": claim["median"], "high": claim["median"]})
    return f"{figure} ({target_text(claim)}{'' if claim['met'] else ', not met'})"


def with_section(readme: str, section: str) -> str:
    """README.md with another section."""
    return re.sub(r"<!-- bench: .*?<!-- end of bench -->", lambda _: section, readme, flags=re.DOTALL)


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """A PNG for each curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    plots = []
    for curve in (curve for result in results["scripts"].values() for curve in result["curves"]):
        figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
        for (line, points), marker in zip(curve["lines"].items(), "osD^vPX*" * 2, strict=False):
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=3.5, linewidth=1.2, label=line)
        axes.set(xscale="log", yscale="log", xlabel=curve["x"], ylabel=curve["y"], title=curve["title"])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        plots.append(folder / f"{curve['name']}.png")
        figure.savefig(plots[-1], dpi=80)
        plt.close(figure)
    return plots


def write(results: dict[str, Any], folder: Path) -> None:
    """results.json, results.md and plots/."""
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (folder / "results.md").write_text(page(results, draw(results, folder / "plots")))


def main() -> int:
    """Runs the command; the exit status is 0 if every script ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    parser.add_argument("--to", type=Path, help="write results.json, results.md and plots/ to this folder instead")
    parser.add_argument("names", nargs="*", help="scripts to run; all by default")
    options = parser.parse_args()
    known = {script.stem: script for script in scripts()}
    if unknown := set(options.names) - set(known):
        parser.error(f"no such script: {', '.join(unknown)}. There are {', '.join(known)}")
    results: dict[str, Any] = {**environment(), "scripts": {}}
    started = time.monotonic()
    for name in options.names or known:
        print(f"\n{name}", flush=True)
        results["scripts"][name] = run(known[name], options.quick)
        print(f"{name}: {results['scripts'][name]['seconds']} s", flush=True)
    results["seconds"] = round(time.monotonic() - started)
    print(f"\n{results['seconds']} s in all")
    failed = [name for name, result in results["scripts"].items() if "error" in result]
    if failed:
        print(f"failed: {', '.join(failed)}")
    if options.to:
        write(results, options.to)
    elif not (options.quick or options.names or failed):
        write(results, HERE)
        readme = HERE.parent / "README.md"
        readme.write_text(with_section(readme.read_text(), readme_section(results)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
