"""What a notebook shows of a watched loop: blocks of HTML with the same words as text. Through a real kernel."""

from __future__ import annotations

import html
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import healthcheck
from healthcheck.reports.console import Block, Board

CELLS = (
    """
    import torch, healthcheck
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    """,
    """
    with healthcheck.watch(model, optimizer) as health:
        for step in range(10):
            x = torch.ones(1, 2) * (float("nan") if step == 5 else 1.0)
            loss = model(x).sum()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            health.step(loss=loss)
    """,
    "print('the kernel lives')",
    "health",
    "health.report",
)


def test_a_block_is_html_with_the_text_as_its_fallback() -> None:
    block = Block(["ERROR loss-not-finite  step 5   <loss> is nan", "      try: look"])
    assert repr(block) == "ERROR loss-not-finite  step 5   <loss> is nan\n      try: look"
    html = block._repr_html_()
    assert "<b>ERROR loss-not-finite  step 5   &lt;loss&gt; is nan</b>\n      try: look" in html
    assert "#c0392b" in html


def test_without_a_notebook_nothing_is_shown() -> None:
    assert Board().show(["a line"]) is False


@pytest.mark.slow
def test_a_kernel_shows_alerts_as_html_and_survives_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("nbclient").NotebookClient
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS])
    client(book, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown: list[dict[str, Any]] = [
        out for cell in book.cells for out in cell.outputs if out.output_type == "display_data"
    ]
    (board,) = [out for out in shown if "border-left" in out["data"].get("text/html", "")]  # one output, updated
    text = board["data"]["text/plain"]
    assert text.startswith("healthcheck 0.1.0: watching notebook, ")
    assert "\nERROR loss-not-finite  step 6" in text
    assert "\nhealthcheck: STOPPED at step 6" in text
    assert board["data"]["text/html"].count("border-left") >= 3
    assert book.cells[2].outputs[0]["text"] == "the kernel lives\n"
    watched, report = (cell.outputs[0]["data"] for cell in book.cells[3:])
    for data in (watched, report):
        assert data["text/html"].startswith("<iframe ")
        assert "STOPPED" in data["text/html"]
        assert "&lt;svg" in data["text/html"]
        assert len(data["text/plain"]) < 200  # no wall of text beside it


def test_a_loop_and_its_report_are_shown_as_the_page_and_say_themselves_in_a_line(
    tmp_path: Path, monkeypatch: Any
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with healthcheck.watch(model, optimizer, console=False) as health:
        for step in range(12):
            loss = model(torch.ones(1, 2)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            health.step(loss=loss)
            if step == 9:
                assert repr(health) == "<healthcheck: step 10, no alert so far>"
                assert "RUNNING" in health._repr_html_()
    assert "12 steps" in repr(health)
    report = health.report
    assert report is not None
    assert dict(report) == json.loads(next((tmp_path / "runs").glob("*/report.json")).read_text())
    assert "healthcheck: " in repr(report)
    assert len(repr(report)) < 200
    assert report._repr_html_() == health._repr_html_()
    inner = html.unescape(report._repr_html_())
    assert 'aria-label="loss, steps 1 to 12' in inner
    assert "bokeh" not in inner.lower()  # the library would be in the notebook once for each output
