"""Pages in a real headless Chromium: opened from disk, without a network, with and without the extra ``page``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.cli import main
from healthcheck.record.runs import find_run
from healthcheck.reports.interactive import installed
from healthcheck.reports.page import page_html
from healthcheck.reports.pagedata import page_data

WIDE = [12.0 + 0.2 * math.sin(n) for n in range(400)]
LOSS = [3.0 * math.exp(-n / 150) + 0.02 * math.sin(7 * n) + 0.1 for n in range(400)]
LOSS[250:254] = [25.0, 27.0, 26.0, 24.0]
LOSS[360:] = [math.nan] * 40
SERIES = {"loss": LOSS, "norm": WIDE, "other": [0.5 + n / 1000 for n in range(400)]}


@pytest.fixture(scope="module")
def chromium(helper: Callable[[str], ModuleType]) -> ModuleType:
    made = helper("tests/browser/chromium.py")
    if made.found() is None:
        pytest.skip("no Chromium on this machine (HEALTHCHECK_TEST_CHROMIUM names one)")
    return made


@pytest.fixture(scope="module")
def browser(chromium: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium.Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(helper: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of one run, drawn as SVG and, with the extra, by the library."""
    folder = tmp_path_factory.mktemp("pages")
    sessions = helper("tests/unit/reports/sessions.py")
    patch = pytest.MonkeyPatch()
    for name in [n for n in os.environ if n.startswith("HEALTHCHECK_") and "CHROMIUM" not in n]:
        patch.delenv(name)
    patch.setenv("HEALTHCHECK_RUNS", str(folder / "runs"))
    patch.chdir(folder)
    try:
        report = sessions.run(series=SERIES, rules={**sessions.RULES, "settings": {"mode": "observe"}}, console=False)
        run, host = find_run(), plugin_host()
        rules = load_rules_for(rules=[str(run.rules_file)], host=host)
        made = {"plain": folder / "plain.html"}
        for name in ("plain", "zoom") if installed() else ("plain",):
            data = page_data(run, report["alerts"], host.registry.units(), report=report, rules=rules)
            made[name] = folder / f"{name}.html"
            made[name].write_text(page_html([report], data, interactive=name == "zoom"), encoding="utf-8")
    finally:
        patch.undo()
    return made


@pytest.fixture(params=["plain", "zoom"])
def page_file(request: pytest.FixtureRequest, pages: dict[str, Path]) -> Path:
    if request.param not in pages:
        pytest.skip("the extra `page` is not installed")
    return pages[request.param]


