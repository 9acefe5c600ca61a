"""HF Trainer, Lightning and Accelerate, unmodified: one bad batch is caught at its step, before the weights are lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HUGGING_FACE = """
    import tempfile, torch
    from transformers import Trainer, TrainingArguments
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)
        def forward(self, x, labels):
            return {"loss": (self.net(x) - labels).square().mean()}
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 64
        def __getitem__(self, i):
            x = torch.tensor([i % 7 / 7, i / 64]) * (float("nan") if i == BAD else 1.0)
            return {"x": x, "labels": torch.zeros(1)}
    class Ordered(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=10,
        report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True, logging_steps=1)
    model = Model()
    trainer = Ordered(model, arguments, train_dataset=Data())
"""

LIGHTNING = """
    import torch, lightning
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)
        def training_step(self, batch, index):
            return (self.net(batch[0]) - batch[1]).square().mean()
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)
    x = torch.arange(128).reshape(64, 2) % 11 / 11
    x[BAD] = float("nan")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(64, 1)), 2)
    trainer = lightning.Trainer(
        max_steps=10, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=0.5, accelerator="cpu", accumulate_grad_batches=2)
    model = Model()
"""

ACCELERATE = """
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential()
    model.net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.arange(128).reshape(64, 2) % 11 / 11
    x[BAD] = float("nan")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(64, 1)), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    def train():
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
"""

TRAINERS = {
    "transformers": HUGGING_FACE + "    train = trainer.train\n",
    "lightning": LIGHTNING + "    train = lambda: trainer.fit(model, loader)\n",
    "accelerate": ACCELERATE,
}

LAST_WORDS = """
    import atexit
    atexit.register(lambda: print("finite", all(p.isfinite().all().item() for p in model.parameters())))
"""
RUN = """
    train()
    print("trained to the end")
"""

BAD_SAMPLE = 13
"""Two samples a batch, two batches a step: sample 13 is in step 4."""


@pytest.fixture(params=sorted(TRAINERS))
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(TRAINERS[request.param])


def test_a_bad_sample_is_caught_at_its_step_and_the_weights_survive(
    healthcheck_command: Callable, script: Callable[..., Path], tmp_path: Path, framework: str
) -> None:
    path = script(framework.replace("BAD", str(BAD_SAMPLE)) + LAST_WORDS + RUN)

    result = healthcheck_command("run", "--report", f"json={tmp_path / 'hc.json'}", path)

    report = json.loads((tmp_path / "hc.json").read_text())
    assert result.returncode == 1, result.stderr
    assert report["exit_reason"] == "stopped"
    assert report["stop"]["step"] == 4
    assert {a["fired_step"] for a in report["alerts"] if a["severity"] == "error"} == {4}
    assert any("net." in str(a["facts"].get("first")) for a in report["alerts"])
    assert report["steps"] == 4
    assert "finite True" in result.stdout


@pytest.fixture
def healthy(framework: str) -> str:
    return framework.replace('x[BAD] = float("nan")', "").replace("i == BAD", "False") + RUN


def test_a_healthy_run_ends_with_0_and_its_own_number_of_steps(
    play: Callable[..., Any], capsys: pytest.CaptureFixture[str], healthy: str
) -> None:
    played = play(healthy, rules="healthcheck:recommended")

    assert played.code == 0
    assert played.steps() == list(range(1, 17 if "accelerate" in healthy else 11))
    assert played.session.alerts == []
    assert "trained to the end" in capsys.readouterr().out


@pytest.mark.parametrize("framework", ["transformers"], indirect=True)
def test_max_steps_ends_an_unmodified_trainer(play: Callable[..., Any], healthy: str) -> None:
    played = play(healthy, rules="healthcheck:recommended", settings={"max_steps": 3})

    assert played.code == 0
    assert played.steps() == [1, 2, 3]
