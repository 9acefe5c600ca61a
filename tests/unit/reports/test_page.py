"""The HTML page of a run: whole in itself, readable without a script, honest about what is missing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import socket
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.reports.charts import Curve, Picture, chart, thinned
from healthcheck.reports.page import page_html
from healthcheck.reports.pagedata import PageData
from healthcheck.reports.recorded import Recorded, Series

NAN = math.nan
SICK = {"loss": [2.0, 1.9, 1.8, NAN], "norm": [1.0, 1.1, 0.9, NAN]}
VOID = {"meta"}


class Outline(HTMLParser):
    """Open and closed tags, links, ids, words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        given = dict(attrs)
        self.links += [str(given[key]) for key in ("href", "src", "action") if given.get(key)]
        self.ids += [str(given["id"])] if given.get("id") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def sick(runs: Path, sessions: ModuleType) -> dict[str, Any]:
    made: dict[str, Any] = sessions.run(series=SICK, console=False)
    return made


def test_the_page_needs_nothing_from_anywhere_and_is_well_formed(sick: dict[str, Any]) -> None:
    text = page_html([sick], interactive=False)
    page = Outline(text)
    assert not page.open
    assert page.seen.count("script") == 1  # the one that sorts tables, and no other may run
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'sha256-{digest}'" in text
    assert not {"link", "img", "iframe", "object", "form"} & set(page.seen)
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_every_state_is_said_in_words(sick: dict[str, Any]) -> None:
    words = Outline(page_html([sick])).words
    assert "STOPPED at step 4 by loss-not-finite; exit 1" in words
    assert "ERROR loss-not-finite step 4, not cleared" in words
    assert "try look at the batch" in words
    assert "explained by: loss-not-finite" in words
    assert "nothing logged other" in words  # a rule without data says why, in the table


def test_text_from_anywhere_stays_text(runs: Path, sessions: ModuleType) -> None:
    rules = {
        **sessions.RULES,
        "rules": {"bad": {"metric": "loss", "when": "nonfinite", "message": "<script>x</script>"}},
    }
    page = page_html([sessions.run(series=SICK, rules=rules, target="<b>.py", console=False)], interactive=False)
    assert page.count("<script") == page.count("<script>") == 1
    assert "&lt;script&gt;x" in page
    assert "<h1>&lt;b&gt;.py" in page


def test_a_live_run_draws_its_series_and_marks_what_was_not_finite(watched: Callable[..., Any], tmp_path: Path) -> None:
    watched(series=SICK, reports={"html": "hc.html"})
    text = (tmp_path / "hc.html").read_text()
    page = Outline(text)
    assert page.seen.count("figure") == 4  # one for each alert, one for each series
    assert "1 value not finite from step 4" in page.words
    assert text.count('class="broken"') == 4
    assert not re.search(r"\bd=\"[^\"]*nan", text)


def test_a_spike_of_one_sample_survives_the_thinning_of_a_long_series(
    watched: Callable[..., Any], tmp_path: Path
) -> None:
    loss = [2 + 0.001 * math.sin(i) for i in range(3000)]
    loss[1700] = 9.0
    watched(series={"loss": loss}, reports={"html": "hc.html"})
    text = (tmp_path / "hc.html").read_text()
    drawn = text.partition("train")[2]
    tops = [float(y) for y in re.findall(r"[ML]\d+\.\d (\d+\.\d)", drawn)]
    assert min(tops) < 20  # the top of the chart is reached
    assert " to 9, last" in Outline(text).words


def test_several_runs_share_a_page_with_contents(sick: dict[str, Any]) -> None:
    page = Outline(page_html([{**sick, "path": "a"}, {**sick, "path": "b"}]))
    assert page.words.strip().startswith("healthcheck: 2 runs")
    assert {"#r0-top", "#r1-top"} <= set(page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_report_writes_the_page_of_a_recorded_run(sick: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "latest", "--format", "html"]) == 0
    page = Outline(capsys.readouterr().out)
    assert page.seen.count("figure") == 4
    assert not page.open


def test_every_alert_has_a_chart_with_its_limit_and_what_was_normal(
    runs: Path, sessions: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = [2.0 + 0.01 * (n % 7) for n in range(60)]
    loss[40:43] = [30.0, 31.0, 32.0]
    sessions.run(series={"loss": loss}, console=False)
    assert main(["report", "latest", "--format", "html"]) == 0
    text = capsys.readouterr().out
    article = text.partition("<article")[2].partition("</article>")[0]
    assert 'class="limit"' in article
    assert "normal (median)" in article
    assert "fired at step 42" in article
    assert "loss: 30" in article  # under the pointer


def test_a_run_that_was_killed_has_a_page_of_what_is_known(
    runs: Path, sessions: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions.run(series=SICK, console=False)
    folder = next(runs.glob("*-train"))
    (folder / "report.json").unlink()
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "pid": 2**22 + 1}))
    assert main(["report", "latest", "--format", "html"]) == 0
    page = Outline(capsys.readouterr().out)
    assert "KILLED" in page.words
    assert "no report: the run is killed; last recorded step 4" in page.words
    assert "ERROR loss-not-finite step 4" in page.words


