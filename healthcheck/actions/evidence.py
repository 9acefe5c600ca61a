"""Keep what a person needs to understand an alert, and nothing that is none of our business."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from healthcheck.core.alerts import ActionOutcome, Alert, alert_json
from healthcheck.core.digest import sha256
from healthcheck.core.events import ModelView
from healthcheck.core.protocols import ActionContext
from healthcheck.core.redact import allowed_environment, redact_argv
from healthcheck.core.text import encode_number, size_text
from healthcheck.device.tensors import host_bytes
from healthcheck.extend.guard import describe

_DISTRIBUTIONS = (
    "torch-healthcheck",
    "torch",
    "numpy",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "datasets",
)


def environment() -> dict[str, Any]:
    """An allow-list. Nothing else of ``os.environ`` is read, and secrets in argv are replaced."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "distributions": _versions(),
        "devices": _devices(),
        "driver": _driver(),
        "variables": allowed_environment(os.environ),
        "argv": redact_argv(sys.argv),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _devices() -> list[str]:
    """Names of the cards that this process has in use; a run on the CPU starts no driver for this."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return [f"cpu, {torch.get_num_threads()} threads"]
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def rng_states() -> dict[str, Any]:
    """States of all generators that a script usually draws from. Reading them draws nothing.

    torch states are bytes in hexadecimal: ``torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)``.
    """
    import torch

    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch_cpu": _hex(torch.random.get_rng_state()),
        "python": {"version": version, "state": list(internal), "gauss_next": gauss},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch_cuda"] = [_hex(state) for state in torch.cuda.get_rng_state_all()]
    numpy = sys.modules.get("numpy")  # not imported by the script: nothing was drawn from it
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = {
            "kind": str(kind),
            "keys": [int(key) for key in keys],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        }
    return states


def _hex(state: Any) -> str:
    return bytes(state.cpu().tolist()).hex()


# --------------------------------------------------------------------------------------------------
# The text that goes with a bundle: what is in it, how to read it, what to try.


_CONTENTS = """
Contents of the batch: batch/index.json names file, shape and dtype of each tensor.
    import json, torch
    entry = json.load(open("batch/index.json"))[0]
    dtype = getattr(torch, entry["dtype"])      # bool was written as uint8
    tensor = torch.frombuffer(bytearray(open(entry["file"], "rb").read()), dtype=dtype).reshape(entry["shape"])
"""


def readme(alert: Alert, context: ActionContext, files: Mapping[str, str], left_out: Sequence[str]) -> str:
    """Plain text for the person who opens the folder, perhaps on a machine without torch."""
    lines = [
        f"Evidence of alert {alert.number}: {alert.rule}",
        "",
        f"{alert.message}" if alert.message else f"{alert.rule} fired",
        f"Fired at step {alert.fired_step:,}, seen at step {alert.detected_step:,}, rank {alert.rank}.",
    ]
    if context.step != alert.fired_step:
        lines.append(
            f"Weights and gradients were read at step {context.step:,}: those of step {alert.fired_step:,} are gone."
        )
    elif context.before_update:
        lines.append("Weights and gradients were read before the update of that step.")
    elif context.event is not None:
        lines.append("Weights and gradients were read after the update of that step, unless it was skipped.")
    for name, value in alert.facts.items():
        lines.append(f"{name}: {value}")
    if alert.hint:
        lines += ["", f"To try: {alert.hint}"]
    lines += ["", "Files", *(f"  {name:<18} {what}" for name, what in files.items() if not name.startswith("batch/"))]
    if any(name.startswith("batch/") for name in files):
        lines.append(_CONTENTS.rstrip())
    if left_out:
        lines += ["", "Not here", *(f"  {entry}" for entry in left_out)]
    lines += [
        "",
        "Norms are L2 norms over the finite elements, nan where there are none. RNG states belong to the moment of the alert, after the batch was",
        "drawn. Nothing here needs unpickling; the environment is an allow-list and secrets in the command line are replaced.",
        "",
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# The values before an alert as one table: a row per step, a column per series.


MAX_COLUMNS = 512


def series_rows(alert: Alert, context: ActionContext, steps: int) -> str | None:
    """CSV text with the last ``steps`` values of each series, or None if there are no values."""
    columns: dict[str, dict[int, float]] = {}
    for name in _names(alert, context):
        values = context.history(name, steps)
        if values:
            columns[name] = dict(values)
        if len(columns) == MAX_COLUMNS:
            break
    if not columns:
        return None
    wanted = sorted({step for values in columns.values() for step in values})
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["step", *columns])
    for step in wanted:
        # None is an empty cell, and a float is written so that it can be read back exactly.
        table.writerow([step, *[values.get(step) for values in columns.values()]])
    return out.getvalue()


def _names(alert: Alert, context: ActionContext) -> list[str]:
    """The alert's own series first, so that the column limit never cuts them off."""
    return list(dict.fromkeys([*(fact.name for fact in alert.series), *context.series()]))


