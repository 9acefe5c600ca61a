"""Shell completion: a real bash asks, argcomplete and our own words answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from healthcheck.cli import main

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")

ASK = """
eval "$(healthcheck completion bash)"
while IFS= read -r line; do
    COMP_LINE=$line; COMP_POINT=${#line}; COMP_WORDS=($line); COMPREPLY=()
    _python_argcomplete healthcheck
    for word in "${COMPREPLY[@]}"; do printf '%s\\t' "${word% }"; done
    echo
done
"""


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A folder that holds nothing but the command ``healthcheck``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "healthcheck").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m healthcheck "$@"\n')
    (folder / "healthcheck").chmod(0o755)
    return folder


def ask(command: Path, *lines: str) -> list[list[str]]:
    """What is offered at the end of each line. Nothing may be printed: somebody is in the middle of typing."""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PATH": f"{command}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    result = subprocess.run(
        ["bash", "-c", ASK],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )
    assert result.stderr == ""
    return [[word for word in line.split("\t") if word] for line in result.stdout.splitlines()]


@needs_bash
def test_commands_options_and_choices_are_offered(command: Path, here: Path) -> None:
    assert ask(
        command,
        "healthcheck w",
        "healthcheck help pr",
        "healthcheck run --ob",
        "healthcheck run --fail-on ",
        "healthcheck run --fail-on=ne",
        "healthcheck run --report ju",
        "healthcheck run --dry",
        "healthcheck no-such-command --",
    ) == [
        ["why"],
        ["prune"],
        ["--observe"],
        ["info", "warning", "error", "never"],
        ["never"],
        ["junit="],
        [],
        ["--help"],
    ]


@needs_bash
def test_rules_are_those_in_force_here_and_runs_those_recorded_here(command: Path, here: Path) -> None:
    Path("healthcheck.yaml").write_text("version: 1\nrules: {my-own: {metric: loss, when: {above: 3}}}\n")
    (here / "1127-0900-train").mkdir(parents=True)
    (here / "1127-0900-train" / "run.json").write_text("{}")
    rules, explained, runs, latest = ask(
        command, "healthcheck run --off ", "healthcheck explain m", "healthcheck report ", "healthcheck why lat"
    )
    assert (rules, explained, latest) == (["my-own"], ["my-own"], ["latest"])
    assert sorted(runs) == ["1127-0900-train", "latest"]


@needs_bash
def test_files_are_offered_for_a_script_and_nothing_of_ours_behind_it(command: Path, here: Path) -> None:
    Path("train.py").write_text("")
    assert ask(
        command,
        "healthcheck run tr",
        "healthcheck run train.py --",
        "healthcheck run --off loss-spike train.py -",
        "healthcheck run -m train --",
        "healthcheck run -m --ob",
    ) == [["train.py"], [], [], [], ["--observe"]]


@needs_bash
def test_mistakes_in_the_rules_are_no_business_of_somebody_who_types(command: Path, here: Path) -> None:
    Path("healthcheck.yaml").write_text("version: 1\nrules: {my-own: {metric: lss, when: {\n")
    (offered,) = ask(command, "healthcheck run --off my")
    assert offered == []


def test_an_unknown_shell_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fsh"]) == 4
    assert 'did you mean "fish"?' in capsys.readouterr().err
    assert main(["completion"]) == 4


def test_without_argcomplete_the_answer_is_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an extra: nobody who does not complete needs it."""
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    assert main(["completion", "bash"]) == 4
    assert "pip install 'torch-healthcheck[completion]'" in capsys.readouterr().err


def test_without_argcomplete_a_shell_that_asks_gets_no_answer_and_no_traceback() -> None:
    """The shell then falls back to file names."""
    code = (
        "import sys; sys.modules['argcomplete'] = None; from healthcheck.cli import main; "
        "sys.exit(main(['run', 'train.py']))"
    )
    env = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": "healthcheck ru", "COMP_POINT": "14"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / shell
    script.write_text(capsys.readouterr().out)
    assert "torch-healthcheck" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=120)
