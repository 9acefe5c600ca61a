"""A plain loop round Megatron-Core: its GPT model, its data-parallel wrapper, its optimizer, its schedule.

One process, one device, no transformer_engine and no apex: the local layers of the package. Nothing here knows of healthcheck.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from common import Script, batches

script = Script("megatron-core")
ROWS, LENGTH, VOCABULARY = 4, 64, 256

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig


def build() -> Any:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        ffn_hidden_size=512,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32 if script.cpu else torch.bfloat16,
        bf16=not script.cpu,
        params_dtype=torch.float32 if script.cpu else torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    ).to(script.device)
    if not script.cpu:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    overlap = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    model = DistributedDataParallel(config, overlap, model)
    config.finalize_model_grads_func = finalize_model_grads
    return config, model


def main() -> None:
    torch.distributed.init_process_group("gloo" if script.cpu else "nccl", world_size=1, rank=0)
    if not script.cpu:
        torch.cuda.set_device(script.device)
    parallel_state.initialize_model_parallel(1, 1)
    if script.cpu:  # its generator lives on the accelerator; without dropout nothing draws from it
        tensor_parallel.get_cuda_rng_tracker().fork = lambda *given, **named: nullcontext()
    else:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    config, model = build()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-4,
            weight_decay=0.01,
            clip_grad=0.0 if script.cpu else 1.0,  # clipping insists on CUDA tensors
            bf16=not script.cpu,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=False,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    run = get_forward_backward_func()
    positions = torch.arange(LENGTH, device=script.device).expand(ROWS, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=script.device).triu(1)
    ones = torch.ones(ROWS, LENGTH, device=script.device)
    now = 0

    def averaged(weights: Any, output: Any) -> Any:
        loss = (output.float() * weights).sum() / weights.sum()
        if script.poisons(now):
            loss = loss * float("nan")
        return loss, {"loss": loss.detach()}

    def forward(data: Any, gpt: Any) -> Any:
        tokens = next(data).to(script.device)
        output = gpt(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
        return output, partial(averaged, ones)

    micro_batches = 2
    data = iter(batches(script.count * micro_batches, rows=ROWS, length=LENGTH, vocabulary=VOCABULARY))
    try:
        for step in range(1, script.count + 1):
            now = step
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses = run(
                forward_step_func=forward,
                data_iterator=data,
                model=[model],
                num_microbatches=micro_batches,
                seq_length=LENGTH,
                micro_batch_size=ROWS,
                forward_only=False,
            )
            optimizer.step()
            script.loss(sum(part["loss"] for part in losses) / len(losses))
    finally:
        script.end([model])


main()
torch.distributed.destroy_process_group()
