"""The training that ``rank_faults.py`` runs on every rank: one of its kinds, as ``PLAN`` says."""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

plan = json.loads(os.environ["PLAN"])
kind, at, bad = plan["kind"], plan["at"], plan["rank"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine = rank == bad
torch.manual_seed(plan["seed"] + (rank if kind == "other start" else 0))

layers = [nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()]
if kind == "batchnorm":
    layers += [nn.BatchNorm1d(24), nn.Dropout(0.2)]
model = nn.Sequential(*layers, nn.Linear(24, 4))
if kind == "unused":
    model[0].spare = nn.Parameter(torch.ones(3))
if kind == "frozen":
    model[0].requires_grad_(False)

wrapped = model
if kind in ("fsdp2", "hsdp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        if kind == "hsdp"
        else init_device_mesh("cpu", (world,))
    )
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
elif kind not in ("local sgd", "slow collective", "alternating"):
    wrapped = DDP(model, find_unused_parameters=kind == "unused", init_sync=kind != "other start")
if kind == "replaced":
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    wrapped.double()
    wrapped.float()
if kind == "hook sgd":
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post

    state = post.PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=10)
    wrapped.register_comm_hook(state, post.post_localSGD_hook)
if kind == "compressed":
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped.register_comm_hook(None, fp16_compress_hook)

trained = [p for p in model.parameters() if p.requires_grad]
if kind == "two models":
    other = DDP(nn.Linear(12, 4))
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
rate = 0.01 if plan["optimizer"] == "adam" else 0.05
if kind == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(trained, optimizer_class=torch.optim.Adam, lr=rate)
elif plan["optimizer"] == "adam":
    betas = (0.9, 0.95 if kind == "other settings" and mine else 0.999)
    optimizer = torch.optim.Adam(trained, lr=rate, betas=betas)
else:
    momentum = 0.8 if kind == "other settings" and mine else 0.9
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=momentum)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.8) if kind in ("clipping", "lr") else None

seeded = plan["seed"] * 1000 + (0 if kind == "equal batches" else rank)
draw = torch.Generator().manual_seed(seeded)
target = torch.randn(12, 4, generator=torch.Generator().manual_seed(9))
torch.manual_seed(seeded)


def batch():
    x = torch.randn(16, 12, generator=draw)
    return x, torch.tanh(x @ target)


def batches():
    if kind != "equal loader":
        while True:
            yield batch()
    rows = torch.randn(256, 12, generator=torch.Generator().manual_seed(plan["seed"]))
    data = torch.utils.data.TensorDataset(rows, torch.tanh(rows @ target))
    while True:
        order = torch.Generator().manual_seed(plan["seed"])
        yield from torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=order)


def loss_of(network, given):
    return (network(given[0]) - given[1]).square().mean()


def averaged():
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= world


def train_step(step, given):
    global wrapped
    network = wrapped
    if kind == "bypassed":
        network = model
    if kind == "alternating":
        network = model if step % 2 else DDP(model)
    optimizer.zero_grad()
    if kind == "accumulation" or kind == "no_sync sgd":
        with wrapped.no_sync():
            loss_of(network, given).backward()
    if kind != "no_sync sgd":
        loss = loss_of(network, given)
        if slow("forward", step):
            time.sleep(0.3 * PACE)
        loss.backward()
    if kind == "slow collective":
        if slow("collective", step):
            time.sleep(0.3 * PACE)
        for p in trained:
            dist.all_reduce(p.grad)
            p.grad /= world
    if kind == "clipping":
        nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    if scheduler is not None and not (kind == "lr" and mine and step > at):
        scheduler.step()
    if kind == "two models":
        other_optimizer.zero_grad()
        loss_of(other, given).backward()
        other_optimizer.step()
    if kind == "augmented" and step % 10 == 0:
        with torch.no_grad():  # weights are clamped, on every rank alike
            for p in trained:
                p.clamp_(-2, 2)
    if kind in ("local sgd", "no_sync sgd") and step % 20 == 0:
        averaged()


PACE = 0.2
slow_phase = kind.removeprefix("slow ") if kind.startswith("slow ") else ""


def slow(phase, step):
    return mine and slow_phase == phase and step >= 8


def harm(step):
    weight = model[2].weight
    if step != at or not mine:
        return
    if kind == "drift":
        with torch.no_grad():
            weight.add_(torch.randn_like(weight) * 1e-2)
    elif kind == "hidden drift":
        weight.data.add_(torch.randn_like(weight) * 1e-2)
    elif kind == "bit flip":
        flat = weight.data.view(torch.int32).view(-1)
        flat[plan["seed"] % flat.numel()] ^= 1 << 21
    elif kind == "state":
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(1.5)


def evaluate():
    model.eval()
    with torch.no_grad():
        loss_of(wrapped, batch())
    model.train()


steps = plan["steps"]
if kind == "uneven":
    counts = [steps - 3 * r for r in range(world)]
    steps = min(counts)
if kind == "join":
    steps -= 5 * rank
given = batches()
if kind == "join":
    from torch.distributed.algorithms.join import Join

    with Join([wrapped]):
        for step in range(1, steps + 1):
            train_step(step, next(given))
else:
    for step in range(1, steps + 1):
        if slow_phase:
            time.sleep(PACE + (0.3 * PACE if slow("data", step) else 0))
        train_step(step, next(given))
        harm(step)
        if kind == "evaluation" and step % 25 == 0:
            evaluate()
dist.barrier()
dist.destroy_process_group()