# --------------------------------------------------------------------------------------------------
# Keep what a person needs to understand an alert, and nothing that is none of our business.


MAX_BUNDLES = 5
MAX_BYTES = 200 * 2**20
"""Per run, all bundles together."""

DEFAULT_STEPS = 100


class Evidence:
    """Write a folder ``alerts/001`` with the series before the alert, a parameter table, the batch's
    shape and statistics, RNG states and the environment. Every file loads without unpickling.

    Reads parameters and the batch, so it waits for the device: it runs only when a rule fires. At
    most 5 bundles and 200 MiB a run; folders 0700, files 0600. The batch's contents are written
    only with ``batch: full``.
    """

    name = "evidence"
    stage = "observe"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "batch": {
                "enum": ["statistics", "full", "none"],
                "description": "statistics (default): shapes, ranges, hash. full: the contents as well. none: nothing.",
            },
            "steps": {
                "type": "integer",
                "minimum": 1,
                "description": f"Values kept per series (default {DEFAULT_STEPS}).",
            },
        },
        "additionalProperties": False,
    }

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        if context.run_dir is None:
            return ActionOutcome.nothing_done(self.name, "this run keeps no record")
        root = context.run_dir / "alerts"
        try:
            used, bundles = _used(root)
            if bundles >= MAX_BUNDLES:
                return ActionOutcome.nothing_done(self.name, f"this run has {bundles} bundles already")
            if used >= MAX_BYTES:
                return ActionOutcome.nothing_done(self.name, f"this run has {size_text(used)} of it already")
            folder = _new_folder(root, alert)
        except OSError as error:
            return ActionOutcome.nothing_done(self.name, f"{error.strerror or error} ({root})")
        bundle = _Bundle(folder, MAX_BYTES - used)
        try:
            _fill(bundle, alert, context)
        except OSError as error:
            if not any(folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)
            return ActionOutcome.nothing_done(self.name, f"incomplete: {error.strerror or error} ({folder})")
        return ActionOutcome.of(
            self.name, f"evidence: {folder}", path=str(folder), bytes=bundle.written, left_out=bundle.left_out
        )


class _Bundle:
    """One folder being written, with its budget and what did not fit or could not be read."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.budget = budget
        self.written = 0
        self.files: dict[str, str] = {}
        """File name -> what it holds, for the README."""
        self.left_out: list[str] = []

    def add(self, name: str, what: str, make: Callable[[], str | bytes | None]) -> None:
        """Write one file; a part that fails is named in the README and costs the others nothing."""
        try:
            content = make()
        except OSError:
            raise
        except Exception as error:
            self.left_out.append(f"{name}: {describe(error)}")
            return
        if content is None:
            return
        data = content.encode() if isinstance(content, str) else content
        if self.written + len(data) > self.budget:
            self.left_out.append(f"{name}: {size_text(len(data))} would pass the {size_text(MAX_BYTES)} of a run")
            return
        path = self.folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        self.written += len(data)
        self.files[name] = what


def _fill(bundle: _Bundle, alert: Alert, context: ActionContext) -> None:
    steps = int(context.options.get("steps", DEFAULT_STEPS))
    event = context.event
    bundle.add("alert.json", "the alert as in report.json", lambda: _json(alert_json(alert)))
    bundle.add("series.csv", f"the last {steps} values of every series", lambda: series_rows(alert, context, steps))
    if event is not None and event.model is not None:
        model = event.model
        bundle.add("parameters.csv", "norm and non-finite count per parameter", lambda: parameter_rows(model))
    else:
        bundle.left_out.append("parameters.csv: the model is not known where this alert was raised")
    wanted = context.options.get("batch", "statistics")
    # Several short steps are judged together: what belonged to an earlier one is gone, and nothing stands in for it.
    late = context.step != alert.fired_step
    gone = f"that of step {alert.fired_step:,} is gone: it was judged during step {context.step:,}"
    if late:
        if wanted != "none":
            bundle.left_out.append(f"batch.json: {gone}")
    elif event is None or event.batch is None:
        bundle.left_out.append("batch.json: this trainer did not show its batch at this point")
    elif wanted != "none":
        batch = event.batch
        bundle.add("batch.json", "shapes, dtypes, ranges and hashes of the batch", lambda: _json(describe_batch(batch)))
        if wanted == "full":
            write_contents(batch, bundle.add)
    if late:
        bundle.left_out.append(f"rng.json: {gone}")
    else:
        bundle.add("rng.json", "states of the random number generators, in hexadecimal", lambda: _json(rng_states()))
    bundle.add(
        "environment.json", "versions, cards and launcher variables (an allow-list)", lambda: _json(environment())
    )
    bundle.add("README", "this text", lambda: readme(alert, context, bundle.files, bundle.left_out))


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"


def _used(root: Path) -> tuple[int, int]:
    """``(bytes, bundles)`` that this run has written so far."""
    if not root.is_dir():
        return 0, 0
    folders = [p for p in root.iterdir() if p.is_dir()]
    return sum(p.stat().st_size for f in folders for p in f.rglob("*") if p.is_file()), len(folders)


def _new_folder(root: Path, alert: Alert) -> Path:
    """``alerts/001`` for alert number 1, ``001-rank3`` on another rank, ``001-2`` for a repetition."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    stem = f"{alert.number:03d}" + (f"-rank{alert.rank}" if alert.rank else "")
    for attempt in range(1, 1000):
        folder = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(17, "a thousand bundles of this alert", str(root))


