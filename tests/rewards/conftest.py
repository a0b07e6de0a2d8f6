"""Set-up for the tests of reward models."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# `reward_models` becomes importable for the tests beside it, under any import mode of pytest.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are so small that handing their work out to threads takes ten times as long as doing it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
