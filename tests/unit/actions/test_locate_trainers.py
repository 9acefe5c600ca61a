"""``locate`` under real trainers: whatever calls the model, the call is found and made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

RULES = """
version: 1
rules:
  bad:
    metric: {metric}
    when: nonfinite
    severity: error
    then: [warn, locate]
"""

MODEL = """
import torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.broken, self.head = nn.Linear(4, 4), Log(), nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.head(self.broken(self.fc(x)) if self.spoiled() else self.fc(x))
        return y if labels is None else {"loss": (y - labels).pow(2).mean(), "logits": y}

    calls = 0

    def spoiled(self):
        self.calls += 1
        return self.calls > 3
"""

SCRIPT = (
    MODEL
    + """
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
"""
)

HUGGING_FACE = (
    MODEL
    + """
from transformers import Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {"x": torch.randn(4), "labels": torch.randn(1)}

Trainer(Net(), TrainingArguments("out", max_steps=8, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True),
        train_dataset=Data()).train()
"""
)

LIGHTNING = (
    MODEL
    + """
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(Module(), data)
"""
)


def located(healthcheck_command: Any, folder: Path, script: str) -> dict[str, Any]:
    (folder / "train.py").write_text(script)
    (folder / "healthcheck.yaml").write_text(RULES.format(metric="grad_norm"))
    done = healthcheck_command("run", "--report", "json=report.json", "train.py")
    assert (folder / "report.json").is_file(), done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert not report["plugin_errors"]
    assert not report["action_errors"]
    (alert,) = report["alerts"]
    assert alert["fired_step"] == 4
    (outcome,) = (o for o in alert["actions"] if o["action"] == "locate")
    return dict(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs", "module"),
    [(SCRIPT, "torch", "broken"), (HUGGING_FACE, "accelerate", "broken"), (LIGHTNING, "lightning", "net.broken")],
    ids=["script", "huggingface", "lightning"],
)
def test_the_culprit_is_named_in_an_unmodified_script(
    healthcheck_command: Any, tmp_path: Path, script: str, needs: str, module: str
) -> None:
    pytest.importorskip(needs)
    outcome = located(healthcheck_command, tmp_path, script)
    assert outcome["text"].startswith(f"first non-finite output: `{module}` (Log), "), outcome["text"]
    assert Path(tmp_path, outcome["path"]).read_text().startswith("call,module,class,")