# --------------------------------------------------------------------------------------------------
# Tensors in numbers: a batch, the parameters and their gradients.


MAX_LEAVES = 64
MAX_IDS = 256
HASHED_BYTES = 64 * 2**20

_ID_NAMES = frozenset({
    "id", "ids", "index", "indices", "idx", "sample_id", "sample_ids", "example_id", "example_ids", "uid", "uids", "guid", "guids",
})  # fmt: skip


def describe_batch(batch: Any) -> dict[str, Any]:
    """One entry per tensor or value of the batch, plus ``sample_ids`` where the loader gives them."""
    described: dict[str, Any] = {"leaves": []}
    ids: dict[str, Any] = {}
    for count, (path, leaf) in enumerate(_leaves(batch)):
        if count == MAX_LEAVES:
            described["more"] = f"only the first {MAX_LEAVES} are described"
            break
        described["leaves"].append({"path": path, **_describe(leaf)})
        name = path.rsplit(".", 1)[-1].split("[")[0].lower()
        if name in _ID_NAMES:
            ids[path] = _ids(leaf)
    found = {path: value for path, value in ids.items() if value is not None}
    if found:
        described["sample_ids"] = found
    return described


def write_contents(batch: Any, add: Callable[[str, str, Callable[[], str | bytes | None]], None]) -> None:
    """Raw little-endian bytes per tensor, with a list of shapes and dtypes: loads without unpickling."""
    index: list[dict[str, Any]] = []
    for number, (path, leaf) in enumerate(_leaves(batch)):
        if number == MAX_LEAVES:
            break
        entry: dict[str, Any] = {"path": path}
        if _is_tensor(leaf):
            name = f"batch/{number:03d}.bin"
            entry |= {"file": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
            add(name, f"contents of {path or 'the batch'}", lambda leaf=leaf: _bytes(leaf))  # type: ignore[misc]
        elif isinstance(leaf, float):
            entry["value"] = encode_number(leaf)
        else:
            entry["value"] = leaf if isinstance(leaf, (str, int, bool)) or leaf is None else str(leaf)
        index.append(entry)
    add("batch/index.json", "which file holds what", lambda: json.dumps(index, indent=1) + "\n")


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values inside nested mappings, sequences and dataclasses, with their path."""
    if depth > 8:
        yield path, f"<nested deeper than 8: {type(value).__name__}>"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]", depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}" if path else field.name, depth + 1)
    else:
        yield path, value


def _is_plain(value: list[Any] | tuple[Any, ...]) -> bool:
    """A list of numbers or strings is one leaf, not hundreds."""
    return len(value) > 0 and all(isinstance(item, (str, int, float, bool)) for item in value)


def _is_tensor(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)


def _describe(leaf: Any) -> dict[str, Any]:
    if _is_tensor(leaf):
        return _describe_tensor(leaf)
    if isinstance(leaf, (bool, int, float)):
        return {"type": type(leaf).__name__}
    if isinstance(leaf, (str, bytes)):
        data = leaf.encode() if isinstance(leaf, str) else leaf
        return {"type": type(leaf).__name__, "length": len(leaf), "sha256": sha256(data).hexdigest()}
    if isinstance(leaf, (list, tuple)):
        text = json.dumps(list(leaf), default=str)
        return {"type": f"{type(leaf).__name__} of {type(leaf[0]).__name__ if leaf else 'nothing'}", "length": len(leaf),
                "sha256": sha256(text.encode()).hexdigest()}  # fmt: skip
    return {"type": type(leaf).__name__}


def _describe_tensor(tensor: Any) -> dict[str, Any]:
    import torch

    entry: dict[str, Any] = {
        "type": "tensor",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    with torch.no_grad():
        tensor = tensor.detach()
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
            entry["shard"] = "local"
        if tensor.layout is not torch.strided:
            return {**entry, "layout": str(tensor.layout)}
        if tensor.numel() and not tensor.is_complex():
            finite = torch.isfinite(tensor)
            entry["nonfinite"] = int((~finite).sum())
            values = tensor[finite].to(torch.float64 if tensor.device.type == "cpu" else torch.float32)
            if values.numel():
                low, high = torch.aminmax(values)
                entry |= {"min": float(low), "max": float(high), "mean": encode_number(float(values.mean()))}
        data = _bytes(tensor, HASHED_BYTES)
        entry["sha256"] = sha256(data).hexdigest()
        if tensor.numel() * tensor.element_size() > HASHED_BYTES:
            entry["sha256_of"] = f"the first {HASHED_BYTES:,} bytes"
    return entry


def _bytes(tensor: Any, limit: int | None = None) -> bytes:
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if limit is not None:
        flat = flat[: max(1, limit // max(1, flat.element_size()))]
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    return host_bytes(flat.cpu())


def _ids(leaf: Any) -> list[Any] | None:
    """Identifiers as the loader gave them, if that is what they are: whole numbers or strings."""
    if _is_tensor(leaf):
        if leaf.is_floating_point() or leaf.is_complex():
            return None
        return list(leaf.detach().reshape(-1)[:MAX_IDS].tolist())
    if isinstance(leaf, (list, tuple)):
        return [item if isinstance(item, int) else str(item)[:200] for item in leaf[:MAX_IDS]]
    return [leaf] if isinstance(leaf, (int, str)) else None


# --------------------------------------------------------------------------------------------------
# Norm and non-finite count of every parameter and its gradient.
#
# Reads in chunks: per parameter a handful of device kernels, per chunk one read. Under FSDP the
# numbers are of the local shard, since a full norm would need the other ranks.


MAX_ROWS = 20_000
_CHUNK = 256

_HEADER = (
    "name",
    "shape",
    "dtype",
    "trainable",
    "weight_norm",
    "weight_nonfinite",
    "grad_norm",
    "grad_nonfinite",
    "shard",
)


def parameter_rows(model: ModelView) -> str:
    """CSV text. Norms are L2 over the finite elements, so that one NaN does not hide the rest."""
    named = list(model.named_parameters())
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(_HEADER)
    for start in range(0, min(len(named), MAX_ROWS), _CHUNK):
        table.writerows(_rows(named[start : start + _CHUNK]))
    if len(named) > MAX_ROWS:
        table.writerow([f"... {len(named) - MAX_ROWS:,} more", *[""] * (len(_HEADER) - 1)])
    return out.getvalue()


def _rows(named: list[tuple[str, Any]]) -> Iterator[list[str]]:
    """One chunk: all numbers are stacked and read once per device."""
    import torch

    waiting: dict[Any, list[Any]] = {}
    place: list[tuple[Any, int] | None] = []
    with torch.no_grad():
        for _, parameter in named:
            for tensor in (parameter.detach(), parameter.grad):
                if tensor is None:
                    place.append(None)
                    continue
                local = _local(tensor)
                numbers = waiting.setdefault(local.device, [])
                place.append((local.device, len(numbers)))
                numbers.extend(_norm_and_count(local))
        read = {device: torch.stack(numbers).tolist() for device, numbers in waiting.items()}
    for i, (name, parameter) in enumerate(named):
        row = [name, "x".join(map(str, parameter.shape)) or "scalar", str(parameter.dtype).removeprefix("torch.")]
        row.append("yes" if parameter.requires_grad else "no")
        for where in place[2 * i : 2 * i + 2]:
            row += (
                ["", ""]
                if where is None
                else [f"{read[where[0]][where[1]]:.6g}", f"{read[where[0]][where[1] + 1]:.0f}"]
            )
        row.append("local" if hasattr(parameter, "to_local") else "")
        yield row


def _local(tensor: Any) -> Any:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _norm_and_count(tensor: Any) -> tuple[Any, Any]:
    import torch

    if tensor.numel() == 0:
        zero = torch.zeros(
            (), dtype=torch.float64 if tensor.device.type == "cpu" else torch.float32, device=tensor.device
        )
        return zero, zero
    wide = torch.float64 if tensor.device.type == "cpu" else torch.float32
    finite = torch.isfinite(tensor)
    norm = torch.linalg.vector_norm(torch.where(finite, tensor, torch.zeros_like(tensor)), dtype=_real(wide, tensor))
    norm = norm.to(wide).masked_fill(~finite.any(), float("nan"))  # of no values at all: that is not zero
    return norm, (~finite).sum().to(wide)


def _real(wide: Any, tensor: Any) -> Any:
    import torch

    if tensor.is_complex():
        return torch.complex128 if wide is torch.float64 else torch.complex64
    return wide
