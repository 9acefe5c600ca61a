"""Names and messages that somebody else chose: no terminal, log, summary or page obeys them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
COMMAND = re.compile(r"^\s*::|##\w*\[", re.MULTILINE)

RULES = """
version: 1
extends: [healthcheck:recommended]
external: ["lossy"]
rules:
  mine:
    metric: lossy
    when: {above: 0.5}
    severity: error
    then: [warn, evidence]
    message: "a \\e[31mRED\\a {value} <script>alert(2)</script> ]]> \\n::error::fromrule | ![i](http://evil/y) ##[group]x"
    hint: "h \\e[32m <img src=x onerror=alert(3)> \\\\![j](http://evil/z) \\u202e\\n::warning::fromhint"
"""
SCRIPT = r"""
import torch, healthcheck
torch.manual_seed(0)
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("a\x1b]0;owned\x07<script>alert(1)</script>", torch.nn.Linear(4, 4))
        self.add_module("b\n::error title=pwn::injected\u202e", torch.nn.Linear(4, 4))
        self.add_module("c]]><x>|`![i](http://evil/x)", torch.nn.Linear(4, 1))
    def forward(self, x):
        for part in self._modules.values():
            x = torch.tanh(part(x))
        return x
m = M(); o = torch.optim.SGD(m.parameters(), 1e-2)
for i in range(14):
    x = torch.randn(8, 4); o.zero_grad(); l = m(x).pow(2).mean(); l.backward()
    if i == 12:
        for p in m.parameters():
            p.grad.mul_(float("nan"))
    healthcheck.log(**{"evil\x1b[2J\n::error::x<script>": float(i), "lossy": 1.0})
    o.step()
"""
COMMANDS = (
    ["why"], ["why", "2"], ["why", "mine"], ["runs"], ["metrics", "latest"], ["report"], ["evidence"], ["evidence", "latest", "2"],
    ["plan", "--rules", "hostile.yaml"], ["explain", "mine", "--rules", "hostile.yaml"], ["check", "hostile.yaml"],
    ["check", "hostile.yaml", "--print-config"], ["replay", "latest"], ["top", "--once"],
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.yaml").write_text(RULES)
    (folder / "train.py").write_text(SCRIPT)
    reports = [f"--report={kind}=out.{kind}" for kind in ("json", "junit", "sarif", "html", "github")]
    command = [sys.executable, "-m", "healthcheck", "run", "--rules", "hostile.yaml", *reports, "train.py"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(root), "PATH": ""}, capture_output=True, timeout=120
    )
    return folder, subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_the_console_of_a_run_shows_escapes(recorded: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = recorded
    assert done.returncode == 1
    assert "mine  step 1" in done.stderr
    assert not RAW.search(done.stderr)
    ours = [line for line in done.stderr.splitlines() if COMMAND.search(line)]
    assert all(
        re.match(r"::(error|warning|notice) (file=[^:]*,line=\d+,)?title=healthcheck [\w-]+::", line) for line in ours
    )
    assert ours, "annotations of the run itself are still commands"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_passes_on_what_a_record_or_a_file_holds(
    words: list[str],
    recorded: tuple[Path, subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from healthcheck.cli import main

    monkeypatch.chdir(recorded[0])
    monkeypatch.delenv("HEALTHCHECK_RUNS", raising=False)
    main(words)
    out, err = capfd.readouterr()
    assert out
    assert not RAW.search(out + err)
    assert not COMMAND.search(out + err)


def test_a_job_summary_fetches_nothing_and_holds_no_markup(
    recorded: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    text = (recorded[0] / "out.github").read_text()
    assert "RED" in text
    assert not RAW.search(text)
    assert "<" not in text
    # A link or image begins with a bracket behind an even number of backslashes.
    assert not re.search(r"(?<!\\)(?:\\\\)*\[", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows} == {6}


def test_the_page_holds_no_script_but_its_own_and_no_image(
    recorded: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    tags: set[str] = set()

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            assert not any(name.startswith("on") or name == "src" for name, _ in attrs)

    text = (recorded[0] / "out.html").read_text()
    Tags().feed(text)
    assert "h1" in tags
    assert not tags & {"img", "iframe", "x"}
    # Its own script is named by its digest, and no other may run.
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "sha256-" in policy[1]
    assert "unsafe" not in policy[1].partition("script-src")[2].partition(";")[0]
    assert not RAW.search(text)


def test_junit_is_xml_without_control_characters_and_json_keeps_every_character(
    recorded: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    text = (recorded[0] / "out.junit").read_text()
    assert ET.fromstring(text).tag == "testsuites"
    assert not RAW.search(text)
    alerts = json.loads((recorded[0] / "out.json").read_text())["alerts"]
    [mine] = [alert for alert in alerts if alert["rule"] == "mine"]
    assert mine["message"].startswith("a \x1b[31mRED\x07 ")
    json.loads((recorded[0] / "out.sarif").read_text())
