"""Settings that stand beside a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20


def facts_beside(path: Path) -> dict[str, Any]:
    """``hparams.yaml`` (Lightning), ``args.yaml`` (Ultralytics) or ``config.json`` of a run, parsed safely.

    Files with Python tags are not read: nothing is unpickled or constructed.
    """
    folder = path if path.is_dir() else path.parent
    for name in ("hparams.yaml", "args.yaml"):
        file = folder / name
        if file.is_file() and file.stat().st_size <= _MOST_BYTES:
            try:
                import yaml

                loaded = yaml.safe_load(file.read_text("utf-8", "replace"))
            except Exception:
                continue
            if isinstance(loaded, dict):
                return loaded
    report = folder / "report.json"
    if report.is_file() and report.stat().st_size <= 16 * _MOST_BYTES:
        try:
            loaded = json.loads(report.read_text("utf-8", "replace"))
        except ValueError:
            return {}
        if isinstance(loaded, dict):
            return {"report": loaded}
    return {}
