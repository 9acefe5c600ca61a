"""Functions of torch that are replaced to see habits (seeds, drawn weights, loads, samples), in what frameworks do with them:
the same numbers as without, and not a word about what is meant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SHARDED = """
    import os, torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    def build():
        return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    torch.manual_seed(0)
    state = build().state_dict()
    with torch.device("meta"):
        model = build()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    torch.manual_seed(1 + dist.get_rank())
    for part in (model[0], model[2]):
        part.reset_parameters()                       # as after to_empty, before the checkpoint is read
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(45):
        x = torch.randn(16, 8)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item().hex())
    dist.destroy_process_group()
"""

HUGGING_FACE = """
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel, Trainer, TrainingArguments, set_seed
    from transformers import PrinterCallback, TrainerCallback
    set_seed(0)
    small = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=3)
    BertModel(small).save_pretrained("base")
    ids = torch.randint(3, 40, (300, 8))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0]) % 3} for row in ids]
    class Losses(TrainerCallback):
        def on_log(self, arguments, state, control, logs=None, **more):
            if "loss" in logs:
                print(state.global_step, logs["loss"])
    def train(steps, resume):
        # The head is not in the checkpoint: transformers draws it after loading.
        model = BertForSequenceClassification.from_pretrained("base", num_labels=3)
        given = TrainingArguments("out", max_steps=steps, per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
            use_cpu=True, logging_steps=5, save_steps=30, learning_rate=5e-4)
        trainer = Trainer(model, given, train_dataset=data, callbacks=[Losses()])
        trainer.remove_callback(PrinterCallback)       # says how long it took
        trainer.train(resume_from_checkpoint=resume)
    train(30, None)
    train(60, "out/checkpoint-30")
"""

LIGHTNING = """
    import torch, lightning.pytorch as pl
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
            for layer in (self.layers[0], self.layers[2]):
                torch.nn.init.kaiming_uniform_(layer.weight)
        def training_step(self, batch, index):
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.layers(x), y)
            if index % 10 == 0:
                print(self.global_step, loss.item().hex())
            return loss
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)
    pl.seed_everything(0, workers=True, verbose=False)
    x = torch.randn(320, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    def trainer(epochs):
        return pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False)
    first = trainer(1)
    first.fit(Net(), loader)
    first.save_checkpoint("one.ckpt")
    trainer(2).fit(Net.load_from_checkpoint("one.ckpt"), loader)                 # fine-tuned from it
    trainer(3).fit(Net(), loader, ckpt_path="one.ckpt", weights_only=False)      # gone on with
"""

COMPILED = """
    import torch
    from torch.distributions import Normal
    torch.manual_seed(0)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = torch.nn.Linear(12, 16), torch.nn.Linear(8, 12)
            torch.nn.init.xavier_uniform_(self.encode.weight)
        def forward(self, x):
            mean, spread = self.encode(x).chunk(2, 1)
            q = Normal(mean, torch.nn.functional.softplus(spread) + 1e-3, validate_args=False)
            z = q.rsample() + 0.01 * Normal(0.0 * mean.detach(), 1.0, validate_args=False).sample()
            return self.decode(z), (q.log_prob(z).sum(1) + 0.5 * z.square().sum(1)).mean()
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mix = torch.randn(4, 12)
    for step in range(60):
        x = torch.randn(32, 4) @ mix
        out, kl = compiled(x)
        loss = torch.nn.functional.mse_loss(out, x) + 0.01 * kl
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(step, loss.item().hex())
    print(sorted(torch._dynamo.utils.counters["stats"].items()), dict(torch._dynamo.utils.counters["graph_break"]))
"""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WATCH = ("-m", "healthcheck", "run", "--observe")


ABORTED = "terminate called without an active exception"
"""Said by a rank whose end torch's own threads abort now and then, over gloo, with or without us (see tests/unit/probes/test_sharded.py)."""


def output(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK") and k not in ("RANK", "WORLD_SIZE")}
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        result = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=folder,
            env={**clean, "HEALTHCHECK_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )
        if result.returncode == 0 or ABORTED not in result.stderr:
            break
    assert result.returncode == 0, result.stderr
    return result


def check_nothing_changed_and_nothing_said(folder: Path, path: Path, *, launch: tuple[str, ...] = ()) -> None:
    plain = output(folder / "plain", *launch, str(path))
    how = (*launch, "--no-python", sys.executable, *WATCH) if launch else WATCH
    watched = output(folder / "watched", *how, str(path))

    assert watched.stdout == plain.stdout
    assert plain.stdout.count("\n") > 5
    told = [line for line in watched.stderr.splitlines() if line.startswith(("WARN", "FAIL", "ERROR", "STOP"))]
    assert told == []
    assert "healthcheck: OK" in watched.stderr


@pytest.mark.distributed
def test_fsdp2_that_draws_and_then_reads_a_checkpoint(script: Callable[..., Path], tmp_path: Path) -> None:
    check_nothing_changed_and_nothing_said(tmp_path, script(SHARDED), launch=TORCHRUN)


def test_a_pretrained_model_of_transformers_with_a_new_head(script: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_nothing_changed_and_nothing_said(tmp_path, script(HUGGING_FACE))


def test_checkpoints_of_lightning(script: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    check_nothing_changed_and_nothing_said(tmp_path, script(LIGHTNING))


def test_a_compiled_model_that_draws_from_a_distribution(script: Callable[..., Path], tmp_path: Path) -> None:
    """Nor is a graph broken."""
    check_nothing_changed_and_nothing_said(tmp_path, script(COMPILED))
