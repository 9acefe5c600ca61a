"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="tensorboard is not installed")

from healthcheck.testing import check_plugin, play
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from healthcheck_tensorboard import Plugin

NAME = "tensorboard"
RULES: dict[str, Any] = {
    "version": 1,
    "rules": {"nan": {"metric": "loss", "when": "nonfinite", "severity": "error", "hint": "lower the learning rate"}},
}


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plugin as a local file: the same whether its distribution is installed or not."""
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", NAME)
    path = tmp_path / f"{NAME}_.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})\n"
        f"from healthcheck_{NAME} import Plugin\n_plugin = Plugin()\n"
        + "".join(f"{name} = _plugin.{name}\n" for name in dir(Plugin) if name.startswith("healthcheck_"))
    )
    return str(path)


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, NAME) == []


def test_samples_are_scalars_and_alerts_text_in_the_folder_of_the_scripts_writer(local: str, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    theirs = SummaryWriter(str(tmp_path / "events"))
    theirs.add_scalar("own", 1.0, 1)
    rules = {**RULES, "settings": {"tensorboard.dir": str(tmp_path / "events")}}
    report = play(rules, {"loss": "3, 2, nan", "grad_norm[head.weight]": "1 x3"}, plugins=[local]).report
    theirs.close()
    assert report["tensorboard"]["undelivered"] == []
    read = EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    assert {"own", "healthcheck/loss"} <= set(read.Tags()["scalars"])
    assert [(e.step, e.value) for e in read.Scalars("healthcheck/loss")][:2] == [(1, 3.0), (2, 2.0)]
    assert not any("head" in tag for tag in read.Tags()["scalars"])
    [alert] = read.Tensors("healthcheck/alerts/text_summary")
    assert alert.step == 3
    assert b"nan at step 3" in alert.tensor_proto.string_val[0]
    assert b"lower the learning rate" in alert.tensor_proto.string_val[0]
    [verdict] = read.Tensors("healthcheck/verdict/text_summary")
    assert b'"failed"' in verdict.tensor_proto.string_val[0]


def test_without_a_folder_nothing_is_written(local: str, tmp_path: Path) -> None:
    assert "tensorboard" not in play(RULES, {"loss": "1, nan"}, plugins=[local]).report


def test_a_prefix_of_ones_own(local: str, tmp_path: Path) -> None:
    rules = {**RULES, "settings": {"tensorboard.dir": str(tmp_path / "e"), "tensorboard.prefix": "watch_"}}
    play(rules, {"loss": "3, 2"}, plugins=[local])
    read = EventAccumulator(str(tmp_path / "e"))
    read.Reload()
    assert "watch_loss" in read.Tags()["scalars"]