def test_a_page_to_share_has_no_host_user_or_path(
    runs: Path, sessions: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions.run(series=SICK, console=False, target=str(runs / "secret" / "train.py"))
    assert main(["report", "latest", "--format", "html", "--share"]) == 0
    text = capsys.readouterr().out
    assert str(runs.parent) not in text
    assert socket.gethostname() not in text
    assert "&lt;path&gt;/train.py" in text


def test_a_second_run_is_drawn_below_the_first(
    runs: Path, sessions: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions.run(series={"loss": [5.0, 4.0, 3.0]}, console=False, target="first.py")
    sessions.run(series={"loss": [2.0, 1.5, 1.0]}, console=False, target="second.py")
    first = next(runs.glob("*-first")).name
    assert main(["report", "latest", "--format", "html", "--with", first]) == 0
    text = capsys.readouterr().out
    assert 'class="line other"' in text
    assert f"loss, {first}" in text
    assert main(["report", "latest", "--with", first]) == 4
    assert "add --open, or --format html" in capsys.readouterr().err


def test_layers_are_a_heat_map_in_which_the_bad_tensor_is_marked(runs: Path, sessions: ModuleType) -> None:
    record = Recorded()
    for n in range(6):
        values = [10.0 ** (n - 3)] * 40
        values[30:] = [NAN] * 10 if n == 4 else values[30:]
        series = Series(f"grad_norm[layers.{n}.weight]", "grad_norm", (("parameter", f"layers.{n}.weight"),))
        series.steps.extend(range(1, 41))
        series.values.extend(values)
        record.series[series.name] = series
    report = sessions.run(series=SICK, console=False)
    report["alerts"][0]["series"][0]["name"] = "grad_norm[layers.4.weight]"
    text = page_html([report], PageData(record), interactive=False)
    assert text.count('<span class="hn') == 6
    assert '<span class="hn bad" title="layers.4.weight">' in text
    assert text.count('class="hx"') >= 10


def test_the_time_of_each_rank_is_a_row_in_the_order_of_the_ranks(runs: Path, sessions: ModuleType) -> None:
    record = Recorded()
    for rank in (10, 2, 0):
        series = Series(f"ranks.time[rank={rank}]", "ranks.time", (("rank", str(rank)),), "s")
        series.steps.extend(range(20, 220, 20))
        series.values.extend([0.2 if rank == 2 else 0.1] * 10)
        record.series[series.name] = series
    report = sessions.run(series=SICK, console=False)
    text = page_html([report], PageData(record), interactive=False)
    assert re.findall(r'<span class="hn[^>]*>([^<]*)', text) == ["rank 0", "rank 2", "rank 10"]
    assert "rank 2, steps 20 to" in text or "rank 2, step 20" in text


def test_values_that_are_constant_or_all_broken_are_drawn_without_an_error() -> None:
    for values in ([1.0] * 5, [NAN] * 5, [math.inf, 1.0, -math.inf], [0.0, 0.0], [1e300, -1e300], [5e-324, 1.0]):
        text = chart(Picture("x", [Curve("x", range(1, len(values) + 1), values)]))
        Outline(text)
        assert not re.search(r"\bd=\"[^\"]*(nan|inf)", text)
        broken = sum(not math.isfinite(value) for value in values)
        assert ('class="broken"' in text) == bool(broken)


@pytest.mark.parametrize("points", [10, 600, 601, 5000])
def test_thinning_keeps_the_ends_and_every_extreme(points: int) -> None:
    ys = [math.sin(n / 50) for n in range(points)]
    for n in (3, points // 2, points - 4):
        ys[n] = 40.0 if n % 2 else -40.0
    kept = thinned(range(points), ys)
    assert kept == sorted(set(kept))
    assert {0, points - 1, 3, points // 2, points - 4} <= set(kept)
    assert len(kept) <= 1000


def test_what_a_run_waited_for_is_said_with_its_evidence_and_what_to_try(sick: dict[str, Any]) -> None:
    bound = {
        "text": "all-reduce takes 60 % of a step",
        "bound": "communication",
        "share": 0.6,
        "advice": "larger buckets",
    }
    rows = [{"kernel": "gemm", "ms": 3.0}, {"kernel": "copy <x>", "ms": 12.0}]
    sick["performance"] = {
        "seconds": 10.0,
        "training_seconds": 9.0,
        "steps": 4,
        "steps_per_second": 0.44,
        "memory": {"device": "cuda", "peak_bytes": 2**30, "capacity_bytes": 2**34},
        "findings": {
            "acme.comm": {**bound, "from": "acme"},
            "acme.kernels": {"text": "2 kernels", "rows": rows, "from": "acme"},
        },
        "verdict": {**bound, "finding": "acme.comm"},
    }
    page = Outline(page_html([sick], interactive=False))
    for expected in (
        "communication bound: all-reduce takes 60 % of a step",
        "try larger buckets",
        "1 GiB of 16 GiB on cuda",
        "2 kernels (acme)",
        "copy <x>",
    ):
        assert expected in page.words
    assert not page.open
