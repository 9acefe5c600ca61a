"""Over-fitting and NaN in an evaluation, under ``healthcheck run`` with the default rules, in loops of many styles.

Rows of a library that is not installed are skipped: most of them are not among our own dependencies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

HEAD = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset
    nan, EPOCHS = "nan" in sys.argv, 6 if "nan" in sys.argv else 50
    torch.manual_seed(0)
    x, y = torch.randn(40, 20), torch.randint(0, 2, (40,))
    held_x, held_y = torch.randn(200, 20), torch.randint(0, 2, (200,))
    if nan: held_x[3] = float("nan")
    train, held = DataLoader(TensorDataset(x, y), 8, shuffle=True), DataLoader(TensorDataset(held_x, held_y), 50)
    def network(): return nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 2))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
"""
"""Random labels, so that only what is learnt by heart makes the training loss fall; in a second run the held-out set has a NaN."""

STYLES = {
    "plain loop": """
    for epoch in range(EPOCHS):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); F.cross_entropy(model(a), b).backward(); optimizer.step()
        model.eval()
        with torch.no_grad(): print(sum(F.cross_entropy(model(a), b).item() for a, b in held) / len(held))
    """,
    "train(False)": """
    for epoch in range(EPOCHS):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); F.cross_entropy(model(a), b).backward(); optimizer.step()
        model.train(False)
        with torch.inference_mode(): print(sum(F.cross_entropy(model(a), b).item() for a, b in held) / len(held))
    """,
    "updates by hand": """
    for epoch in range(EPOCHS * 6):
        model.train()
        for a, b in train:
            model.zero_grad(); F.cross_entropy(model(a), b).backward()
            with torch.no_grad():
                for p in model.parameters(): p.sub_(p.grad, alpha=0.2)
        if epoch % 6: continue
        model.eval()
        with torch.no_grad(): print(sum(F.cross_entropy(model(a), b).item() for a, b in held) / len(held))
    """,
    "timm style": """
    class LabelSmoothingCrossEntropy(nn.Module):
        def forward(self, z, target):
            logp = F.log_softmax(z, dim=-1)
            picked = -logp.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
            return (0.99 * picked - 0.01 * logp.mean(dim=-1)).mean()
    train_loss_fn, validate_loss_fn = LabelSmoothingCrossEntropy(), nn.CrossEntropyLoss()
    def train_one_epoch():
        model.train()
        for a, b in train:
            loss = train_loss_fn(model(a), b); optimizer.zero_grad(); loss.backward(); optimizer.step()
    def validate():
        model.eval(); total = 0.0
        with torch.inference_mode():
            for a, b in held: total += validate_loss_fn(model(a), b).item() * len(b)
        return total / len(held_x)
    for epoch in range(EPOCHS): train_one_epoch(); print(validate())
    """,
    "skorch": """
    from skorch import NeuralNetClassifier
    from skorch.dataset import Dataset
    from skorch.helper import predefined_split
    net = NeuralNetClassifier(network, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, lr=3e-3, batch_size=8,
        max_epochs=EPOCHS, train_split=predefined_split(Dataset(held_x.numpy(), held_y.numpy())))
    net.fit(x.numpy(), y.numpy())
    """,
    "Ignite": """
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss
    criterion = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(criterion)})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(held))
    trainer.run(train, max_epochs=EPOCHS)
    """,
    "fastai": """
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as Loader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    loaders = DataLoaders(Loader(list(zip(x, y)), bs=8, shuffle=True), Loader(list(zip(held_x, held_y)), bs=50))
    learner = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), lr=3e-3)
    learner.fit(EPOCHS)
    """,
    "Keras": """
    import keras
    net = keras.Sequential([keras.Input((20,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(2)])
    net.compile(optimizer=keras.optimizers.Adam(3e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    net.fit(x.numpy(), y.numpy(), batch_size=8, epochs=EPOCHS, validation_data=(held_x.numpy(), held_y.numpy()), verbose=0)
    """,
    "HF Trainer": """
    import tempfile
    from transformers import Trainer, TrainingArguments
    class Classifier(nn.Module):
        def __init__(self): super().__init__(); self.net = network()
        def forward(self, x, labels): z = self.net(x); return {"loss": F.cross_entropy(z, labels), "logits": z}
    rows = lambda x, y: [{"x": a, "labels": b} for a, b in zip(x, y)]
    options = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=EPOCHS, per_device_train_batch_size=8, learning_rate=3e-3,
        per_device_eval_batch_size=50, eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant")
    Trainer(Classifier(), options, train_dataset=rows(x, y), eval_dataset=rows(held_x, held_y)).train()
    """,
}
MODULES = {"skorch": "skorch", "Ignite": "ignite", "fastai": "fastai", "Keras": "keras", "HF Trainer": "transformers"}


def alerts(command: Callable, script: Callable[..., Path], tmp_path: Path, style: str, *words: str) -> set[str]:
    if style in MODULES and find_spec(MODULES[style]) is None:
        pytest.skip(f"{MODULES[style]} is not installed; `make zoo` installs it")
    path, report = script(HEAD + STYLES[style]), tmp_path / "report.json"
    result = command("run", "--report", f"json={report}", path, *words, env={"KERAS_BACKEND": "torch"})
    assert "SCRIPT FAILED" not in result.stderr, result.stderr
    return {alert["rule"] for alert in json.loads(report.read_text())["alerts"] if alert["severity"] != "info"}


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_over_fitting_is_seen(
    style: str, healthcheck_command: Callable, script: Callable[..., Path], tmp_path: Path
) -> None:
    assert "overfit" in alerts(healthcheck_command, script, tmp_path, style)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_nan_in_an_evaluation_is_seen(
    style: str, healthcheck_command: Callable, script: Callable[..., Path], tmp_path: Path
) -> None:
    assert "eval-not-finite" in alerts(healthcheck_command, script, tmp_path, style, "nan")
