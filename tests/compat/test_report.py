from __future__ import annotations

import json

import pytest

from torchrl_trl_bridge import __version__
from torchrl_trl_bridge.compat import report, versions
from torchrl_trl_bridge.compat.report import FEATURES, SCHEMA


def test_the_report_is_plain_data_in_the_stated_form() -> None:
    found = report()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"schema", "bridge", "tested_set", "versions", "features"}
    assert (found["schema"], found["bridge"]) == (SCHEMA, __version__)
    assert {row["name"]: row["version"] for row in found["versions"]} == versions()
    assert all(set(row) == {"name", "version", "status", "newest_tested"} for row in found["versions"])
    assert [feature["name"] for feature in found["features"]] == list(FEATURES)
    assert all(set(feature) == {"name", "live", "why"} for feature in found["features"])
    assert all(type(feature["live"]) is bool and feature["why"] for feature in found["features"])


@pytest.mark.parametrize(
    ("error", "why"),
    [(ModuleNotFoundError("no", name="ray"), "ray is not installed"), (OSError("libcuda\nmore"), "OSError: libcuda")],
)
def test_a_library_that_fails_to_load_is_a_finding(error: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> tuple[bool, str]:
        raise error

    monkeypatch.setitem(FEATURES, "Ray", ask)
    features = {feature["name"]: feature for feature in report()["features"]}
    assert features["Ray"] == {"name": "Ray", "live": False, "why": why}
    assert len(features) == len(FEATURES)
