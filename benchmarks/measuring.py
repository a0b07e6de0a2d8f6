"""What the scripts measure with: torch's own `Timer`, way by way in turns, and what they report for `make bench`."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.benchmark import Timer

Ways = dict[str, Callable[[], Any]]


@dataclasses.dataclass
class Figure:
    """A median, and the lower and the upper quartile of what it is the median of."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure:
        values = list(values)
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def scaled(self, factor: float) -> Figure:
        """The figure in another unit."""
        return Figure(self.median * factor, self.low * factor, self.high * factor)


class Times:
    """Seconds a call of each way, one number a turn."""

    def __init__(self, turns: dict[str, list[float]]) -> None:
        self.turns = turns

    def seconds(self, way: str) -> Figure:
        return Figure.of(self.turns[way])

    def speed(self, way: str, items: int) -> float:
        """Items a second, of so many a call."""
        return items / statistics.median(self.turns[way])

    def ratio(self, slow: str, fast: str) -> Figure:
        """How many times as long as ``fast`` ``slow`` takes. Two ways are compared within a turn."""
        return Figure.of(a / b for a, b in zip(self.turns[slow], self.turns[fast], strict=True))

    def difference(self, slow: str, fast: str) -> Figure:
        """How many seconds longer ``slow`` takes than ``fast``."""
        return Figure.of(a - b for a, b in zip(self.turns[slow], self.turns[fast], strict=True))


def in_turns(ways: Ways, *, turns: int = 9, run_time: float = 0.05) -> Times:
    """Times the ways, each once a turn, in one thread.

    It is processor time, in which a process that shares the machine counts little, and two ways within a turn less.
    Python's garbage collector is on, as in any program; a timer has it off unless its ``setup`` says so.
    """
    settings: dict[str, Any] = {"setup": "import gc; gc.enable()", "timer": time.process_time, "num_threads": 1}
    timers = {name: Timer("run()", globals={"run": run}, **settings) for name, run in ways.items()}
    for run in ways.values():
        run()
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, timer in timers.items():
            measured[name].append(timer.blocked_autorange(min_run_time=run_time).median)
    return Times(measured)


def on_the_clock(run: Callable[..., Any], *arguments: Any) -> float:
    """Seconds that a call takes, with what it waits for: the disk, or another process."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def peak_memory(run: Callable[[], Any]) -> float:
    """Bytes that the process grows by at most while ``run`` runs; what it returns still counts. Linux only."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else it would be served from what was freed before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _status("VmRSS")
    kept = run()
    peak = _status("VmHWM")
    del kept
    return max(peak - before, 0.0)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith(field))


def alone(script: str, *arguments: str) -> Any:
    """What this script prints, as JSON, when it runs with these arguments in a process whose memory is new."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


class Report:
    """What a script has measured.

    Args:
        quick: fewer and smaller measurements, to see whether the script runs.
    """

    def __init__(self, quick: bool = False) -> None:
        self.quick = quick
        self.claims: list[dict[str, Any]] = []
        self.curves: list[dict[str, Any]] = []

    def claim(
        self,
        work: str,
        figure: Figure | float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        ways: dict[str, str] | None = None,
    ) -> None:
        """A figure, which becomes a line of the table.

        Args:
            work: what was done, in the words of the table.
            figure: what was measured, with its spread where there is one.
            unit: of the figure: "× torchrl's class", "ms", "MB", "rows/s".
            at_least, at_most: the target, in the same unit.
            ways: what each way took or gave, in words, by its name.
        """
        figure = figure if isinstance(figure, Figure) else Figure(figure, figure, figure)
        above, below = at_least is None or figure.median >= at_least, at_most is None or figure.median <= at_most
        has_target = at_least is not None or at_most is not None
        claim = {
            "work": work,
            **dataclasses.asdict(figure),
            "unit": unit,
            "at_least": at_least,
            "at_most": at_most,
            "met": above and below if has_target else None,
            "ways": ways or {},
        }
        self.claims.append(claim)
        print("  ".join([work, as_text(claim), target_text(claim), *(f"{k}: {v}" for k, v in claim["ways"].items())]))
        sys.stdout.flush()

    def curve(self, name: str, title: str, x: str, y: str, lines: dict[str, Sequence[tuple[float, float]]]) -> None:
        """Points, which become a plot, ``plots/<name>.png``, with both axes logarithmic."""
        self.curves.append({"name": name, "title": title, "x": x, "y": y, "lines": lines})
        for line, points in lines.items():
            print(f"{title}, {line}: " + ", ".join(f"{at:g}: {value:,.4g}" for at, value in points), flush=True)


def as_text(claim: dict[str, Any]) -> str:
    """A measured figure with its spread: ``2.4 (2.3 to 2.6) × torchrl's class``."""
    spread = f" ({_short(claim['low'])} to {_short(claim['high'])})" if claim["low"] != claim["high"] else ""
    return f"{_short(claim['median'])}{spread} {claim['unit']}"


def target_text(claim: dict[str, Any]) -> str:
    """A target: ``≥ 6``; empty where there is none."""
    signs = (("≥", claim["at_least"]), ("≤", claim["at_most"]))
    return " ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def main(description: str | None, measure: Callable[[Report], None]) -> None:
    """The command line of a script: ``--quick``, and ``--out`` for the file that `make bench` reads."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    parser.add_argument("--out", type=Path, help="write what was measured to this file, as JSON")
    options = parser.parse_args()
    report = Report(options.quick)
    measure(report)
    if options.out:
        options.out.write_text(json.dumps({"claims": report.claims, "curves": report.curves}))
