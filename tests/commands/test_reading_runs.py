"""why, metrics, runs and report on records that real sessions wrote. No torch, no GPU, no script at hand."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.cli import main

HEALTHY = [2 + 0.01 * math.sin(i) for i in range(60)]
NORM = [9.0 if i in (39, 40) else 1 + 0.01 * math.sin(i) for i in range(60)]
SPIKES = [20.0 if i in (40, 41) else v for i, v in enumerate(HEALTHY)]
NO_SERIES = {"off", "mute", "only", "set"}
"""Options of a session that are lists; other lists are series."""
DIES = [*SPIKES[:50], math.nan]


@pytest.fixture(scope="session")
def sessions(helper: Callable[[str], ModuleType]) -> ModuleType:
    return helper("tests/unit/reports/sessions.py")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: ModuleType) -> Callable[..., dict[str, Any]]:
    """``record(loss=[...], target=...)`` writes one run below ``runs/``; returns its report."""
    for name in [n for n in os.environ if n.startswith("HEALTHCHECK")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def write(loss: list[float] = SPIKES, norm: list[float] = NORM, **options: Any) -> dict[str, Any]:
        more = {
            name: options.pop(name)
            for name in [n for n in options if isinstance(options[n], list)]
            if name not in NO_SERIES
        }
        report: dict[str, Any] = sessions.run({"loss": loss, "norm": norm, **more}, console=False, **options)
        return report

    return write


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``says("why", "2")``: what the command printed on stdout; it must exit 0."""

    def call(*argv: str) -> str:
        capsys.readouterr()
        code = main(list(argv))
        out, err = capsys.readouterr()
        assert code == 0, err
        return str(out)

    return call


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refuses("why", "nothing")``: what it printed on stderr; it must exit 4."""

    def call(*argv: str) -> str:
        capsys.readouterr()
        assert main(list(argv)) == 4
        return str(capsys.readouterr().err)

    return call


Record = Callable[..., dict[str, Any]]
Says = Callable[..., str]


class TestWhy:
    def test_it_traces_the_steps_around_the_alert(self, record: Record, says: Says) -> None:
        record()
        text = says("why", "loss-spike")
        assert text.startswith("loss-spike fired at step 42, cleared at 44")
        assert "asks    robust_z(loss, window 200) above 8, in 2 samples running, after 10 steps" in text
        rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +(-?[\d.,]+) +(\S.*)$", text, re.MULTILINE)
        states = {int(step): state for step, _, _, _, state in rows}
        assert states == {
            39: "ok",
            40: "ok",
            41: "pending 1 of 2",
            42: "FIRING -> warned",
            43: "firing",
            44: "ok again",
        }
        values = {int(step): (value, float(median)) for step, value, median, _, _ in rows}
        assert values[41][0] == "20"
        assert values[41][1] == pytest.approx(2.0, abs=0.01)

    def test_it_names_what_changed_one_step_earlier(self, record: Record, says: Says) -> None:
        record()
        assert re.search(r"around  norm (1\.00|0\.99\d) -> 9 one step earlier", says("why", "loss-spike"))

    def test_it_says_how_close_the_rule_had_come_before(self, record: Record, says: Says) -> None:
        loss = list(SPIKES)
        loss[30] = 2.05
        record(loss=loss)
        match = re.search(r"closest before: z ([\d.]+) at step 31", says("why", "loss-spike"))
        assert match is not None
        assert 2 < float(match[1]) < 8

    def test_without_words_it_takes_the_most_severe_alert_of_the_latest_run(self, record: Record, says: Says) -> None:
        record()
        record(loss=DIES)
        assert says("why").startswith("loss-not-finite fired at step 51, still firing at the end")
        assert says("why", "1").startswith("loss-spike")

    def test_an_alert_that_was_explained_names_its_cause(self, record: Record, says: Says) -> None:
        record(loss=DIES, norm=[*NORM[:50], math.nan])
        assert "norm-not-finite at 51 (same cause; held back)" in says("why")
        assert "loss-not-finite at 51 (explains this one" in says("why", "norm-not-finite")

    def test_the_trace_is_the_one_of_the_live_run(self, record: Record, says: Says) -> None:
        report = record()
        found = json.loads(says("why", "loss-spike", "--format", "json"))
        fired = next(row for row in found["trace"] if row["fired"])
        alert = report["alerts"][0]
        assert (fired["step"], fired["value"], fired["score"]) == (alert["fired_step"], alert["value"], alert["score"])

    def test_a_rule_that_did_not_fire_says_how_close_it_came(self, record: Record, says: Says) -> None:
        record(loss=HEALTHY)
        text = says("why", "loss-spike")
        assert "did not fire" in text
        assert re.search(r"closest [\d.]+ +above 8 +step \d+", text)

    def test_a_rule_without_data_says_why_it_was_not_judged(self, record: Record, says: Says) -> None:
        record(loss=HEALTHY)
        assert "other-missing was not judged" in says("why", "other-missing")

    def test_a_run_without_alerts_is_no_error(self, record: Record, says: Says) -> None:
        record(loss=HEALTHY)
        assert says("why").startswith("no alert in ")

    def test_a_mistyped_rule_is_suggested(self, record: Record, refuses: Says) -> None:
        record()
        assert 'did you mean "loss-spike"?' in refuses("why", "loss-spik")

    def test_a_number_that_does_not_exist_says_which_do(self, record: Record, refuses: Says) -> None:
        record()
        assert "has no alert 7" in refuses("why", "7")

    def test_a_run_by_name_by_path_and_by_its_beginning(self, record: Record, says: Says, tmp_path: Path) -> None:
        record(target="first.py")
        record(target="second.py", loss=DIES)
        first = next(path for path in (tmp_path / "runs").iterdir() if path.name.endswith("first"))
        for named in (first.name, str(first), str(first / "samples.jsonl"), f"runs/{first.name}"):
            assert says("why", named).startswith("loss-spike"), named
        assert says("why", first.name, "loss-spike").startswith("loss-spike")
        assert says("why", "latest").startswith("loss-not-finite")
        assert says("why", "runs/latest", "2").startswith("loss-not-finite")

    def test_without_any_run_it_says_how_to_get_one(self, record: Record, refuses: Says) -> None:
        assert "healthcheck run train.py" in refuses("why")

    def test_rules_that_cannot_be_read_here_leave_the_alert_and_say_so(
        self, record: Record, says: Says, tmp_path: Path
    ) -> None:
        """A login node may lack the plugin whose condition the rules use."""
        record()
        (tmp_path / "runs" / "latest" / "rules.yaml").write_text(
            "version: 1\nexternal: [loss]\nrules: {loss-spike: {metric: loss, when: {acme.cusum: {above: 1}}}}\n"
        )
        text = says("why", "loss-spike")
        assert "its rules cannot be read here" in text
        assert "-p PLUGIN" in text
        assert re.search(r"^ +42 +20 .*FIRING -> warned$", text, re.MULTILINE)

    def test_a_killed_run_is_explained_from_its_alerts_file(self, record: Record, says: Says, tmp_path: Path) -> None:
        record()
        folder = (tmp_path / "runs" / "latest").resolve()
        (folder / "report.json").unlink()
        with open(folder / "alerts.jsonl", "ab") as file:
            file.write(b'{"rule": "torn')
        assert "FIRING -> warned" in says("why")

    def test_alerts_of_other_ranks_are_named_with_the_command_that_explains_them(
        self, record: Record, says: Says, tmp_path: Path
    ) -> None:
        record()
        spiked = (tmp_path / "runs" / "latest").resolve()
        record(target="other.py", loss=HEALTHY)
        shutil.copytree(spiked, (tmp_path / "runs" / "latest").resolve() / "rank-3")
        text = says("why")
        assert text.startswith("no alert in ")
        match = re.search(r"rank-3: loss-spike +healthcheck why (\S+)", text)
        assert match is not None, text
        assert says("why", match[1]).startswith("loss-spike fired at step 42")

    def test_an_absence_rule_is_explained_from_its_alert(self, record: Record, says: Says) -> None:
        rules = {
            "version": 1,
            "external": ["loss", "norm"],
            "rules": {"gone": {"metric": "norm", "when": {"missing": {"after": 5}}}},
        }
        record(loss=HEALTHY, norm=NORM[:20], rules=rules)
        text = says("why")
        assert text.startswith("gone fired at step 2")
        assert "FIRING" in text


class TestMetrics:
    def test_the_catalogue_names_unit_cost_and_needs_of_every_metric(self, record: Record, says: Says) -> None:
        from healthcheck.assembly import plugin_host

        rows = {line.split()[0] for line in says("metrics", "--all").splitlines()[1:] if line}
        known = plugin_host().registry.metrics.values()
        assert {f"{m.name}[*]" if m.labels else m.name for m in known} <= rows
        entries = {entry["name"]: entry for entry in json.loads(says("metrics", "--format", "json"))}
        assert entries["amp.skipped"]["needs"] == ["amp"]
        assert all(entry["cost"] in ("free", "host", "device", "sync") for entry in entries.values())

    def test_what_was_normal_in_a_run(self, record: Record, says: Says) -> None:
        record(loss=[float(i) for i in range(1, 101)], norm=[1.0, math.nan, 3.0], off=["norm-not-finite"])
        series = {s["series"]: s for s in json.loads(says("metrics", "latest", "--format", "json"))["series"]}
        loss = series["loss"]
        assert (loss["samples"], loss["min"], loss["median"], loss["p99"], loss["max"]) == (100, 1, 50.5, 99, 100)
        assert (loss["mad"], loss["last"], loss["last_step"]) == (25, 100, 100)
        assert (series["norm"]["nonfinite"], series["norm"]["max"]) == (1, 3.0)

    def test_the_closest_approach_of_each_rule(self, record: Record, says: Says) -> None:
        report = record(loss=HEALTHY)
        closest = report["rules"]["loss-spike"]["closest"]
        text = says("metrics", "latest", "--all")
        assert re.search(rf"loss-spike +[\d.]+ +{closest['step']} +ok +above 8", text)
        assert re.search(r"not judged\n +other-missing +\S", text)

    def test_without_all_the_catalogue_fits_a_screen_and_says_how_many_more_there_are(
        self, record: Record, says: Says
    ) -> None:
        text = says("metrics")
        fits_a_screen(text)
        every = len(json.loads(says("metrics", "--format", "json")))
        match = re.search(r"^(\d+) more: healthcheck metrics --all", text, re.MULTILINE)
        assert match is not None
        named = [line for line in text.splitlines() if re.match(r"  [a-z]", line)]
        assert len(named) + int(match[1]) == every

    def test_without_all_a_run_fits_a_screen_with_alerts_and_its_own_metrics_first(
        self, record: Record, says: Says
    ) -> None:
        many = {f"layer.with.a.very.long.name.number.{i}": [float(i), i + 1.0] * 30 for i in range(40)}
        rules = {"version": 1, "external": ["loss", "norm", *many], "rules": {}}
        rules["rules"] = {f"high-{i}": {"metric": name, "when": {"above": i - 5.5}} for i, name in enumerate(many)}
        record(rules=rules, **many)
        text = says("metrics", "latest")
        fits_a_screen(text)
        assert text.index("alerts: ") < text.index("metric ") < text.index("more series and every rule")
        assert len(says("metrics", "latest", "--all").splitlines()) > 80

    def test_a_rule_that_fired_is_not_among_those_that_came_close_without_an_alert(
        self, record: Record, says: Says
    ) -> None:
        rules = {
            "version": 1,
            "external": ["loss"],
            "rules": {
                "fires": {"metric": "loss", "when": {"above": 10}},
                "close": {"metric": "loss", "when": {"above": 25}},
                "far": {"metric": "loss", "when": {"above": 1000}},
            },
        }
        record(rules=rules)
        nearest = says("metrics", "latest").partition("closest to firing")[2]
        assert re.search(r"close +20 +above 25 +41", nearest)
        assert not re.search(r"^ +fires ", nearest, re.MULTILINE)
        assert "far" not in nearest


def fits_a_screen(text: str) -> None:
    """80 columns and 24 lines, two of which are the command and the prompt after it."""
    lines = text.splitlines()
    assert len(lines) <= 22, text
    assert max(map(len, lines)) <= 80, text


class TestRuns:
    def test_one_line_per_run_oldest_first(self, record: Record, says: Says) -> None:
        record(target="a.py", loss=HEALTHY)
        record(target="b.py", loss=DIES)
        lines = says("runs").splitlines()
        assert [line.split()[1] for line in lines[1:]] == ["a.py", "b.py"]
        assert re.search(r"b\.py .* 51 .* stopped +1 +loss-spike, loss-not-finite", lines[2])

    def test_by_rule_counts_runs_and_names_the_noisiest_script(self, record: Record, says: Says) -> None:
        record(target="a.py", settings={"mode": "observe"}, loss=DIES)
        record(target="a.py", settings={"mode": "observe"})
        record(target="b.py", settings={"mode": "observe"}, loss=HEALTHY, norm=HEALTHY)
        made = json.loads(says("runs", "--by", "rule", "--format", "json"))
        assert (made["runs"], made["scripts"]) == (3, 2)
        assert made["rules"]["loss-not-finite"] == {
            "stopped": 0, "would_stop": 1, "fired": 1, "not_judged": 0, "noisiest": ["a.py", 1],
        }  # fmt: skip
        assert made["rules"]["loss-spike"]["fired"] == 2
        assert made["rules"]["other-missing"]["not_judged"] == 3
        assert says("runs", "--by", "rule").startswith("3 runs of 2 scripts, observe mode: nothing was stopped")

    def test_by_script(self, record: Record, says: Says) -> None:
        record(target="a.py", loss=DIES)
        record(target="a.py", loss=HEALTHY)
        (row,) = json.loads(says("runs", "--by", "script", "--format", "json"))
        assert (row["script"], row["runs"], row["status"]) == ("a.py", 2, {"stopped": 1, "ok": 1})

    def test_since_leaves_older_runs_out(self, record: Record, says: Says, tmp_path: Path) -> None:
        record(target="old.py")
        file = tmp_path / "runs" / "latest" / "run.json"
        facts = json.loads(file.read_text())
        file.write_text(json.dumps({**facts, "started": "2020-01-01T00:00:00+00:00"}))
        record(target="new.py")
        assert [row["script"] for row in json.loads(says("runs", "--since", "14d", "--format", "json"))] == ["new.py"]

    def test_a_since_without_unit_says_what_to_write(self, record: Record, refuses: Says) -> None:
        assert "such as 14d" in refuses("runs", "--since", "soon")

    def test_no_runs_is_an_answer(self, record: Record, says: Says) -> None:
        assert says("runs").startswith("no runs in ")

    def test_a_damaged_record_does_not_hide_the_others(self, record: Record, says: Says, tmp_path: Path) -> None:
        record(target="a.py")
        (tmp_path / "runs" / "latest" / "report.json").write_text("{")
        (tmp_path / "runs" / "latest" / "run.json").write_text("")
        record(target="b.py")
        assert "b.py" in says("runs")
        assert "b.py" in says("runs", "--by", "script")


class TestReport:
    def test_it_shows_alerts_verdicts_and_the_closing_line(self, record: Record, says: Says) -> None:
        record(loss=DIES)
        text = says("report", "--all")
        assert re.search(r"2  error  loss-not-finite  step 51, still firing", text)
        assert re.search(r"other-missing +not judged", text)
        assert re.search(r"healthcheck: STOPPED at step 51 by loss-not-finite +exit 1$", text)

    def test_without_all_it_fits_a_screen_worst_alert_first(self, record: Record, says: Says) -> None:
        names = [f"series{i}" for i in range(20)]
        hint = "look at the batch, then at the learning rate, then at what else you changed since the last good run"
        rules: dict[str, Any] = {"version": 1, "external": ["loss", "norm", *names], "rules": {}}
        for i, name in enumerate(names):
            rules["rules"][f"high-{i}"] = {
                "metric": name,
                "when": {"above": 1},
                "severity": "error" if i == 13 else "warning",
                "hint": hint,
            }
        record(rules=rules, **{name: [0.5, 2.0, 0.5] for name in names})
        text = says("report")
        fits_a_screen(text)
        assert text.index("error  high-13") < text.index("warning  high-0")
        match = re.search(r"^  (\d+) more alerts$", text, re.MULTILINE)
        assert match is not None
        assert len(re.findall(r"^ +\d+  (?:error|warning)  ", text, re.MULTILINE)) + int(match[1]) == 20
        assert "--all" in text
        assert re.search(r"^healthcheck: FAILED.* exit 1$", text, re.MULTILINE | re.DOTALL)

    def test_an_alert_that_is_muted_stands_behind_those_that_count(self, record: Record, says: Says) -> None:
        record(loss=DIES, mute=["loss-spike"])
        text = says("report")
        assert re.search(r"error  loss-not-finite  step 51", text)
        assert "also  loss-spike at step 42 (muted)" in text

    def test_nothing_is_said_to_be_left_out_of_a_run_with_one_alert(self, record: Record, says: Says) -> None:
        record()
        assert "more alert" not in says("report")

    def test_share_leaves_out_host_user_and_paths(self, record: Record, says: Says, tmp_path: Path) -> None:
        import getpass
        import socket

        record(target=str(tmp_path / "train.py"), loss=DIES)
        for form in ("text", "json"):
            text = says("report", "latest", "--share", "--format", form)
            assert str(tmp_path) not in text
            assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
            if getpass.getuser() != "root":
                assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
            assert "loss-not-finite" in text
            assert "train.py" in text


def test_reading_commands_import_no_torch(record: Record) -> None:
    """A login node has no torch; a reading command that imports it would fail there."""
    record(loss=DIES)
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom healthcheck.cli import main\n"
        "for argv in (['why'], ['metrics'], ['metrics', 'latest'], ['runs'], ['runs', '--by', 'rule'], ['report'], ['plan']):\n"
        "    assert main(argv) == 0, argv\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_check_says_how_many_steps_a_count_of_samples_is_where_a_run_tells(record: Record, says: Says) -> None:
    rules = {
        "version": 1,
        "external": ["loss", "norm"],
        "rules": {
            "norm-high": {"metric": "norm", "when": {"above": 100}, "for": "3 of 5"},
            "loss-high": {"metric": "loss", "when": {"above": 100}, "for": "3 of 5"},
        },
    }
    Path("healthcheck.yaml").write_text(json.dumps(rules))
    assert "logging rate" not in says("check")
    record(loss=HEALTHY, norm=[1.0 if step % 20 == 0 else None for step in range(60)])
    said = says("check")
    assert "at the logging rate of runs/" in said
    assert "norm-high: norm comes every 20 steps; `for` of 5 samples is about 100 steps" in said
    assert "loss-high: loss comes" not in said
    assert "logging rate" not in says("check", "-q")


def test_a_name_that_the_terminal_cannot_show_is_escaped_and_no_traceback(record: Record, tmp_path: Path) -> None:
    """Paths are the user's; the code page of a pipe on a cluster is often ASCII."""
    record(target="größe.py", loss=DIES)
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    code = (
        "from healthcheck.cli import main\n"
        "for argv in (['runs'], ['report'], ['metrics', 'latest'], ['report', '--format', 'html']):\n"
        "    assert main(argv) == 0, argv\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=120)
    assert (result.returncode, result.stderr) == (0, b"")
    assert "größe.py" in result.stdout.decode("utf-8")  # the page says that it is UTF-8


def test_replay_takes_the_young_records_of_this_project(record: Record, says: Says) -> None:
    record(target="a.py", loss=HEALTHY, norm=HEALTHY)
    record(target="b.py", loss=HEALTHY, norm=HEALTHY)
    rules = {"version": 1, "external": ["loss"], "rules": {"high": {"metric": "loss", "when": {"above": 100}}}}
    Path("rules.yaml").write_text(json.dumps(rules))
    told = says("replay", "--since", "1d", "--rules", "rules.yaml")
    assert "2 runs, " in told
    assert main(["replay", "--since", "1d", "runs"]) == 4


def test_a_run_without_a_step_is_one_run_for_replay(record: Record, tmp_path: Path) -> None:
    record(loss=[], norm=[])
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.is_symlink()]
    (folder / "samples.jsonl").unlink(missing_ok=True)
    from healthcheck.readers.find import find_runs

    assert [Path(found.path).name for found in find_runs([str(tmp_path / "runs")])] == [folder.name]
