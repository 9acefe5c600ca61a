"""Commands that read run no code of the folder; what runs code anyway loads configured plugins, whichever file has the rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from healthcheck.cli import main

EVIL = "import pathlib; pathlib.Path(__file__).with_name('EXECUTED').touch()\n"
PLUGIN = """
import healthcheck
@healthcheck.hookimpl
def healthcheck_register_probes(register):
    class Probe:
        name = "{name}.probe"
        listens_to = (healthcheck.EventKind.STEP_END,)
        provides = (healthcheck.Metric("{name}.thing", help="one"),)
        def sample(self, event, demand):
            yield healthcheck.Sample("{name}.thing", event.step, 1.0)
    register(Probe())
"""
TRAIN = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
"""
RULES = "version: 1\nrules:\n  theirs: {metric: acme.thing, when: {above: 5}}\n"
RULE_TEST = """
healthcheck_tests: 1
rules: [{rules}]
tests:
  - name: fires
    series: {{acme.thing: "1 x3, 9"}}
    expect: [{{rule: theirs, fires: 4}}]
  - name: silent
    series: {{acme.thing: "1 x3"}}
    expect: none
"""
READING = (
    "check", "check rules.yaml", "schema", "explain loss-divergence", "plan", "metrics", "metrics latest", "why", "report", "runs", "evidence",
    "replay log.csv", "replay latest", "plugins", "doctor", "top --once", "plugins -v", "unknown-command",
)  # fmt: skip


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HEALTHCHECK_DISABLE_PLUGINS", raising=False)
    folder = here.parent
    (folder / "log.csv").write_text("step,loss\n1,1.0\n2,0.9\n3,0.8\n")
    (folder / "train.py").write_text(TRAIN)
    return folder


def recorded(folder: Path, *more: str) -> dict[str, object]:
    """The report of a run in that folder, in a process of its own."""
    command = [sys.executable, "-m", "healthcheck", "run", *more, "--report=json=out.json", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120)
    assert (folder / "out.json").exists(), done.stderr.decode()
    return dict(json.loads((folder / "out.json").read_text()))


def test_no_command_that_reads_runs_what_the_folder_configures(folder: Path) -> None:
    recorded(folder)
    (folder / "rules.yaml").write_text("version: 1\nextends: [healthcheck:recommended]\n")
    (folder / "evil.py").write_text(EVIL)
    (folder / "pyproject.toml").write_text('[tool.healthcheck]\nplugins = ["evil.py", "evil"]\n')
    for words in READING:
        main(words.split())
        assert not (folder / "EXECUTED").exists(), words


def test_completion_runs_nothing_of_the_folder(folder: Path) -> None:
    pytest.importorskip("argcomplete")
    (folder / "evil.py").write_text(EVIL)
    (folder / "pyproject.toml").write_text('[tool.healthcheck]\nplugins = ["evil.py"]\n')
    line = "healthcheck explain loss-"
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": "words",
    }
    environment = {**os.environ, **asked, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-m", "healthcheck"], cwd=folder, env=environment, timeout=60)
    assert "loss-divergence" in (folder / "words").read_text()
    assert not (folder / "EXECUTED").exists()


def test_python_m_healthcheck_imports_nothing_from_the_folder(folder: Path) -> None:
    """A folder can hold files with the names of what we import."""
    for name in (
        "yaml",
        "jsonschema",
        "pluggy",
        "rich",
        "argparse",
        "json",
        "torch",
        "numpy",
        "argcomplete",
        "difflib",
        "sitecustomize",
    ):
        (folder / f"{name}.py").write_text(EVIL)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "healthcheck", "replay", "log.csv"],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode in (0, 5), done.stderr
    assert not (folder / "EXECUTED").exists()


@pytest.mark.parametrize("where", ["pyproject.toml", "healthcheck.yaml", "command line"])
def test_run_loads_configured_plugins_whichever_file_has_the_rules(folder: Path, where: str) -> None:
    (folder / "acme.py").write_text(PLUGIN.format(name="acme"))
    table = '[tool.healthcheck]\nplugins = ["acme.py"]\n'
    name = {"healthcheck.yaml": "healthcheck.yaml"}.get(where, "mine.yaml")
    (folder / name).write_text(RULES)
    (folder / "pyproject.toml").write_text(table + ('rules = ["mine.yaml"]\n' if where == "pyproject.toml" else ""))
    report = recorded(folder, *(["--rules=mine.yaml"] if where == "command line" else []))
    assert report["rules"]["theirs"]["verdict"] == "ok"  # type: ignore[index]


def test_rule_tests_load_configured_plugins(folder: Path) -> None:
    (folder / "acme.py").write_text(PLUGIN.format(name="acme"))
    (folder / "pyproject.toml").write_text('[tool.healthcheck]\nplugins = ["acme.py"]\n')
    (folder / "mine.yaml").write_text(RULES)
    (folder / "mine.hctest.yaml").write_text(RULE_TEST.format(rules="mine.yaml"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "healthcheck", "test"], cwd=folder, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stdout.decode()


def test_check_says_what_it_could_not_check(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "acme.py").write_text(PLUGIN.format(name="acme"))
    (folder / "rules.yaml").write_text(RULES + "  typo: {metric: los, when: {above: 5}}\n")
    assert main(["check", "rules.yaml"]) == 4
    assert 'error[unknown-metric]: no probe provides "acme.thing"' in capsys.readouterr().out

    (folder / "pyproject.toml").write_text('[tool.healthcheck]\nplugins = ["acme.py"]\n')
    assert main(["check", "rules.yaml"]) == 4
    out = capsys.readouterr().out
    assert 'warning[not-checked]: not checked: no probe provides "acme.thing"' in out
    assert "it loads with -p acme.py" in out
    assert "1 error, 1 warning" in out, "a clear typo is a mistake all the same"

    (folder / "rules.yaml").write_text(RULES)
    assert main(["check", "rules.yaml"]) == 0
    assert main(["check", "--strict", "rules.yaml"]) == 4
    assert main(["check", "--strict", "-p", "acme.py", "rules.yaml"]) == 0
    capsys.readouterr()
    assert main(["plan", "--rules", "rules.yaml"]) == 4
    assert "-p acme.py" in capsys.readouterr().err

    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", "acme")
    assert main(["check", "rules.yaml"]) == 4
    assert "error[unknown-metric]" in capsys.readouterr().out
    assert main(["check", "-p", "acme.py", "rules.yaml"]) == 0, "-p always counts"


def test_switching_plugins_off_holds_for_configured_ones_and_not_for_named_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from healthcheck.assembly import running_host

    for name in ("acme", "other"):
        (folder / f"{name}.py").write_text(PLUGIN.format(name=name))
    (folder / "pyproject.toml").write_text('[tool.healthcheck]\nplugins = ["acme.py", "other.py"]\n')

    def loaded(*given: str) -> list[str]:
        return [info.name for info in running_host(given).infos if info.source.endswith(".py")]

    assert loaded() == ["acme", "other"]
    assert loaded("acme.py") == ["other", "acme"], "named twice, loaded once"
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", "acme")
    assert loaded() == ["other"]
    assert loaded("acme.py") == ["other", "acme"]
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", "all")
    assert loaded() == []
    assert loaded("acme.py") == ["acme"]
