from __future__ import annotations

import subprocess
import sys

import pytest

from torchrl_trl_bridge import __version__
from torchrl_trl_bridge.cli import main


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"torchrl-trl-bridge {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["demo", "--steps", "0"], ["demo", "--steps", "many"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["rich", "matplotlib", "trl"])
def test_a_missing_library_is_one_line_that_names_the_extra(library: str) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from torchrl_trl_bridge.cli import main\n"
        "sys.exit(main(['demo', '--steps', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert 'pip install "torchrl-trl-bridge[demo]"' in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("reason", ["no such folder", "no chat template"])
def test_a_model_that_cannot_be_used_is_one_line(
    reason: str, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchrl_trl_bridge.tiny import tiny_causal_lm, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    if reason == "no chat template":
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        tiny_causal_lm(folder, tokenizer)
    else:
        folder /= "missing"
    assert main(["demo", "--model", str(folder), "--out", str(tmp_path_factory.mktemp("out"))]) == 2
    error = capfd.readouterr().err
    assert f"--model {folder}" in error.splitlines()[-1]
    assert "Traceback" not in error
