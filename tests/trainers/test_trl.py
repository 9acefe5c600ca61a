"""SFT, DPO and GRPO of TRL, as they are: tiny models, a tokenizer made here, no hub."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from healthcheck.trainers.huggingface import HealthCheckCallback

pytestmark = [pytest.mark.slow, pytest.mark.framework("trl"), pytest.mark.filterwarnings("ignore")]

STEPS = 6
ROWS = 32
OPTIONS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def words() -> Any:
    known = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(60))])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=63, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def sft(folder: str, callbacks: list[Any]) -> Any:
    data = Dataset.from_dict({"text": ["w1 w2 w3 w4 w5"] * ROWS})
    args = SFTConfig(output_dir=folder, max_length=16, **OPTIONS)
    return SFTTrainer(tiny(), args=args, train_dataset=data, processing_class=words(), callbacks=callbacks)


def dpo(folder: str, callbacks: list[Any]) -> Any:
    data = Dataset.from_dict({"prompt": ["w1 w2"] * ROWS, "chosen": [" w3 w4"] * ROWS, "rejected": [" w5 w6"] * ROWS})
    args = DPOConfig(output_dir=folder, max_length=16, **OPTIONS)
    return DPOTrainer(
        tiny(), ref_model=tiny(1), args=args, train_dataset=data, processing_class=words(), callbacks=callbacks
    )


def variety(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many different words."""
    return [float(len(set(text.split()))) for text in completions]


def grpo(folder: str, callbacks: list[Any]) -> Any:
    data = Dataset.from_dict({"prompt": ["w1 w2"] * ROWS})
    args = GRPOConfig(output_dir=folder, num_generations=2, max_completion_length=6, **OPTIONS)
    return GRPOTrainer(
        tiny(), reward_funcs=variety, args=args, train_dataset=data, processing_class=words(), callbacks=callbacks
    )


Make = Callable[[str, list[Any]], Any]
each = pytest.mark.parametrize("make", [sft, dpo, grpo], ids=lambda make: make.__name__)


def weights(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def watcher() -> HealthCheckCallback:
    return HealthCheckCallback(console=False, record=False)


@each
def test_a_watched_run_is_the_plain_one_to_the_bit(make: Make, tmp_path: Path) -> None:
    ended = []
    for callbacks in ([], [watcher()]):
        set_seed(0)
        trainer = make(str(tmp_path), callbacks)
        trainer.train()
        ended.append((weights(trainer), losses(trainer)))

    (plain, plain_losses), (watched, watched_losses) = ended
    assert len(plain_losses) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert plain_losses == watched_losses


@each
def test_a_nan_is_caught_in_its_step_and_the_update_is_kept_out(make: Make, tmp_path: Path) -> None:
    callback = watcher()
    trainer = make(str(tmp_path), [callback])
    spoil(trainer, step=4)

    trainer.train()

    assert ("loss-not-finite", 4) in [(alert.rule, alert.fired_step) for alert in callback.alerts]
    assert trainer.state.global_step == 4
    assert callback.exit_code == 1
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


@pytest.mark.parametrize("make", [sft, dpo], ids=lambda make: make.__name__)
def test_without_us_the_weights_are_lost_and_the_log_shows_no_nan(make: Make, tmp_path: Path) -> None:
    """GRPO cannot go on: it draws its next completions from the lost weights, and raises there."""
    trainer = make(str(tmp_path), [])
    spoil(trainer, step=4)

    trainer.train()

    assert not all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    assert all(math.isfinite(loss) for loss in losses(trainer))


def spoil(trainer: Any, step: int) -> None:
    """The loss of one step is NaN."""
    original, calls = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        given = original(*args, **kwargs)
        calls.append(1)
        if len(calls) != step:
            return given
        return (given[0] * math.nan, *given[1:]) if isinstance(given, tuple) else given * math.nan

    trainer.compute_loss = compute_loss
