"""Keep what a person needs to understand an alert, and nothing that is none of our business."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from healthcheck.actions.evidence.batch import describe_batch, write_contents
from healthcheck.actions.evidence.environment import environment, rng_states
from healthcheck.actions.evidence.parameters import parameter_rows
from healthcheck.actions.evidence.readme import readme
from healthcheck.actions.evidence.series import series_rows
from healthcheck.outcome import alert_json
from healthcheck.protocols import ActionContext
from healthcheck.rulelang.quantities import size_text
from healthcheck.verdicts import ActionOutcome, Alert

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
            self.left_out.append(f"{name}: {type(error).__name__}: {error}")
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
    if event is None or event.batch is None:
        bundle.left_out.append("batch.json: this trainer did not show its batch at this point")
    elif wanted != "none":
        batch = event.batch
        bundle.add("batch.json", "shapes, dtypes, ranges and hashes of the batch", lambda: _json(describe_batch(batch)))
        if wanted == "full":
            write_contents(batch, bundle.add)
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
