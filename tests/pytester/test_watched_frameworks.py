"""Watched tests that train with a framework, and what pytest pays where nothing is watched."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from watched_toy import block

RunTests = Callable[..., pytest.RunResult]

UNUSED = """\
import sys
def pytest_unconfigure(config):
    heavy = [m for m in ("torch", "yaml", "jsonschema", "rich", "pluggy_", "healthcheck.assembly") if m in sys.modules]
    assert not heavy, heavy
    assert "healthcheck.pytesting.plugin" in sys.modules
"""


@pytest.mark.slow
@pytest.mark.framework("transformers")
def test_hf_trainer_inside_a_test(watched: RunTests) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    result = watched(
        """
from transformers import Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x.sum()}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 1)
    def forward(self, x, labels=None):
        out = self.body(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [1e-2, 1e20])
def test_hf(lr, tmp_path):
    torch.manual_seed(0)
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=lr, max_steps=30, per_device_train_batch_size=8,
        report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=0.0, optim="sgd", logging_steps=1000, save_strategy="no")
    Trainer(model=Model(), args=arguments, train_dataset=Data()).train()
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    assert block(result, "loss-not-finite")


@pytest.mark.slow
@pytest.mark.framework("lightning")
def test_lightning_inside_a_test(watched: RunTests) -> None:
    pytest.importorskip("lightning")
    result = watched(
        """
import lightning

class Module(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr, self.body = lr, torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        [x] = batch
        return ((self.body(x) - x.sum(1, keepdim=True)) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [1e-2, 1e20])
def test_lightning(lr, tmp_path):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8)
    trainer = lightning.Trainer(max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
    trainer.fit(Module(lr), loader)
""",
        "-W",
        "ignore",
    )
    result.assert_outcomes(passed=1, failed=1)
    assert block(result, "loss-not-finite")


def test_unused_the_plugin_imports_nothing_heavy(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project that does not train must not pay for us in each pytest start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(UNUSED)
    pytester.makepyfile("def test_it(): pass\n")
    result = pytester.runpytest_subprocess("-p", "healthcheck.pytesting.plugin")
    result.assert_outcomes(passed=1)
    assert result.ret == 0, sys.version
