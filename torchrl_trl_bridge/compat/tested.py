"""The sets of versions that the test suite passed with, by name. Written by ``make matrix``: not by hand."""

TESTED: dict[str, dict[str, str]] = {
    "torchrl0.14.1-trl1.16.0": {
        "python": "3.11",
        "torch": "2.13.0",
        "torchrl": "0.14.1",
        "tensordict": "0.14.3",
        "trl": "1.16.0",
        "transformers": "5.24.0",
        "datasets": "5.2.0",
        "accelerate": "1.15.0",
    },
}
