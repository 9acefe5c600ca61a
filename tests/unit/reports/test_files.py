"""``--report KIND=PATH``: what may be asked for, and where it goes."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.core.errors import UsageError
from healthcheck.reports.files import kinds_of, parse_reports, write_reports


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["json=hc.json", "junit=out/hc.xml"], {"json": "hc.json", "junit": "out/hc.xml"}),
        ({"json": "hc.json"}, {"json": "hc.json"}),
        ("junit=hc.xml", {"junit": "hc.xml"}),
        (["github"], {"github": ""}),
        (["github=summary.md"], {"github": "summary.md"}),
        (None, {}),
        (["json=a=b.json"], {"json": "a=b.json"}),
    ],
)
def test_reports_are_written_as_kind_and_path(given: Any, found: dict[str, str]) -> None:
    assert parse_reports(given) == found


def test_all_mistakes_are_told_at_once_with_suggestions() -> None:
    with pytest.raises(UsageError) as error:
        parse_reports(["junt=a.xml", "json", "github", "github=b"])
    lines = str(error.value).splitlines()
    assert (
        lines[0]
        == '--report: there is no report "junt"; did you mean "junit"? there are: json, junit, sarif, html, github'
    )
    assert lines[1] == "--report: json needs a path, for instance --report json=healthcheck.json"
    assert lines[2].startswith("--report: github is given twice")


def test_an_unknown_kind_is_refused_before_anything_runs(runs: Path, sessions: ModuleType) -> None:
    with pytest.raises(UsageError, match="there is no report"):
        sessions.run(series={"loss": [1.0]}, reports={"excel": "x"})
    assert not runs.exists()


def test_a_rule_file_can_name_reports(watched: Callable[..., Any], sessions: ModuleType, tmp_path: Path) -> None:
    rules = {**sessions.RULES, "settings": {"report": ["json=out/hc.json", "junit=hc.xml"]}}
    watched(series={"loss": [1.0]}, rules=rules)
    assert json.loads((tmp_path / "out" / "hc.json").read_text())["target"] == "train.py"
    assert (tmp_path / "hc.xml").read_text().startswith("<?xml")


def test_paths_start_where_the_run_began_although_the_script_moved(
    watched: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: ModuleType
) -> None:
    (tmp_path / "elsewhere").mkdir()
    playing = sessions.play

    def play_elsewhere(*args: Any, **kwargs: Any) -> None:
        monkeypatch.chdir(tmp_path / "elsewhere")
        playing(*args, **kwargs)

    monkeypatch.setattr(sessions, "play", play_elsewhere)
    watched(series={"loss": [1.0]}, reports={"junit": "hc.xml"})
    assert (tmp_path / "hc.xml").is_file()


def test_a_place_that_cannot_be_written_costs_a_line_and_not_the_run(
    watched: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ended = watched(series={"loss": [1.0]}, reports={"junit": "file/hc.xml"})
    assert ended.returncode == 0
    assert "report junit=file/hc.xml could not be written" in ended.stderr


def test_one_report_is_an_object_and_several_are_a_list(sessions: ModuleType, runs: Path, tmp_path: Path) -> None:
    report = sessions.run(series={"loss": [1.0]}, console=False)
    assert write_reports({"json": "one.json"}, report, folder=tmp_path) == []
    assert write_reports({"json": "many.json"}, [report, report], folder=tmp_path) == []
    assert json.loads((tmp_path / "one.json").read_text())["steps"] == 1
    assert len(json.loads((tmp_path / "many.json").read_text())) == 2


def test_a_plugin_report_that_renders_is_a_kind(watched: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import healthcheck\n"
        "class Lines:\n"
        '    name = "mine.lines"\n'
        "    def render(self, reports):\n"
        '        return "".join(r["target"] + "\\n" for r in reports)\n'
        "@healthcheck.hookimpl\n"
        "def healthcheck_register_reports(register):\n"
        "    register(Lines())\n"
    )
    watched(series={"loss": [1.0]}, plugins=["mine.py"], reports={"mine.lines": "lines.txt"})
    assert (tmp_path / "lines.txt").read_text() == "train.py\n"


def test_a_plugin_cannot_take_the_place_of_a_built_in_kind() -> None:
    class Json:
        def render(self, reports: Any) -> str:
            return "mine"

    assert kinds_of({"json": Json()})["json"].render([]) != "mine"


REPORT: dict[str, Any] = {"verdict": "ok"}


def test_a_link_is_written_through_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to("target")
    assert write_reports({"json": "link"}, REPORT, folder=tmp_path) == []
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "target").read_text()) == REPORT


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    node = tmp_path / "null"
    try:
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes device nodes")
    assert write_reports({"json": str(node)}, REPORT, folder=tmp_path) == []
    assert stat.S_ISCHR(node.lstat().st_mode)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_that_nobody_reads_holds_up_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (problem,) = write_reports({"json": "pipe"}, REPORT, folder=tmp_path)
    assert problem.startswith("report json=pipe could not be written: ")


def test_folders_are_made_inside_the_working_directory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert write_reports({"json": "out/a/hc.json"}, REPORT) == []
    (problem,) = write_reports({"json": "../elsewhere/hc.json"}, REPORT)
    assert "there is no folder" in problem
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    (tmp_path / "full").symlink_to("/dev/full")
    (problem,) = write_reports({"json": "full"}, REPORT, folder=tmp_path)
    assert problem == "report json=full could not be written: No space left on device"
