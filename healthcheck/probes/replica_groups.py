"""Who holds copies of what: ranks with a model that ``DistributedDataParallel`` wraps, or that a device mesh replicates."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import ModelView
from healthcheck.core.runinfo import RunFacts
from healthcheck.device.living import live_objects
from healthcheck.device.tensors import local_part

_NOT_DATA_PARALLEL = ("tp", "cp", "pp", "sp", "ep", "tensor", "context", "pipe", "seq", "expert", "model")
"""Parts of the names of mesh dimensions whose ranks are given the same batch, or parts of one."""


@dataclass(slots=True)
class Copies:
    """The parameters of which other ranks hold copies."""

    names: list[str]
    params: list[Any]
    group: tuple[int, ...]
    """Ranks that hold copies; empty where every rank holds a part of its own."""
    data_group: tuple[int, ...]
    """Ranks that are given different batches."""
    layout: int
    wrapped: int = 1
    elements: int = 0


def copies_of(run: RunFacts, model: ModelView, optimizer: Any) -> Copies | None:
    replicas = run.replicas
    for _, module in model.named_modules():
        if _wraps(module):
            _note(replicas, module)
    if not replicas.searched and not replicas.modules():
        replicas.searched = True
        for module in live_objects("Module"):
            if _wraps(module):
                _note(replicas, module)
    known = {id(p): name for name, p in model.named_parameters()}
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    trained = {id(p) for p in owned}
    by_group: dict[tuple[int, ...], dict[int, tuple[str, Any]]] = {}
    times = 1
    for module, ranks, count in replicas.modules():
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        mine = {id(p): (known.get(id(p), name), p) for name, p in module.named_parameters() if name not in ignored}
        if len(ranks) > 1 and not trained.isdisjoint(mine):
            by_group.setdefault(ranks, {}).update(mine)
            times = max(times, count)
    if by_group:
        ranks, found = max(by_group.items(), key=lambda item: len(item[1]))
        return _made(list(found.values()), ranks, ranks, times)
    return _sharded([(known.get(id(p), f"param{n}"), p) for n, p in enumerate(owned)])


def _made(
    named: Sequence[tuple[str, Any]], group: tuple[int, ...], data_group: tuple[int, ...], times: int = 1
) -> Copies:
    names, params = [name for name, _ in named], [p for _, p in named]
    shapes = "|".join(f"{name}{tuple(p.shape)}{p.dtype}" for name, p in named)
    elements = sum(int(local_part(p).numel()) for p in params)
    return Copies(names, params, group, data_group, zlib.crc32(shapes.encode()), times, elements)


def _sharded(named: Sequence[tuple[str, Any]]) -> Copies | None:
    """Parameters spread over a device mesh: copies are along the dimensions in which all of them are replicated."""
    meshes = {id(mesh): mesh for _, p in named if (mesh := getattr(p, "device_mesh", None)) is not None}
    if len(meshes) != 1 or not all(hasattr(p, "placements") for _, p in named):
        return None
    mesh = next(iter(meshes.values()))
    names = [str(name).lower() for name in (mesh.mesh_dim_names or ())]
    places = [p.placements for _, p in named]
    copied = [d for d in range(mesh.ndim) if all(place[d].is_replicate() for place in places)]
    where = mesh.get_coordinate()
    if where is None:
        return None
    ranks = mesh.mesh
    for d in range(mesh.ndim):
        if d not in copied:
            ranks = ranks.select(d - (mesh.ndim - ranks.dim()), where[d])
    group = tuple(map(int, ranks.flatten().tolist())) if copied else ()
    # Data parallel for certain: one dimension of shards, with or without one of copies beside it, by whatever name.
    plain = not any(part in name.split("_") or name == part for name in names for part in _NOT_DATA_PARALLEL)
    sharded = any(not place[d].is_replicate() for place in places for d in range(mesh.ndim))
    by_fsdp = plain and sharded and mesh.ndim - len(copied) == 1
    everyone = tuple(map(int, mesh.mesh.flatten().tolist()))
    return _made(named, group if len(group) > 1 and sharded else (), everyone if by_fsdp and len(everyone) > 1 else ())


def _wraps(module: Any) -> bool:
    """Whether this is DDP over several ranks. By name: a run on one rank need not import ``torch.distributed``."""
    if not any(cls.__name__ == "DistributedDataParallel" for cls in type(module).__mro__):
        return False
    group = getattr(module, "process_group", None)
    return group is not None and hasattr(module, "module") and group.size() > 1


def _note(replicas: Any, wrapper: Any) -> None:
    import torch.distributed as dist

    replicas.note(wrapper, dist.get_process_group_ranks(wrapper.process_group))


def averages(run: RunFacts, copies: Copies) -> bool:
    """Whether gradients of this update should be the same on all ranks: not within ``no_sync()``, nor with a hook that leaves
    the averaging to somebody else."""
    mine = set(map(id, copies.params))
    for wrapper in run.replicas.wrappers():
        if mine.isdisjoint(map(id, wrapper.module.parameters())):
            continue
        if not getattr(wrapper, "require_forward_param_sync", True):
            return False
        for hook, _ in getattr(wrapper, "_comm_hooks", ()):
            module = str(getattr(hook, "__module__", ""))
            if not module.startswith("torch.distributed.algorithms.ddp_comm_hooks") or "post_localSGD" in module:
                return False
    return True


def state_of(optimizer: Any, copies: Copies) -> tuple[list[Any], int]:
    """Tensors of the optimizer's state for these parameters, and a mark of which they are."""
    import torch

    found, names = [], []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in zip(copies.names, copies.params, strict=True):
        if id(parameter) not in held:
            continue
        state = optimizer.state.get(parameter)
        for key in sorted(state or (), key=str):
            value = state[key]
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                found.append(value)
                names.append(f"{name}.{key}{tuple(value.shape)}")
    return found, zlib.crc32("|".join(names).encode())
