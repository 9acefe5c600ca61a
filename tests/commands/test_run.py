"""``healthcheck run``: what people type, and the right line when it is not quite right."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HEALTHY = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(12):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
print("arguments", sys.argv[1:])
"""

SICK = HEALTHY.replace("torch.ones(4, 2)", "(torch.ones(4, 2) * (float('nan') if i == 4 else 1))")

RULES = """
version: 1
rules:
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, then: [stop]}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "healthy.py").write_text(HEALTHY)
    (tmp_path / "sick.py").write_text(SICK)
    (tmp_path / "team.yaml").write_text(RULES)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("run", "nothing to run"),
        ("run nosuch.py", "there is no script nosuch.py"),
        ("run helthy.py", 'did you mean "healthy.py"?'),
        ("run -m nosuchmodule.train", "there is no module nosuchmodule"),
        ("run team.yaml healthy.py", "healthcheck run --rules team.yaml healthy.py"),
        ("run --max-steps many healthy.py", "--max-steps takes a number of steps"),
        ("run --max-time soon healthy.py", "--max-time takes a time such as 90s"),
        ("run --report json healthy.py", "--report json=healthcheck.json"),
        ("run --dry-run healthy.py", "did you mean --observe"),
        ("run --obsrve healthy.py", 'did you mean "--observe"?'),
        ("healthy.py --lr 1", "did you mean: healthcheck run healthy.py --lr 1"),
        ("-m pkg.train", "did you mean: healthcheck run -m pkg.train"),
        ("team.yaml", "did you mean: healthcheck check team.yaml"),
        ("check healthy.py", "did you mean: healthcheck run healthy.py"),
        ("rum healthy.py", 'did you mean "run"?'),
        ("torchrun healthy.py", "did you mean: healthcheck run torchrun healthy.py"),
    ],
)
def test_a_wrong_guess_gets_the_right_line(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, answer: str
) -> None:
    """Exit 4, one line, nothing was run."""
    from healthcheck.cli import main

    monkeypatch.chdir(work)
    assert main(line.split()) == 4

    out, err = capsys.readouterr()
    assert answer in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert not (work / "healthcheck-runs").exists()


def test_the_overview_names_every_command_by_purpose_in_15_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from healthcheck.cli import main
    from healthcheck.cli.usage import TABLE

    assert main([]) == 0

    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 15
    assert [name for name in ("Watch", "Understand", "Tune", "Write rules", "Extend") if name not in out] == []
    words = out.replace(",", " ").split()
    assert [entry.name for entry in TABLE if entry.name not in words] == []


def test_every_command_of_the_table_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """And its module has what the table relies on."""
    import importlib

    from healthcheck.cli import main
    from healthcheck.cli.usage import GROUPS, TABLE

    for entry in TABLE:
        module = importlib.import_module(f"healthcheck.cli.{entry.name}")
        assert (module.NAME, entry.group in GROUPS) == (entry.name, True)
        with pytest.raises(SystemExit) as caught:
            main([entry.name, "--help"])
        assert caught.value.code == 0
        assert f"healthcheck {entry.name}" in capsys.readouterr().out


def test_a_command_of_a_plugin_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from healthcheck import assembly
    from healthcheck import cli as commands
    from healthcheck.extend.host import PluginHost

    given: list[list[str]] = []
    host = PluginHost()
    host.registry.adder("commands", "acme")("page", "call somebody", lambda argv: given.append(argv) or 7)
    monkeypatch.setattr(assembly, "plugin_host", lambda *a, **k: host)

    assert commands.main(["page", "--now"]) == 7
    assert given == [["--now"]]


@pytest.mark.slow
def test_everything_after_the_script_belongs_to_the_script(healthcheck_warm: Callable, work: Path) -> None:
    """No `--` is needed, and one that is there is the script's."""
    result = healthcheck_warm("run", "-q", "healthy.py", "--rules", "x", "-v", "--", "--max-steps", "3", cwd=work)

    assert result.stdout == "arguments ['--rules', 'x', '-v', '--', '--max-steps', '3']\n"
    assert result.returncode == 0


@pytest.mark.slow
def test_a_sick_run_is_stopped_with_1_and_reported(healthcheck_warm: Callable, work: Path) -> None:
    result = healthcheck_warm("run", "--rules", "team.yaml", "--report", "json=hc.json", "sick.py", cwd=work)

    assert result.returncode == 1
    assert result.stdout == ""
    assert "ERROR loss-not-finite  step 5" in result.stderr
    assert "STOPPED at step 5 by loss-not-finite" in result.stderr
    assert json.loads((work / "hc.json").read_text())["stop"]["step"] == 5


