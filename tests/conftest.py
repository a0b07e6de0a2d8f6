"""Set-up for all tests: no downloads, nothing left to chance, and a warning from this package is an error."""

import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before anything else

import hypothesis
import numpy
import pytest
import torch

pytest_plugins = ["tests.collecting"]

# The same examples in every run; no deadline, since the first example of a test may import a library.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
