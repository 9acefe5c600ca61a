"""Record a few steps with torch's profiler, started by a rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healthcheck.protocols import ActionContext
from healthcheck.verdicts import ActionOutcome, Alert

DEFAULT_STEPS = 3
MAX_PROFILES = 3


class Profile:
    """Profile the next optimizer steps and write a trace for ``chrome://tracing`` or Perfetto.

    The profiled steps are slower; their times do not count as normal. It counts optimizer steps, so a
    run that makes none leaves no trace.
    """

    name = "profile"
    stage = "observe"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "steps": {
                "type": "integer",
                "minimum": 1,
                "maximum": 50,
                "description": f"Steps to record (default {DEFAULT_STEPS}).",
            }
        },
        "additionalProperties": False,
    }

    def __init__(self) -> None:
        self._running: _Recording | None = None
        self._made = 0

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        if context.run_dir is None:
            return ActionOutcome.nothing_done(self.name, "this run keeps no record")
        if context.event is None:
            return ActionOutcome.nothing_done(self.name, "the training thread is not at a step")
        if self._running is not None and not self._running.over:
            return ActionOutcome.nothing_done(self.name, "one is being recorded")
        if self._made >= MAX_PROFILES:
            return ActionOutcome.nothing_done(self.name, f"this run has {MAX_PROFILES} already")
        folder = context.run_dir / "profile"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            return ActionOutcome.nothing_done(self.name, f"{error.strerror or error} ({folder})")
        steps = int(context.options.get("steps", DEFAULT_STEPS))
        path = folder / f"{alert.number:03d}-rank{alert.rank}.json"
        try:
            self._running = _Recording(path, steps, context)
        except RuntimeError as error:  # another profiler is active
            return ActionOutcome.nothing_done(self.name, f"{error}")
        self._made += 1
        return ActionOutcome.of(self.name, f"profiling the next {steps} steps: {path}", path=str(path))


class _Recording:
    """One running profiler, ended by torch's optimizer hook after so many steps."""

    def __init__(self, path: Path, steps: int, context: ActionContext) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.path = path
        self.left = steps + context.before_update  # the step that is under way is not a whole one
        self.say = context.say
        self.over = False
        self.profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self.profiler.start()
        self.hook = register_optimizer_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        self.left -= 1
        if self.left > 0 or self.over:
            return
        self.over = True
        self.hook.remove()
        try:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.path.chmod(0o600)
        except (OSError, RuntimeError) as error:
            self.say(f"profile not written: {error}")
            return
        self.say(f"profile written: {self.path}")
