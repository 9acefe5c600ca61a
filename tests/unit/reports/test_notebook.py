"""What a notebook shows of a watched loop: blocks of HTML with the same words as text. Through a real kernel."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from healthcheck.reports.console import Block, show

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
)


def test_a_block_is_html_with_the_text_as_its_fallback() -> None:
    block = Block(["ERROR loss-not-finite  step 5   <loss> is nan", "      try: look"])
    assert repr(block) == "ERROR loss-not-finite  step 5   <loss> is nan\n      try: look"
    html = block._repr_html_()
    assert "<b>ERROR loss-not-finite  step 5   &lt;loss&gt; is nan</b>\n      try: look" in html
    assert "#c0392b" in html


def test_without_a_notebook_nothing_is_shown() -> None:
    assert show(["a line"]) is False


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
    texts = [out["data"]["text/plain"] for out in shown]
    assert texts[0].startswith("healthcheck 0.1.0: watching notebook, ")
    assert any(text.startswith("ERROR loss-not-finite  step 6") for text in texts), texts
    assert any(text.startswith("healthcheck: STOPPED at step 6") for text in texts), texts
    assert all("border-left" in out["data"]["text/html"] for out in shown)
    assert book.cells[2].outputs[0]["text"] == "the kernel lives\n"
