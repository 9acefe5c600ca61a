"""The checks of ``healthcheck doctor``. None of them raises; each says what it saw."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from healthcheck import __version__
from healthcheck.errors import HealthCheckError, RuleFileError

OURS = "torch-healthcheck"
FOREIGN = "healthcheck"
LITTLE_SPACE = 2**30
"""Free bytes under which the record of a long run may not fit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``level`` is ``ok``, ``note`` or ``problem``."""

    level: str
    topic: str
    text: str
    advice: str = ""


def all_checks(plugins: Sequence[str] = ()) -> Iterator[Finding]:
    """Metadata first: a foreign package of the same name must be found before anything is imported."""
    yield from name_clashes(Path.cwd())
    yield from versions()
    yield from torch_and_devices()
    yield from limits()
    host: Any = None
    try:
        from healthcheck.assembly import plugin_host

        host = plugin_host(plugins)
        yield from plugin_state(host)
    except Exception as error:  # whatever it is, it is the finding
        yield Finding(
            "problem",
            "plugins",
            f"built-ins did not load: {type(error).__name__}: {error}",
            "reinstall torch-healthcheck",
        )
    yield from run_folder()
    if host is not None:
        yield from rules(host)


def name_clashes(folder: Path) -> Iterator[Finding]:
    """The foreign distribution of the same import name, and local files that hide ours."""
    if any(_canonical(dist) == FOREIGN for dist in metadata.distributions()):
        yield Finding(
            "problem",
            "name",
            'another package called "healthcheck" is installed; it owns the same import name and overwrites files of ours',
            "pip uninstall healthcheck, then pip install --force-reinstall torch-healthcheck",
        )
    for local in (folder / "healthcheck.py", folder / "healthcheck" / "__init__.py"):
        if local.is_file() and not _is_this_package(local):
            yield Finding(
                "note",
                "name",
                f"{local.relative_to(folder)} here has our import name: `python -m healthcheck` would run it instead, and "
                "a script's `import healthcheck` gets one of the two",
                "use the command `healthcheck`, or rename the file",
            )


def _canonical(dist: metadata.Distribution) -> str:
    name: str = dist.metadata["Name"] or ""
    return name.lower().replace("_", "-")


def _is_this_package(path: Path) -> bool:
    try:
        return path.resolve().is_relative_to(Path(__file__).resolve().parent.parent)
    except OSError:
        return False


def versions() -> Iterator[Finding]:
    yield Finding("ok", "healthcheck", f"{__version__} ({Path(__file__).resolve().parent.parent})")
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in ("pluggy", "PyYAML", "jsonschema", "rich", "pytest"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("problem", name, "not installed", f"pip install {name}")


def torch_and_devices() -> Iterator[Finding]:
    """Imports torch if it is there; without it everything but watching works."""
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding(
            "note", "torch", "not installed: run and watch need it; check, replay, why, report, metrics do not"
        )
        return
    try:
        import torch
    except Exception as error:
        yield Finding(
            "problem", "torch", f"{installed} is installed but does not import: {type(error).__name__}: {error}"
        )
        return
    yield Finding(
        "ok", "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads"
    )
    try:
        yield from _devices(torch)
    except Exception as error:
        yield Finding("problem", "devices", f"cannot be asked: {type(error).__name__}: {error}")


def _devices(torch: Any) -> Iterator[Finding]:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            yield Finding("ok", "device", f"cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    elif torch.backends.mps.is_available():
        yield Finding("ok", "device", "mps")
    elif getattr(torch, "xpu", None) is not None and torch.xpu.is_available():
        yield Finding("ok", "device", f"{torch.xpu.device_count()} xpu")
    else:
        built = "torch is built without CUDA" if not torch.version.cuda else "torch sees no CUDA card"
        yield Finding("ok", "device", f"cpu only ({built})")


def limits() -> Iterator[Finding]:
    """Memory and processors that this process may use, cgroup limits included."""
    from healthcheck.probes.memory_readings import memory_limit_bytes, physical_bytes

    allowed, physical = memory_limit_bytes(), physical_bytes()
    if allowed is not None and physical is not None:
        source = f"cgroup limit; the machine has {physical / 2**30:.1f}" if allowed < physical else "the machine's"
        yield Finding("ok", "memory", f"{allowed / 2**30:.1f} GiB ({source})")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    yield Finding("ok", "processors", f"{cores} cores" + (f", cgroup quota {quota:g}" if quota is not None else ""))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the cgroup grants this process, None without a quota (v2 and v1)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return micros / int((root / "cpu" / "cpu.cfs_period_us").read_text()) if micros > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def plugin_state(host: Any) -> Iterator[Finding]:
    others = [info for info in host.infos if info.source != "built in"]
    names = ", ".join(f"{info.name} ({info.source})" for info in others) or "none beside the built-ins"
    yield Finding("ok", "plugins", names)
    for failure in host.failures:
        yield Finding("problem", "plugins", str(failure), f"mend it, or HEALTHCHECK_DISABLE_PLUGINS={failure.name}")


def run_folder() -> Iterator[Finding]:
    """Whether records can be written where they would go. Leaves nothing behind."""
    from healthcheck.record.folder import RUNS_VARIABLE, runs_folder

    wanted = runs_folder()
    existing = wanted
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        yield Finding(
            "problem",
            "records",
            f"{wanted} cannot be written: {error.strerror or error}",
            f"set {RUNS_VARIABLE} to a folder of yours",
        )
        return
    text = f"{wanted} can be written, {free / 2**30:.1f} GiB free"
    if free < LITTLE_SPACE:
        yield Finding("problem", "records", text, "free some space: a full disk means a record in memory only")
    else:
        yield Finding("ok", "records", text)


def rules(host: Any) -> Iterator[Finding]:
    """Which rules a run here would use, and whether they are valid."""
    from healthcheck.assembly import load_rules_for

    notes: list[str] = []
    try:
        found = load_rules_for(host=host, notes=notes)
    except RuleFileError as error:
        first = error.problems[0]
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        yield Finding("problem", "rules", f"{first}{more}", "healthcheck check")
        return
    except HealthCheckError as error:
        yield Finding("problem", "rules", str(error))
        return
    stopping = ", ".join(rule.id for rule in found.rules if rule.may_stop) or "none"
    yield Finding("ok", "rules", f"{len(found.rules)} rules of {found.source}; may stop a run: {stopping}")
    for note in notes:
        yield Finding("note", "rules", note)
    if os.environ.get("HEALTHCHECK", "").lower() == "off":
        yield Finding("note", "rules", "HEALTHCHECK=off is set: nothing is watched", "unset HEALTHCHECK")
