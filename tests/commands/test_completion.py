"""Shell completion: one answer of ours for all shells, and a real bash that asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from healthcheck.commands import TABLE, main
from healthcheck.commands.completing import candidates


def of(*words: str) -> list[str]:
    return candidates(words, TABLE)


def test_commands_options_and_choices_are_offered() -> None:
    assert of("w") == ["why"]
    assert of("help", "pr") == ["prune"]
    assert of("run", "--ob") == ["--observe"]
    assert of("run", "--fail-on", "") == ["error", "info", "never", "warning"]
    assert "junit=" in of("run", "--report", "")
    assert "--dry-run" not in of("run", "--")


def test_rules_are_those_in_force_here_and_runs_those_recorded_here(here: Path) -> None:
    Path("healthcheck.yaml").write_text("version: 1\nrules: {my-own: {metric: loss, when: {above: 3}}}\n")
    assert of("run", "--off", "") == ["my-own"]
    assert of("explain", "m") == ["my-own"]
    assert of("report", "") == []
    (here / "1127-0900-train").mkdir(parents=True)
    (here / "1127-0900-train" / "run.json").write_text("{}")
    assert of("report", "") == ["1127-0900-train", "latest"]
    assert of("why", "lat") == ["latest"]


def test_what_belongs_to_the_script_is_left_to_the_shell() -> None:
    assert of("run", "train.py", "--") == []
    assert of("run", "--off", "loss-spike", "train.py", "-") == []
    assert of("run", "tr") == []
    assert of("no-such-command", "") == []


def test_it_never_fails_or_complains_while_somebody_types(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("healthcheck.yaml").write_text("version: 1\nrules: {my-own: {metric: lss, when: {\n")
    for words in (["run", "--off", ""], ["plan", "--rules"], [""], []):
        assert main(["completion", "--words", *words]) == 0
    assert capsys.readouterr().err == ""


def test_an_unknown_shell_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fsh"]) == 4
    assert 'did you mean "fish"?' in capsys.readouterr().err
    assert main(["completion"]) == 4


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_with_it(tmp_path: Path) -> None:
    (tmp_path / "healthcheck").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m healthcheck "$@"\n')
    (tmp_path / "healthcheck").chmod(0o755)
    script = (
        'eval "$(healthcheck completion bash)"\n'
        "COMP_WORDS=(healthcheck run --ob); COMP_CWORD=2; _healthcheck; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
        "COMP_WORDS=(healthcheck run ''); COMP_CWORD=2; _healthcheck; echo ${#COMPREPLY[@]}\n"
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert result.stdout == "--observe\n0\n", result.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / shell
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=120)
