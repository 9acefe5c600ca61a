"""Frameworks on two ranks of one CPU: a fault on one rank ends both at the same step, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

RULES = """
version: 1
rules:
  loss-high: {metric: loss, when: {above: 1000}, severity: error, then: [{stop: {checkpoint: true}}]}
"""

HUGGING_FACE = """
    import os, sys, torch
    from transformers import Trainer, TrainingArguments
    from healthcheck.trainers.huggingface import HealthCheckCallback
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = torch.nn.Linear(4, 1), 0
        def forward(self, x, labels):
            self.calls += 1
            loss = (self.fc(x) - labels).pow(2).mean()
            return {"loss": loss * 1e9 if os.environ["RANK"] == "1" and self.calls == 4 else loss}
    data = [{"x": torch.ones(4), "labels": torch.zeros(1)} for _ in range(80)]
    arguments = TrainingArguments("out", max_steps=12, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        use_cpu=True, ddp_backend="gloo", save_strategy="no")
    health = HealthCheckCallback("rules.yaml")
    result = Trainer(Model(), arguments, train_dataset=data, callbacks=[health]).train()
    print(f"<{health.report['rank']} ended at {result.global_step} by {health.report['stop']['rule']}>", flush=True)
    for alert in health.alerts:
        print(alert.actions[0].text)
"""

LIGHTNING = """
    import os, torch, lightning.pytorch as pl
    class Toy(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = torch.nn.Linear(4, 1), 0
        def training_step(self, batch, index):
            self.calls += 1
            loss = self.fc(batch[0]).pow(2).mean()
            return loss * 1e9 if self.global_rank == 1 and self.calls == 4 else loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-12)
    if __name__ == "__main__":
        CALLBACKS
        data = torch.utils.data.TensorDataset(torch.ones(80, 4))
        trainer = pl.Trainer(max_steps=12, accelerator="cpu", devices=2, strategy="ddp", logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks)
        trainer.fit(Toy(), torch.utils.data.DataLoader(data, batch_size=2))
        by = callbacks[0].report["stop"]["rule"] if callbacks else "itself"
        rank = callbacks[0].report["rank"] if callbacks else trainer.global_rank
        print(f"<{rank} ended at {trainer.global_step} by {by}>", flush=True)
"""
OWN = "from healthcheck.trainers.lightning import HealthCheckCallback; callbacks = [HealthCheckCallback('rules.yaml')]"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "rules.yaml").write_text(RULES)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK") and k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=folder,
        env={**clean, "HEALTHCHECK_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


def endings(result: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall(r"<(.*?)>", result.stdout))


def test_transformers_ends_on_both_ranks_at_the_same_step(script: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = script(HUGGING_FACE)
    result = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path))
    assert endings(result) == ["0 ended at 5 by loss-high", "1 ended at 5 by loss-high"], result.stderr
    assert "asked for a checkpoint: on all ranks, at their next sync point" in result.stdout
    assert result.stderr.count("all ranks save at step 5, as asked by rank 1: out/checkpoint-5") == 1
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-5"}


def test_lightning_ends_on_both_ranks_at_the_same_step(script: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    path = script(LIGHTNING.replace("CALLBACKS", OWN))
    result = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path))
    assert endings(result) == ["0 ended at 5 by loss-high", "1 ended at 5 by loss-high"], result.stderr
    assert result.stderr.count("all ranks stop at step 5: loss-high on rank 1 only, first seen at step 4") == 1
    assert [
        path.parent.name for path in (tmp_path / "runs").glob("*/checkpoints/step-5") if "latest" not in str(path)
    ] == ["checkpoints"]


def test_a_rank_that_lightning_starts_itself_is_watched_too(script: Callable[..., Path], tmp_path: Path) -> None:
    """Lightning starts rank 1 with plain python; what stops on it stops both."""
    pytest.importorskip("lightning")
    path = script(LIGHTNING.replace("CALLBACKS", "callbacks = []"))
    result = run(tmp_path, "-m", "healthcheck", "run", "--rules", "rules.yaml", str(path))
    assert result.returncode == 1, result.stderr
    assert "all ranks stop at step 5: loss-high on rank 1 only" in result.stderr
