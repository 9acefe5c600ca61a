"""Two ranks train a model under FSDP2 on the processor, with and without prefetching. Run by test_fsdp.py.

torchrun ... fsdp_ranks.py OUT.json PREFETCH [changing]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import healthcheck
from healthcheck_performance import FSDPPrefetch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.inner(x))


class Net(nn.Module):
    """Runs its blocks in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.middle, self.last = Block(), Block(), Block(), Block()
        self.order = ["early", "middle", "late", "last"]

    def forward(self, x: Any) -> Any:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def main() -> None:
    dist.init_process_group("gloo")
    found = {
        "plain": train(0),
        "ahead": train(2),
        "changing": train(1, changing=True),
        "unsharded": train(1, unshard=True),
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def train(prefetch: int, *, changing: bool = False, unshard: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    for name in ("late", "early", "middle", "last"):
        fully_shard(getattr(model, name))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tool = FSDPPrefetch(prefetch or 1, display=True, unshard_on_step=unshard) if prefetch else None
    notes: list[str] = []
    seen: dict[str, Any] = {}
    rules = {"version": 1, "rules": {"r": {"metric": "loss", "when": {"above": 1e9}}}}
    callbacks = [tool] if tool is not None else []
    with healthcheck.watch(model, optimizer, rules=rules, record=False, console=False, callbacks=callbacks) as health:
        health.session.add_report(SimpleNamespace(name="notes", note=notes.append))
        torch.manual_seed(1 + dist.get_rank())
        early = count_unshards(model)
        batches = iter([torch.randn(4, 16) for _ in range(12)])
        for step in range(6):
            if changing and step == 4:
                model.order = ["middle", "early", "late", "last"]
            for _ in range(2):  # two micro-batches
                if unshard:
                    tool.gather()
                loss = model(next(batches)).pow(2).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            health.step(loss=loss)
            if tool is not None and step == 2:
                states = {name: module._get_fsdp_state() for module, name in tool.names.items()}
                names = {state: name for name, state in states.items()}
                for kind in ("forward", "backward"):
                    seen[kind] = {
                        name: [names[other] for other in getattr(state, f"_states_to_{kind}_prefetch")]
                        for name, state in states.items()
                    }
    left = {}
    if tool is not None:
        left = {name: len(module._get_fsdp_state()._states_to_forward_prefetch) for module, name in tool.names.items()}
    weights = [p.full_tensor().flatten().tolist() for p in model.parameters()]
    content = {"weights": weights, "seen": seen, "left": left, "notes": notes, "changed": tool.changed if tool else 0}
    content["findings"] = (health.report or {}).get("performance", {}).get("findings", {})
    content["early"] = early[0]
    content["hooks"] = sum(len(m._forward_pre_hooks) for m in model.modules())
    return content


def count_unshards(model: Any) -> list[int]:
    """How often somebody asks the root to be gathered, beside FSDP2 itself."""
    count, original = [0], model.unshard

    def unshard(*given: Any, **named: Any) -> Any:
        count[0] += 1
        return original(*given, **named)

    model.unshard = unshard
    return count


if __name__ == "__main__":
    main()
