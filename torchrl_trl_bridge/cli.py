"""The command ``torchrl-trl-bridge``. Heavy libraries load when a subcommand runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torchrl_trl_bridge


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the result is the exit status: 0 done, 1 the run failed its own check, 2 it cannot run."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrl-trl-bridge", description="TorchRL replay buffers feed TRL trainers; reward models score rollouts."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {torchrl_trl_bridge.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser(
        "demo",
        help="collect with TorchRL, score, and train with TRL, in about a minute on a CPU",
        description="Collect rollouts with TorchRL's LLMCollector, score them with a reward model, and train TRL's "
        "GRPOTrainer on prompts streamed from the replay buffer. Fails if the mean reward does not rise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--model", metavar="NAME", help="path or hub name of a causal chat model; without it a small one is made"
    )
    demo.add_argument("--steps", type=_positive, default=100, help="optimizer steps of GRPO")
    demo.add_argument("--seed", type=int, default=0, help="seed of models, prompts and sampling")
    demo.add_argument(
        "--out", type=Path, default=Path("demo-out"), metavar="FOLDER", help="where the curve and the summary go"
    )
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser(
        "doctor",
        help="report installed versions and live features, and try every public name on a few rows",
        description="Report the installed versions and whether they are tested, which features are live, and a trial "
        "of every public name on a few rows. Exit status: 0 all well, 1 a trial failed, 2 an unsupported version "
        "(with --strict).",
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON, in the form of compat.report()")
    doctor.add_argument(
        "--strict", action="store_true", help="exit with 2 if a version is older or newer than those supported"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _doctor(options: argparse.Namespace) -> int:
    from torchrl_trl_bridge import doctor

    return doctor.run(as_json=options.json, strict=options.strict)


def _demo(options: argparse.Namespace) -> int:
    print("Loading TorchRL and TRL ...", file=sys.stderr, flush=True)
    try:
        from torchrl_trl_bridge import demo
    except ImportError as error:
        # Only a library that is not installed; anything else is a fault of ours and keeps its traceback.
        if not isinstance(error, ModuleNotFoundError) or (error.name or "").startswith("torchrl_trl_bridge"):
            raise
        hint = f'pip install "torchrl-trl-bridge[demo]" (no module named {error.name!r})'
        print(f"torchrl-trl-bridge: error: the demo needs its extra: {hint}", file=sys.stderr)
        return 2
    return demo.run(model=options.model, steps=options.steps, seed=options.seed, out=options.out)
