"""The demo as a user runs it, with fewer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import ReplayBuffer

from torchrl_trl_bridge import demo
from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("demo") / "out"
    done = subprocess.run(
        [sys.executable, "-m", "torchrl_trl_bridge", "demo", "--steps", "40", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # A row of the matrix is tested by this very run.
        env={**os.environ, "COLUMNS": "100", "PYTHONWARNINGS": "ignore:torchrl-trl-bridge is not tested"},
    )
    return done, out


def test_the_reward_rises(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, out = finished
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["mean_reward_after"] > summary["mean_reward_before"] + 1
    assert summary["lower_case_share_after"] > summary["lower_case_share_before"]
    assert (summary["seed"], summary["steps"], summary["rollouts"]) == (0, 40, 128)
    assert summary["versions"]["trl"]
    assert {crossing["way"]: crossing["rows"] for crossing in summary["crossed"]} == {
        "TorchRL → TRL": 40 * 4,
        "HF → TorchRL": 2 * 128,
        "HF → TRL": 40 * 32,
    }
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_it_trains_a_model_of_the_users_own(tmp_path: Path) -> None:
    tiny_causal_lm(tmp_path / "mine", seed=3)
    out = tmp_path / "out"
    assert demo.run(model=str(tmp_path / "mine"), steps=30, seed=1, out=out) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["model"] == str(tmp_path / "mine")
    assert summary["mean_reward_after"] > summary["mean_reward_before"]


def test_the_output_is_clean(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = finished
    assert "What crossed the bridge" in done.stdout
    assert "Warning" not in done.stderr
    for line in done.stderr.replace("\r", "\n").splitlines():
        assert not line or "%" in line or line.startswith("Loading"), line


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> ReplayBuffer:
    policy = tiny_causal_lm(tmp_path_factory.mktemp("policy"))
    return demo._collect(policy, tiny_tokenizer(), "Collect")


def test_each_rollout_answers_one_question(rollouts: ReplayBuffer) -> None:
    """An environment that goes on with the old conversation would change the task between the two measurements."""
    histories = [rollouts[i]["history", "full"] for i in range(len(rollouts))]
    assert len(histories) == demo.ROLLOUTS
    assert all(list(history.role) == ["user", "assistant"] for history in histories)
    assert {history.content[0] for history in histories} == set(demo.QUESTIONS)


def test_a_reward_that_does_not_rise_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary: dict[str, Any] = {"seconds": {"all": 1.0}}
    for when in ("before", "after"):
        summary |= {f"mean_reward_{when}": 0.5, f"lower_case_share_{when}": 0.1, f"example_{when}": "[/b]"}
    monkeypatch.setattr(demo, "_policy", lambda *_: (None, None))
    monkeypatch.setattr(demo, "_job", lambda *_: (summary, [0.5], []))
    assert demo.run(model=None, steps=1, seed=0, out=tmp_path) == 1
    assert "did not rise: 0.500 to 0.500" in capsys.readouterr().err


def test_scores_in_training_equal_scores_of_rollouts(rollouts: ReplayBuffer, tmp_path: Path) -> None:
    """The reward function that TRL calls and the wrapper on TorchRL's own rows see the same tokens."""
    from torchrl_trl_bridge import HFRewardModelWrapper
    from torchrl_trl_bridge.tiny import tiny_reward_model

    scorer = HFRewardModelWrapper(tiny_reward_model(tmp_path), inference_mode=True)
    rows = rollouts[:8]
    prompts = [[{"role": "user", "content": rollouts[i]["query"]}] for i in range(8)]
    answers = [rollouts[i]["tokens", "response"].tolist() for i in range(8)]
    reward = demo._reward_function(scorer, tiny_tokenizer(), demo.Crossing("", "", ""))
    completions = [[{"role": "assistant", "content": rollouts[i]["text", "response"]}] for i in range(8)]
    rewards = reward(prompts=prompts, completions=completions, completion_ids=answers)
    torch.testing.assert_close(torch.tensor(rewards), scorer(rows)["reward"])
