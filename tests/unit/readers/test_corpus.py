"""Every recording of the shared corpus reads without options, if the corpus is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from healthcheck.readers.find import read_run

CORPUS = Path(__file__).resolve().parents[4] / "shared" / "corpus"

pytestmark = pytest.mark.skipif(
    not (CORPUS / "labels.yaml").is_file(), reason="the shared corpus is not beside this checkout"
)


def labels() -> list[dict[str, Any]]:
    if not (CORPUS / "labels.yaml").is_file():
        return []
    yaml = pytest.importorskip("yaml")
    return list(yaml.load((CORPUS / "labels.yaml").read_text("utf-8"), yaml.CSafeLoader)["runs"])


@pytest.mark.parametrize("label", labels(), ids=lambda x: str(x["id"]))
def test_a_corpus_run_reads_with_its_steps_and_its_loss(label: dict[str, Any]) -> None:
    if label["format"] == "tensorboard":
        pytest.importorskip("tensorboard")
    run = read_run(CORPUS / label["file"])
    found = run.series()

    assert any(name.split("[")[0] in ("loss", "eval.loss") for name in found)
    unnumbered = str(label["step_column"]).startswith("none")
    first = label["steps"][0] + (1 if unnumbered else 0)
    steps = [s for column in found.values() for s in column.steps]
    # Two labels count rows that hold no metric, or samples instead of steps.
    if label["id"] not in ("dpo-flat-jsonl", "tb-megatron-fp16"):
        assert (min(steps), max(steps)) == (first, label["steps"][1] + (1 if unnumbered else 0))
    for column in label.get("signal") or []:
        target = run.columns.targets[column]
        assert target is not None
        assert target.metric in ("loss", "eval.loss", "eval.accuracy")
        assert set(dict(target.labels)) <= {"optimizer", "dataset"}, "rules on plain loss must see the signal"