@pytest.mark.slow
def test_observe_lets_it_run_and_exits_like_the_script(healthcheck_warm: Callable, work: Path) -> None:
    result = healthcheck_warm("run", "--rules", "team.yaml", "--observe", "sick.py", cwd=work)
    strict = healthcheck_warm("run", "--rules", "team.yaml", "--observe", "--fail-on", "error", "sick.py", cwd=work)

    assert result.returncode == 0
    assert "arguments []" in result.stdout
    assert "would" in result.stderr
    assert strict.returncode == 1


@pytest.mark.slow
def test_max_steps_and_max_time_end_a_healthy_run_with_0(healthcheck_warm: Callable, work: Path) -> None:
    steps = healthcheck_warm("run", "--max-steps", 5, "--report", "json=a.json", "healthy.py", cwd=work)
    time = healthcheck_warm("run", "--max-time", "0.001s", "--report", "json=b.json", "healthy.py", cwd=work)

    assert (steps.returncode, steps.stdout) == (0, "")
    assert json.loads((work / "a.json").read_text())["steps"] == 5
    assert "stopped as asked after 5 steps" in steps.stderr
    assert time.returncode == 0
    assert json.loads((work / "b.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_the_off_switch_makes_it_plain_python(healthcheck_command: Callable, work: Path) -> None:
    result = healthcheck_command("run", "--rules", "team.yaml", "sick.py", "a", cwd=work, env={"HEALTHCHECK": "off"})

    assert (result.returncode, result.stdout, result.stderr) == (0, "arguments ['a']\n", "")
    assert not (work / "runs").exists()


def test_a_script_without_torch_ends_with_5_and_the_reason(healthcheck_command: Callable, work: Path) -> None:
    (work / "plain.py").write_text("print('no training here')")

    result = healthcheck_command("run", "plain.py", cwd=work)

    assert (result.returncode, result.stdout) == (5, "no training here\n")
    assert "never imported torch" in result.stderr


def test_bad_rules_are_found_before_the_script_runs(healthcheck_here: Callable, work: Path) -> None:
    (work / "bad.yaml").write_text("version: 1\nrules:\n  a: {metric: los, when: {abov: 1}}\n")

    result = healthcheck_here("run", "--rules", "bad.yaml", "healthy.py", cwd=work)

    assert (result.returncode, result.stdout) == (4, "")
    assert "bad.yaml:3:" in result.stderr


@pytest.mark.slow
def test_a_module_of_the_scripts_that_has_our_name_is_pointed_out(healthcheck_command: Callable, work: Path) -> None:
    (work / "healthcheck.py").write_text("raise SystemExit('the wrong module')")
    (work / "plain.py").write_text("import healthcheck; print(healthcheck.__version__)")

    result = healthcheck_command("run", "plain.py", cwd=work)

    assert "healthcheck.py has our name" in result.stderr
    assert "the wrong module" not in result.stderr


@pytest.mark.slow
def test_a_plugin_that_fails_never_ends_the_run(healthcheck_warm: Callable, work: Path) -> None:
    (work / "broken.py").write_text("raise RuntimeError('not today')")
    (work / "exits.py").write_text(
        "import sys, healthcheck\n@healthcheck.hookimpl\ndef healthcheck_step_end(event):\n    sys.exit(9)\n"
    )

    result = healthcheck_warm("run", "-p", "broken.py", "-p", "exits.py", "healthy.py", cwd=work)
    strict = healthcheck_warm("run", "--strict-plugins", "-p", "broken.py", "healthy.py", cwd=work)

    assert result.returncode == 0
    assert result.stdout == "arguments []\n"
    assert result.stderr.count("not today") == 1
    assert "exits" in result.stderr
    assert (strict.returncode, strict.stdout) == (3, "")


def test_a_plugin_file_that_is_not_there_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip of the pen on the command line; a file that is there and broken costs a line only."""
    from healthcheck.cli import main

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('ran')\n")
    Path("health_plugin.py").write_text("")
    assert main(["run", "-p", "helth_plugin.py", "train.py"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert 'no such file (did you mean "health_plugin.py"?)' in err
    assert not Path("healthcheck-runs").exists()


@pytest.mark.slow
def test_an_option_of_ours_behind_the_script_is_pointed_out_when_the_script_refuses_it(
    tmp_path: Path, healthcheck_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    result = healthcheck_command("run", "train.py", "--observe", cwd=tmp_path)
    assert result.returncode == 2
    assert "--observe came after the script, so the script received it" in result.stderr


def test_the_collector_works_in_the_script_and_leaves_alone_what_was_there_before_it(
    tmp_path: Path, healthcheck_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "train.py").write_text(
        "import gc\nprint(gc.isenabled(), gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 5_000)\n"
    )
    assert healthcheck_command("run", "train.py").stdout == "True True True\n"
