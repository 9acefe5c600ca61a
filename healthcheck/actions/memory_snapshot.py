"""What the CUDA allocator holds, as JSON and as its own summary table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healthcheck.protocols import ActionContext
from healthcheck.rulelang.quantities import size_text
from healthcheck.verdicts import ActionOutcome, Alert

MAX_BYTES = 64 * 2**20


class MemorySnapshot:
    """Segments and blocks of the CUDA allocator, in ``memory/``. On other devices it says so."""

    name = "memory_snapshot"
    stage = "observe"
    options_schema: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        import torch

        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return ActionOutcome.nothing_done(self.name, "only the CUDA allocator can give one")
        if context.run_dir is None:
            return ActionOutcome.nothing_done(self.name, "this run keeps no record")
        content = json.dumps(torch.cuda.memory.memory_snapshot(), default=str)
        stem = context.run_dir / "memory" / f"{alert.number:03d}-rank{alert.rank}"
        try:
            stem.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(stem.with_suffix(".txt"), torch.cuda.memory_summary())
            if len(content) > MAX_BYTES:
                return ActionOutcome.of(
                    self.name, f"memory summary: {stem}.txt (the snapshot of {size_text(len(content))} is too large)"
                )
            _write(stem.with_suffix(".json"), content)
        except OSError as error:
            return ActionOutcome.nothing_done(self.name, f"{error.strerror or error} ({stem.parent})")
        return ActionOutcome.of(self.name, f"memory snapshot: {stem}.json", path=f"{stem}.json")


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
