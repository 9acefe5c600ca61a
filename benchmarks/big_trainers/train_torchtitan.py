"""torchtitan's own Trainer with its debug model of Llama 3, its optimizers, schedule and loop, on tokens made here.

One process, one device. ``--watched`` mixes healthcheck's adapter in; without it nothing here knows of healthcheck.
"""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from common import Script, batches
from torch.nn.attention.flex_attention import create_block_mask

script = Script("torchtitan")
# This version names two things that torch got after 2.11. The first is never made by the backend chosen below.
if not hasattr(fsdp, "DataParallelMeshDims"):
    fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[attr-defined]
    script.given("torch.distributed.fsdp.DataParallelMeshDims (an empty class)")
if not hasattr(torch.distributed, "set_timeout"):
    from torch.distributed import distributed_c10d

    torch.distributed.set_timeout = distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    script.given("torch.distributed.set_timeout (its older name)")

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common import attention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

# Its masks need an argument that torch got after 2.11, and flex attention has no backward pass on the processor.
PLAIN_ATTENTION = script.cpu or "separate_full_blocks" not in inspect.signature(create_block_mask).parameters
if script.cpu:  # what the package asks of an accelerator
    from types import SimpleNamespace

    from torchtitan.components import metrics

    for name, answer in {
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=1 << 30),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "current_device": 0,
        "set_device": None,
    }.items():
        setattr(metrics.device_module, name, lambda *given, answer=answer: answer)

ROWS, LENGTH, VOCABULARY = 4, 128, 2048


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, **given: Any) -> None:
        self.rows = batches(script.count + 1, rows=ROWS, length=LENGTH, vocabulary=VOCABULARY)

    def __iter__(self) -> Iterator[Any]:
        positions = torch.arange(LENGTH).expand(ROWS, -1)
        for row in self.rows:
            yield {"input": row[:, :-1], "positions": positions}, row[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **given: Any) -> None:
        super().__init__()

    def encode(self, *given: Any, **named: Any) -> list[int]:
        return []

    def decode(self, *given: Any, **named: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def configuration() -> Any:
    config = llama3_debugmodel()
    config.dataloader = Tokens.Config()
    config.tokenizer = NoTokenizer.Config()
    config.dump_folder = tempfile.mkdtemp()
    config.training = dataclasses.replace(
        config.training, local_batch_size=ROWS, seq_len=LENGTH, steps=script.count, disable_cuda_graphs=True
    )
    # The only backend that takes a torch without ``fully_shard(dp_mesh_dims=...)``.
    config.parallelism = dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor")
    config.validator = dataclasses.replace(config.validator, enable=False)
    config.checkpoint = dataclasses.replace(config.checkpoint, enable=False)
    if PLAIN_ATTENTION:
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return config


def made() -> Any:
    if not script.watched:
        return Trainer(configuration())
    from healthcheck.trainers.torchtitan import HealthCheckTrainer

    class Watched(HealthCheckTrainer, Trainer):  # type: ignore[misc]
        pass

    return Watched(configuration())


def main() -> None:
    trainer = made()
    logged = trainer.metrics_processor.log

    def log(step: int, loss: float, *given: Any, **named: Any) -> Any:
        script.loss(loss)
        return logged(step, loss, *given, **named)

    def poison(module: Any, inputs: Any, output: Any) -> Any:
        return output * float("nan") if script.poisons(trainer.step) else output

    trainer.metrics_processor.log = log
    if script.nan_at:
        trainer.model_parts[0].norm.register_forward_hook(poison)
    try:
        trainer.train()
    finally:
        if script.watched:
            script.judged(trainer.health)
        script.end(trainer.model_parts)
    trainer.close()


main()
torch.distributed.destroy_process_group()
raise SystemExit(script.exit_code)
