"""NeMo AutoModel's own recipe for language models: its setup, its step scheduler, its loop, on the package's mock data set.

One process, one device, a small Llama made from a config. ``--watched`` mixes healthcheck's adapter into the recipe.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from common import Script

script = Script("nemo-automodel")
if script.cpu:
    torch.cuda.current_device = lambda: 0  # it makes a device of the number

from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm import train_ft

Recipe = train_ft.TrainFinetuneRecipeForNextTokenPrediction
VOCABULARY = 256


SMALL_LLAMA = {
    "_target_": "transformers.LlamaConfig",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def configuration() -> Any:
    here = "nemo_automodel.components"
    return ConfigNode(
        {
            "seed": 0,
            "step_scheduler": {
                "global_batch_size": 8,
                "local_batch_size": 8,
                "ckpt_every_steps": 10_000,
                "max_steps": script.count,
                "num_epochs": 50,
            },
            "dist_env": {"backend": "gloo" if script.cpu else "nccl", "timeout_minutes": 1},
            "model": {
                "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
                "config": SMALL_LLAMA,
                "torch_dtype": "float32" if script.cpu else "bfloat16",
                "attn_implementation": "sdpa",
                "use_liger_kernel": False,
            },
            "checkpoint": {"enabled": False, "checkpoint_dir": tempfile.mkdtemp()},
            "distributed": {"strategy": "ddp" if script.cpu else "fsdp2"},
            "loss_fn": {"_target_": f"{here}.loss.masked_ce.MaskedCrossEntropy"},
            "dataset": {
                "_target_": f"{here}.datasets.llm.mock.build_unpacked_dataset",
                "num_sentences": 64,
                "vocab_size": VOCABULARY,
                "max_sentence_len": 32,
                "tokenizer": None,
            },
            "packed_sequence": {"packed_sequence_size": 0},
            "dataloader": {
                "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
                "collate_fn": f"{here}.datasets.utils.default_collater",
                "shuffle": False,
            },
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        }
    )


def main() -> None:
    kind = Recipe
    if script.watched:
        from healthcheck.trainers.automodel import HealthCheckRecipe

        class Watched(HealthCheckRecipe, Recipe):  # type: ignore[misc, valid-type]
            pass

        kind = Watched
    recipe: Any = kind(configuration())
    recipe.setup()
    stepped = recipe._run_train_optim_step

    def step(*given: Any, **named: Any) -> Any:
        sample = stepped(*given, **named)
        script.loss(sample.metrics["loss"])
        return sample

    def poison(module: Any, inputs: Any, output: Any) -> Any:
        if script.poisons(recipe.step_scheduler.step + 1):
            output.logits = output.logits * float("nan")
        return output

    recipe._run_train_optim_step = step
    if script.nan_at:
        recipe.model_parts[0].register_forward_hook(poison)
    try:
        recipe.run_train_validation_loop()
    finally:
        if script.watched:
            script.judged(recipe.health)
        script.end(recipe.model_parts)


main()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
raise SystemExit(script.exit_code)
