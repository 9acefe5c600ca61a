"""Steps begin when they begin: what a forward pass holds on to belongs to its step, where somebody says when that starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RULES = """
version: 1
rules:
  step-leak: {metric: memory.step_growth, when: {above: "8MiB"}, for: 5 of 10, severity: error, then: [warn]}
"""

# Pages of its own: what other tests of this process have given back to the allocator is used again, and nothing grows.
HEAD = """
    import mmap, sys, tempfile, torch
    leaks = "leak" in sys.argv
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__(); self.layer = torch.nn.Linear(4, 1); self.kept = []
        def forward(self, x, labels=None):
            if leaks and self.training: self.kept.append(torch.frombuffer(mmap.mmap(-1, 16_000_000), dtype=torch.uint8).fill_(1))
            return {"loss": self.layer(x).pow(2).mean()}
    rows = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(96)]
"""

TRAINERS = {
    "transformers": """
    from transformers import Trainer, TrainingArguments
    options = TrainingArguments(tempfile.mkdtemp(), max_steps=12, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="no", gradient_accumulation_steps=2, per_device_train_batch_size=4)
    Trainer(Net(), options, train_dataset=rows).train()
    """,
    "lightning": """
    import lightning.pytorch as pl
    class Module(pl.LightningModule):
        def __init__(self): super().__init__(); self.net = Net()
        def training_step(self, batch, index): return self.net(**batch)["loss"]
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
    pl.Trainer(max_steps=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tempfile.mkdtemp(), accumulate_grad_batches=2,
    ).fit(Module(), torch.utils.data.DataLoader(rows, 4))
    """,
    "accelerate": """
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    for number in range(24):  # no loader: the loop says that a step begins, by `accumulate`
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.randn(4, 4))["loss"]); optimizer.step(); optimizer.zero_grad()
    """,
    "torch": """
    net = Net(); optimizer = torch.optim.AdamW(net.parameters())
    for batch in torch.utils.data.DataLoader(rows, 8):
        optimizer.zero_grad(); net(**batch)["loss"].backward(); optimizer.step()
    """,
}


@pytest.fixture
def report(play: Callable[..., Any]) -> Callable[..., Any]:
    """The report of a script under these rules. Nobody but the rule listens: events are built for it alone."""

    def run(text: str, *words: str) -> Any:
        played = play(text, *words, rules=RULES, listen=False)
        assert played.session.report["steps"] >= 12
        return played.session.report

    return run


@pytest.mark.parametrize("package", TRAINERS)
def test_a_forward_pass_that_leaks_is_seen_and_a_healthy_one_is_not(package: str, report: Callable[..., Any]) -> None:
    pytest.importorskip(package)
    leaking = report(HEAD + TRAINERS[package], "leak")
    assert [alert["rule"] for alert in leaking["alerts"]] == ["step-leak"]
    healthy = report(HEAD + TRAINERS[package])
    assert healthy["alerts"] == []
    assert healthy["rules"]["step-leak"]["verdict"] == "ok"


def test_where_a_start_is_only_inferred_growth_within_a_step_is_not_judged(report: Callable[..., Any]) -> None:
    loop = """
    net = Net(); optimizer = torch.optim.AdamW(net.parameters())
    for number in range(12):
        optimizer.zero_grad(); net(torch.randn(8, 4))["loss"].backward(); optimizer.step()
    """
    rule = report(HEAD + loop, "leak")["rules"]["step-leak"]
    assert rule["verdict"] == "not judged"
    assert "nobody says when a step begins" in rule["reason"]
