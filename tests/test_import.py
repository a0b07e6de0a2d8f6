"""What importing loads. Each probe runs in a fresh process, since this one has loaded everything already."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import torchrl_trl_bridge

HUGGING_FACE = {"accelerate", "datasets", "tokenizers", "transformers", "trl"}
HEAVY = HUGGING_FACE | {"torch", "tensordict", "torchrl"}
NEEDS_TRANSFORMERS = {"BufferCheckpoint", "CollectCallback"}  # sub-classes of its TrainerCallback
CLASSES = [name for name in torchrl_trl_bridge.__all__ if name != "__version__"]


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def loaded(statement: str) -> set[str]:
    """The heavy libraries that a statement loads in a fresh process."""
    done = fresh(f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("library", ["datasets", "torchrl"])
def test_the_probe_can_fail(library: str) -> None:
    assert library in loaded(f"import {library}")


@pytest.mark.parametrize("module", ["torchrl_trl_bridge", "torchrl_trl_bridge.cli"])
def test_the_package_and_its_command_load_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") == set()


def test_importing_takes_no_time_to_speak_of() -> None:
    # Processor time of the import alone, at best of three, so that a busy machine does not count; 0.2 s is the bound.
    code = "import time; start = time.process_time(); import torchrl_trl_bridge; print(time.process_time() - start)"
    assert min(float(fresh(code).stdout) for _ in range(3)) < 0.2


def test_public_names_load_no_hugging_face_library() -> None:
    names = [name for name in CLASSES if name not in NEEDS_TRANSFORMERS]
    alone = loaded("import torchrl")  # a TorchRL that loads one by itself is not our doing
    assert loaded(f"from torchrl_trl_bridge import {', '.join(names)}") & HUGGING_FACE <= alone


def test_public_names_need_no_hugging_face_library() -> None:
    done = fresh(
        "import sys\n"
        f"for library in {sorted(HUGGING_FACE)}: sys.modules[library] = None\n"
        "import torchrl_trl_bridge\n"
        f"for name in {CLASSES}:\n"
        "    try:\n"
        "        getattr(torchrl_trl_bridge, name)\n"
        "    except ImportError as error:\n"
        "        print(name, error)"
    )
    assert done.returncode == 0, done.stderr
    refused = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert set(refused) == NEEDS_TRANSFORMERS
    assert all("torchrl-trl-bridge[trl]" in error for error in refused.values())


def test_without_datasets_the_error_names_the_extra() -> None:
    done = fresh(
        "import sys, torch\n"
        "sys.modules['datasets'] = None\n"
        "from torchrl.data import ListStorage, ReplayBuffer\n"
        "from torchrl_trl_bridge import TorchRLBufferDataset\n"
        "TorchRLBufferDataset(ReplayBuffer(storage=ListStorage(1)), 1).as_hf_dataset()"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError")
    assert "torchrl-trl-bridge[trl]" in done.stderr.splitlines()[-1]


def test_public_names() -> None:
    assert dir(torchrl_trl_bridge) == sorted(torchrl_trl_bridge.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        torchrl_trl_bridge.Nothing  # noqa: B018
