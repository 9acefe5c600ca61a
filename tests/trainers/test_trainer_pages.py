"""The code on the trainers' pages, run against the drivers: only the frameworks' own modules are replaced."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.run import current

sys.path.insert(0, str(Path(__file__).parent / "drivers"))

torch = pytest.importorskip("torch")
megatron_loop: Any = pytest.importorskip("megatron_loop")
automodel_loop: Any = pytest.importorskip("automodel_loop")
dream_loop: Any = pytest.importorskip("dream_loop")
titan_loop: Any = pytest.importorskip("titan_loop")

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"


class Model(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return {"loss": super().forward(x).square().mean()}


def batches() -> list[Any]:
    return [{"x": torch.ones(2, 3)}] * 20


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    yield
    assert current.current() is None, "a page left a session open"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python no-run\n(.*?)^```", (PAGES / page).read_text(encoding="utf-8"), re.M | re.S)


def play(
    page: str, monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]], **names: Any
) -> dict[str, Any]:
    """Execute a page's blocks one after the other, as a reader would."""
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    found = blocks(page)
    assert found
    for block in found:
        exec(compile(block, page, "exec"), names)
    return names


def test_megatron_bridge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    package = "megatron.bridge.training"
    modules = {
        f"{package}.gpt_step": {"forward_step": lambda batch, model: model[0](**batch)["loss"]},
        f"{package}.pretrain": {"pretrain": megatron_loop.pretrain},
        f"{package}.callbacks": {"CallbackManager": megatron_loop.CallbackManager},
    }

    class MyCallback(megatron_loop.Callback):  # type: ignore[misc]
        pass

    config = megatron_loop.config(
        train={"train_iters": 5},
        model={"chunks": [Model(3, 1)]},
        dataset={"batches": batches(), "valid": batches()[:1]},
    )
    names = play("megatron-bridge.md", monkeypatch, modules, config=config, MyCallback=MyCallback)
    assert "evaluated" in capsys.readouterr().out
    report = names["health"].report
    assert report["steps"] == 5
    assert [step for step, _ in names["health"].session.history("loss")] == [1, 2, 4, 5]


def test_nemo_automodel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = automodel_loop.TrainFinetuneRecipeForNextTokenPrediction
    modules = {"nemo_automodel.recipes.llm.train_ft": {"TrainFinetuneRecipeForNextTokenPrediction": recipe}}
    config = automodel_loop.config(
        Model(3, 1), batches(), max_steps=4, validation={"squad": batches()[:1]}, val_every_steps=2
    )
    names = play("nemo-automodel.md", monkeypatch, modules, cfg=config)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0"
    assert sum(line.startswith("squad ") for line in said) == 2
    assert names["recipe"].health.report["steps"] == 4


def test_dream_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make_trainer(callbacks: Any) -> Any:
        return dream_loop.Trainer(Model(3, 1), batches()[:4], callbacks)

    modules = {
        "dream_trainer.callbacks": {
            "CallbackCollection": dream_loop.CallbackCollection,
            "Callback": dream_loop.Callback,
        }
    }
    names = play("dream-trainer.md", monkeypatch, modules, make_trainer=make_trainer)
    assert capsys.readouterr().out == "0\n"
    assert names["health"].report["steps"] == 4


def test_torchtitan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Trainer(titan_loop.Trainer):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(Model(3, 1), batches(), steps=config["steps"])

    modules = {"torchtitan.trainer": {"Trainer": Trainer}}
    names = play("torchtitan.md", monkeypatch, modules, config={"steps": 4})
    assert capsys.readouterr().out == "0\n"
    assert names["trainer"].health.report["steps"] == 4
