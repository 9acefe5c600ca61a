"""The HTML page of a run: whole in itself, readable without a script, honest about what is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.reports.page import page_html

NAN = math.nan
SICK = {"loss": [2.0, 1.9, 1.8, NAN], "norm": [1.0, 1.1, 0.9, NAN]}
VOID = {"meta", "path"}


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
    page = Outline(page_html([sick]))
    assert not page.open
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(page.seen)
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
    page = page_html([sessions.run(series=SICK, rules=rules, target="<b>.py", console=False)])
    assert "<script" not in page
    assert "&lt;script&gt;x" in page
    assert "<h1>&lt;b&gt;.py" in page


def test_a_live_run_draws_its_series_and_marks_what_was_not_finite(watched: Callable[..., Any], tmp_path: Path) -> None:
    watched(series=SICK, reports={"html": "hc.html"})
    text = (tmp_path / "hc.html").read_text()
    page = Outline(text)
    assert page.seen.count("figure") == 2
    assert "1 value not finite from step 4" in page.words
    assert text.count('class="broken"') == 2
    assert not re.search(r"\bd=\"[^\"]*nan", text)


def test_a_spike_of_one_sample_survives_the_thinning_of_a_long_series(
    watched: Callable[..., Any], tmp_path: Path
) -> None:
    loss = [2 + 0.001 * math.sin(i) for i in range(3000)]
    loss[1700] = 9.0
    watched(series={"loss": loss}, reports={"html": "hc.html"})
    text = (tmp_path / "hc.html").read_text()
    assert re.search(r"[ML]\d+\.\d 0\.0L", text)  # the top of the chart is reached
    assert len(text) < 60_000


def test_several_runs_share_a_page_with_contents(sick: dict[str, Any]) -> None:
    page = Outline(page_html([{**sick, "path": "a"}, {**sick, "path": "b"}]))
    assert page.words.strip().startswith("healthcheck: 2 runs")
    assert {"#r0-top", "#r1-top"} <= set(page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_report_writes_the_page_of_a_recorded_run(sick: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "latest", "--format", "html"]) == 0
    page = Outline(capsys.readouterr().out)
    assert page.seen.count("figure") == 2
    assert not page.open
