"""What the run ran on: versions, cards, launcher variables, a redacted command line, RNG states."""

from __future__ import annotations

import os
import platform
import random
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from healthcheck.redact import allowed_environment, redact_argv

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