def colour(page: Any, selector: str, name: str = "backgroundColor") -> list[float]:
    text = page.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{name}")
    return [float(part) for part in text.partition("(")[2].rstrip(")").split(",")[:3]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_opens_without_a_complaint_fits_its_window_and_follows_the_readers_setting(
    browser: Any, page_file: Path, width: int, dark: bool, tmp_path: Path
) -> None:
    page = browser.open(page_file, width, 900, dark=dark)
    if page_file.stem == "zoom":
        page.wait("document.documentElement.classList.contains('charts-ready')")
    assert page.collect() == []
    assert page.run("document.documentElement.scrollWidth") <= width
    brightness = sum(colour(page, "body")) / 3
    assert brightness < 60 if dark else brightness > 200
    ink = sum(colour(page, "h1", "color")) / 3
    assert abs(ink - brightness) > 150  # it can be read
    smallest = page.run(
        "Math.min(...[...document.querySelectorAll('p, span.yt, td')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 10
    assert page.picture(tmp_path / "page.png").stat().st_size > 10_000


def test_the_drawing_has_its_values_under_the_pointer_and_the_limit_where_it_was(
    browser: Any, pages: dict[str, Path]
) -> None:
    page = browser.open(pages["plain"])
    place = page.place("article .area svg")
    x, y = place["x"] + place["width"] * 252 / 400, place["y"] + place["height"] / 2
    page.move(x, y)
    told = page.run(f"document.elementFromPoint({x}, {y}).querySelector('title').textContent")
    assert "loss: " in told
    assert "25 to 27" in told or "27" in told
    assert page.run("getComputedStyle(document.querySelector('.h:hover')).fillOpacity") == "0.09"
    assert page.run("document.querySelectorAll('article .limit').length") >= 1
    assert page.collect() == []


def test_every_alert_is_in_the_strip_and_leads_to_its_chart(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.open(pages["plain"])
    links = page.run("[...document.querySelectorAll('a.ev')].map(e => [e.getAttribute('href'), e.title])")
    assert [title.partition(" fired")[0] for _, title in links] == ["loss-spike", "loss-not-finite"]
    for href, _ in links:
        assert page.run(f"document.querySelector({json.dumps(href)}).querySelectorAll('svg').length") >= 1
    page.run("document.querySelector('a.ev').click()")
    page.wait("location.hash.includes('loss-spike')")


def test_values_that_are_not_finite_are_seen_wherever_their_series_is_drawn(
    browser: Any, pages: dict[str, Path]
) -> None:
    page = browser.open(pages["plain"])
    assert page.run("document.querySelectorAll('.broken').length") >= 3  # two alerts, and the loss
    drawn = "[...document.querySelectorAll('.broken')].every(e => e.getBBox().width > 50)"
    assert page.run(drawn)  # 40 steps of 400 are a tenth of the width


def test_tables_sort_at_a_click_and_back_at_the_next(browser: Any, page_file: Path) -> None:
    page = browser.open(page_file)
    column = (
        "[...[...document.querySelectorAll('table.sortable')].at(-1).tBodies[0].rows].map(r => r.cells[0].textContent)"
    )
    page.run("document.querySelectorAll('details').forEach(e => e.open = true)")
    head = "[...document.querySelectorAll('table.sortable')].at(-1).querySelector('th button')"
    page.run(f"{head}.click()")
    up = page.run(column)
    page.run(f"{head}.click()")
    assert page.run(column) == up[::-1]
    assert up == sorted(up)
    assert page.run(f"{head}.parentNode.getAttribute('aria-sort')") == "descending"
    assert page.collect() == []


def test_dragging_over_one_chart_zooms_all_of_them(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    if "zoom" not in pages:
        pytest.skip("the extra `page` is not installed")
    page = browser.open(pages["zoom"])
    page.wait("document.documentElement.classList.contains('charts-ready')")
    place = page.place("article .live-chart")
    assert page.run("getComputedStyle(document.querySelector('article .area')).display") == "none"
    y = place["y"] + place["height"] / 2
    page.drag((place["x"] + place["width"] * 0.4, y), (place["x"] + place["width"] * 0.6, y + 20))
    page.wait("Bokeh.documents[0].roots().every(f => f.x_range.end - f.x_range.start < 150)")
    starts = page.run("Bokeh.documents[0].roots().map(f => Math.round(f.x_range.start))")
    assert len(set(starts)) == 1
    assert 120 < starts[0] < 200
    page.move(place["x"] + place["width"] / 2, y)
    assert page.collect() == []
    assert page.picture(tmp_path / "zoomed.png").stat().st_size > 10_000


def test_a_long_run_is_a_small_page_that_opens_at_once(
    browser: Any, helper: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6,000 steps of 8 series here; 100,000 of 20 are measured by ``benchmarks/pages.py``."""
    benchmark = helper("benchmarks/pages.py")
    folder = benchmark.make(tmp_path / "0101-0000-long", steps=6_000, series=8, alerts=5)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder), "--open"]) == 0
    path = folder / "page.html"
    assert path.stat().st_size < 10 * 2**20
    page = browser.open(path)
    assert page.collect() == []
    assert page.run("document.querySelectorAll('a.ev').length") == 5
    assert page.run("document.querySelectorAll('article svg').length") == 5
