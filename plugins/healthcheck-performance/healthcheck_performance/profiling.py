"""Profiles of a few steps: started by a rule, on a schedule, by a command or in code. One at a time, off by itself.

While steps are recorded they are slower; ``session.untimed()`` keeps their time out of what the run is judged by.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from healthcheck import (
    ActionContext,
    ActionOutcome,
    Alert,
    CompileLog,
    Event,
    ModelView,
    Session,
    compile_log,
    current,
    hookimpl,
)

from healthcheck_performance.analysis import Verdict, analyse
from healthcheck_performance.operators import MODULE, Reading, read_profile

STATE = "performance.profiler"
"""Key in ``user_state``."""
WARMUP = "performance.warmup"
"""Another: steps before which nothing is measured or profiled."""
MAX_BY_RULES = 3
"""Profiles that rules may start in one run."""
PACE = 10
"""Steps before a scheduled profile that are timed without it."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What is recorded, and where it goes."""

    wait: int = 10
    warmup: int = 1
    active: int = 3
    repeat: int = 1
    rows: int = 10
    """Operators in tables."""
    memory: bool = True
    shapes: bool = False
    stacks: bool = False
    flops: bool = False
    modules: bool = True
    ranks: str = "zero"
    folder: str = ""
    """Of the traces; ``profile`` in the run's record if empty."""


_COUNT = {"type": "integer", "minimum": 0}
_RECORDED: dict[str, Any] = {
    "warmup": {**_COUNT, "description": "Steps that are slowed down already and not recorded (default 1)."},
    "rows": {"type": "integer", "minimum": 1, "description": "Operators in the table (default 10)."},
    "memory": {"type": "boolean", "description": "Memory that operators allocate (default true)."},
    "shapes": {"type": "boolean", "description": "Shapes of inputs, in the trace (default false)."},
    "stacks": {"type": "boolean", "description": "Python stacks, in the trace (default false: they cost much)."},
    "flops": {"type": "boolean", "description": "Arithmetic of matrix products and convolutions (default false)."},
    "modules": {"type": "boolean", "description": "Name the module of each operator (default true)."},
    "folder": {
        "type": "string",
        "minLength": 1,
        "description": "Folder of the traces, for `tensorboard --logdir FOLDER` (default: profile in the record).",
    },
}
PROFILE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "wait": {**_COUNT, "description": "Steps before each profile (default 10)."},
        "active": {"type": "integer", "minimum": 1, "maximum": 100, "description": "Steps to record (default 3)."},
        "repeat": {"type": "integer", "minimum": 1, "maximum": 20, "description": "How many profiles (default 1)."},
        "ranks": {"enum": ["zero", "all"], "description": "Ranks that record (default zero)."},
        **_RECORDED,
    },
}


@dataclass(slots=True)
class Profiled:
    """One finished profile."""

    first: int
    last: int
    """Steps."""
    reading: Reading
    trace: str = ""
    """Path of the trace; empty if none was written."""
    table: str = ""
    """Path of the table."""
    why: str = ""
    """What asked for it: a rule, or ``schedule``."""
    verdict: Verdict | None = None

    @property
    def sentence(self) -> str:
        """``steps 12 to 14: aten::sort in encoder takes 81 % of the host time``."""
        rows = self.reading.rows(1)
        steps = f"steps {self.first:,} to {self.last:,}" if self.last > self.first else f"step {self.first:,}"
        if not rows:
            return f"{steps}: no operator was recorded"
        where = f" in {rows[0]['module']}" if rows[0]["module"] != "-" else ""
        kind = "device" if self.reading.device else "host"
        return f"{steps}: {rows[0]['operator']}{where} takes {rows[0]['share']:.0%} of the {kind} time"


class RunProfiler:
    """All profiles of one run."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.running: Recording | None = None
        self.done: list[Profiled] = []
        self.by_rules = 0
        self.usual_step: float | None = None
        """Seconds of a step before the last scheduled profile."""
        self.at_start = compile_log()
        self.model: ModelView | None = None
        self.thread = threading.get_ident()
        """The one that trains."""
        self._forget = session.on("train_start", self._began)

    def _began(self, event: Event) -> None:
        self._forget()
        self.model, self.thread = event.model, threading.get_ident()

    def start(
        self,
        options: ProfileOptions,
        model: ModelView | None = None,
        *,
        why: str,
        profiler: Any = None,
        finished: Callable[[Profiled], None] = lambda profiled: None,
    ) -> Recording:
        """Begin a recording. Raises ``RuntimeError`` where one is under way, here or of somebody else."""
        if self.running is not None or is_recording():  # torch does not refuse a second one, it crashes
            raise RuntimeError("one is being recorded")
        self.running = Recording(self, options, model or self.model, why, finished, profiler)
        try:
            self.running.begin()
        except BaseException:
            self.running = None
            raise
        return self.running

    def over(self, profiled: Profiled | None, options: ProfileOptions) -> None:
        self.running = None
        if profiled is None:
            return
        profiled.verdict = analyse(
            profiled.reading,
            usual_step=self.usual_step or self._mean("time.step"),
            data_wait=self._mean("time.data"),
            busy=_busy(),
        )
        self.done.append(profiled)
        path = profiled.trace or profiled.table
        self.session.note(f"profile of {profiled.sentence}{f': {path}' if path else ''}")

    def _mean(self, series: str) -> float | None:
        values = [value for _, value in self.session.history(series, 20)]
        return sum(values) / len(values) if values else None

    def findings(self) -> dict[str, dict[str, Any]]:
        """For ``performance.findings`` of the report, and the page."""
        found: dict[str, dict[str, Any]] = {}
        for number, one in enumerate(self.done, start=1):
            tail = "" if number == 1 else f"-{number}"
            found[f"performance.profile{tail}"] = {
                "text": f"profile of {one.sentence}",
                "advice": f"open the trace in chrome://tracing, ui.perfetto.dev or TensorBoard: {one.trace}"
                if one.trace
                else "",
                "rows": one.reading.rows(),
            }
        verdict = next((one.verdict for one in reversed(self.done) if one.verdict is not None), None)
        if verdict is not None:
            found["performance.bound"] = verdict.finding()
        return {name: {k: v for k, v in one.items() if v not in ("", None)} for name, one in found.items()}


def is_recording() -> bool:
    """Whether a profiler of torch is active in this process, whoever's it is."""
    import torch

    return bool(torch.autograd._profiler_enabled())


def _busy() -> float | None:
    """Share of the last second in which the driver saw a kernel; None without a card or the NVML binding."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        return float(torch.cuda.utilization()) / 100
    except Exception:  # no pynvml, no permission, another vendor
        return None


def profiler_of(session: Session) -> RunProfiler:
    """The one of this run."""
    known = session.user_state.get(STATE)
    if not isinstance(known, RunProfiler):
        known = session.user_state[STATE] = RunProfiler(session)
    return known


class Recording:
    """One running profiler. It is stepped at the end of each step, and ends with its last or with the run."""

    def __init__(
        self,
        owner: RunProfiler,
        options: ProfileOptions,
        model: ModelView | None,
        why: str,
        finished: Callable[[Profiled], None],
        profiler: Any,
    ) -> None:
        self.owner, self.options, self.why, self.finished = owner, options, why, finished
        self.model = model
        self.session = owner.session
        self.profiler = profiler
        self.given = profiler is not None
        """Somebody's own profiler, with a schedule of its own: it ends with the run."""
        self.steps = 0
        self._last = -1
        self._first = 0
        self._undo: list[Callable[[], None]] = []
        self._timed: Callable[[], None] | None = None
        self._profiled: Profiled | None = None

    def begin(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        if self.given:
            theirs = self.profiler.on_trace_ready

            def ready(profiler: Any) -> None:
                if theirs is not None:
                    theirs(profiler)
                self._ready(profiler)

            self.profiler.on_trace_ready = ready
        else:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=self.options.warmup, active=self.options.active, repeat=1),
                on_trace_ready=self._ready,
                record_shapes=self.options.shapes or self.options.flops,
                profile_memory=self.options.memory,
                with_stack=self.options.stacks,
                with_flops=self.options.flops,
                acc_events=True,
            )
        if self.options.modules and not compiles(self.model, self.owner.at_start):
            self._undo.append(name_modules(self.model))
        self._untimed(True)
        try:
            self.profiler.start()
        except BaseException:
            self._clean_up()
            raise
        self._settle()
        self._undo.append(self.session.on("step_end", self._step_end))
        self._undo.append(self.session.on("train_end", lambda event: self.end()))

    def _untimed(self, wanted: bool) -> None:
        if wanted and self._timed is None:
            self._timed = self.session.untimed()
        elif not wanted and self._timed is not None:
            over, self._timed = self._timed, None
            over()

    def _settle(self) -> None:
        """A given profiler waits most of the time: then steps are as fast as ever."""
        if self.given:
            from torch.profiler import ProfilerAction

            self._untimed(self.profiler.current_action is not ProfilerAction.NONE)

    def _step_end(self, event: Event) -> None:
        if event.step == self._last:  # of another optimizer
            return
        self._last = event.step
        if self.given and self._timed is None and is_recording():
            return  # another one is at work while this one waits: it waits on
        self.steps += 1
        try:
            self._untimed(True)  # writing takes time, too
            self.profiler.step()
            self._settle()
        except (OSError, RuntimeError) as error:
            self.session.note(f"profile not written: {error}")
            self.end()
            return
        if not self.given and self.steps >= self.options.warmup + self.options.active:
            self.end()

    def end(self) -> None:
        """Stop recording; what was recorded of the last steps is written where it was due. Safe to call twice."""
        if self.owner.running is not self:
            return
        try:
            self.profiler.stop()
        except (OSError, RuntimeError) as error:
            self.session.note(f"profile not written: {error}")
        finally:
            self._clean_up()
            self.owner.over(self._profiled, self.options)
        if self._profiled is not None:
            self.finished(self._profiled)

    def _clean_up(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._untimed(False)

    def _ready(self, profiler: Any) -> None:
        events = list(profiler.events() or ())
        reading = read_profile(events, _device_name())
        if not reading.steps:  # the run has ended within the warm-up
            return
        last = max(self._last, 1)
        profiled = Profiled(max(1, last - max(reading.steps, 1) + 1), last, reading, why=self.why)
        folder = self._folder()
        if folder is not None and not self.given:
            stem = f"steps-{profiled.first}-{profiled.last}-rank{self.session.info.rank}"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            trace = folder / f"{stem}.{time.time_ns()}.pt.trace.json"  # the name that TensorBoard's plugin looks for
            profiler.export_chrome_trace(str(trace))
            trace.chmod(0o600)
            profiled.trace = str(trace)
            table = folder / f"{stem}.operators.txt"
            _write(table, reading.table(self.options.rows))
            _write(folder / f"{stem}.operators.json", json.dumps(reading.rows(self.options.rows), indent=1))
            profiled.table = str(table)
        if self._profiled is not None and self.given:  # the next turn of a given profiler
            self.owner.done.append(self._profiled)
        self._profiled = profiled

    def _folder(self) -> Path | None:
        if self.options.folder:
            return Path(self.options.folder)
        run_dir = self.session.info.run_dir
        return Path(run_dir) / "profile" if run_dir is not None else None


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _device_name() -> str:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return str(torch.cuda.get_device_name())
    return ""


# --------------------------------------------------------------------------- names of modules


def compiles(model: ModelView | None, since: CompileLog) -> bool:
    """Whether something is compiled: hooks on its modules would have it compiled again.

    :param since: from the start of the run; what was compiled before is no part of it.
    """
    if compile_log(since).functions:
        return True
    return model is not None and any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for _, module in model.named_modules()
    )


def name_modules(model: ModelView | None) -> Callable[[], None]:
    """Annotate each forward pass of a module with its name, for the profiler; returns what ends that."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.profiler import record_function

    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    open_ones = threading.local()

    def begins(module: Any, args: Any) -> None:
        annotation = record_function(f"{MODULE}{names.get(id(module), type(module).__name__)}")
        annotation.__enter__()
        stack = open_ones.__dict__.setdefault("stack", [])
        stack.append(annotation)

    def ends(module: Any, args: Any, output: Any) -> None:
        stack = open_ones.__dict__.get("stack")
        if stack:
            stack.pop().__exit__(None, None, None)

    handles = [register_module_forward_pre_hook(begins), register_module_forward_hook(ends, always_call=True)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# --------------------------------------------------------------------------- when


class Countdown:
    """Calls a function after so many steps, and costs next to nothing until then.

    Counts steps of the first optimizer through torch's own hook: to hear of each step would have an event made of it.
    Where something is compiled it does listen, for a compiled optimizer must not meet a hook.
    """

    def __init__(self, session: Session, steps: int, function: Callable[[], object]) -> None:
        self.session, self.left, self.function = session, steps, function
        self._optimizer: weakref.ref[Any] | None = None
        self._undo: list[Callable[[], None]] = []
        self._pace: list[float] = []
        self._step = -1
        if session.step > 0:
            self._count()
        else:
            self._undo.append(session.on("train_start", lambda event: self._count()))

    @property
    def usual_step(self) -> float | None:
        """Mean seconds of the last steps."""
        times = self._pace[-PACE:]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 2 else None

    def cancel(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _count(self) -> None:
        self.cancel()
        if self.left <= 0:
            self.function()
            return
        if compile_log(profiler_of(self.session).at_start).functions:
            self._undo.append(self.session.on("step_end", self._heard))
            return
        _counters.append(self)
        self._undo.append(lambda: _counters.remove(self))
        _hear_optimizers()

    def _heard(self, event: Event) -> None:
        if event.step != self._step:
            self._step = event.step
            self._one_more()

    def stepped(self, optimizer: Any) -> None:
        known = self._optimizer() if self._optimizer is not None else None
        if known is None:
            self._optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            return
        self._one_more()

    def _one_more(self) -> None:
        self.left -= 1
        if self.left < PACE:
            self._pace.append(time.perf_counter())
        if self.left <= 0:
            self.cancel()
            try:
                self.function()
            except Exception as error:  # it must never reach the training
                self.session.note(f"performance: {type(error).__name__}: {error}")


_counters: list[Countdown] = []
"""Those that count steps now."""
_hears = False


def _hear_optimizers() -> None:
    """One hook for the process, which stays: torch goes through its hooks while they are called, so that none may come or
    go meanwhile, and steps end within them."""
    global _hears
    if not _hears:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_optimizer_stepped)
        _hears = True


def _optimizer_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    for one in tuple(_counters):
        one.stepped(optimizer)


class Profile:
    """Profile some steps on a schedule: ``healthcheck.watch(..., callbacks=[Profile(wait=10, active=3)])``.

    :param wait: steps before each profile, which cost nothing.
    :param warmup: steps in which the profiler runs already and nothing is kept.
    :param active: steps that are recorded.
    :param repeat: how many profiles.
    :param folder: of the traces; ``profile`` in the run's record if empty. Loads in ``chrome://tracing``, Perfetto and
        TensorBoard.
    :param others: :class:`ProfileOptions`.

    Raises ``TypeError`` for an option that does not exist.
    """

    name = "performance-profile"

    def __init__(self, *, finished: Callable[[Profiled], None] = lambda profiled: None, **options: Any) -> None:
        known = {one.name for one in fields(ProfileOptions)}
        wrong = sorted(options.keys() - known)
        if wrong:
            raise TypeError(f"Profile has no option {wrong[0]!r}; it has {', '.join(sorted(known))}")
        self.options = ProfileOptions(**options)
        self.finished = finished
        self._left = self.options.repeat

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        if self.options.ranks == "zero" and session.info.rank != 0:
            return
        self._session = session
        profiler_of(session)  # it hears of the model
        wait = max(self.options.wait, int(session.user_state.get(WARMUP, 0)))
        self._countdown = Countdown(session, wait, self._due)

    def _due(self) -> None:
        owner = profiler_of(self._session)
        owner.usual_step = self._countdown.usual_step
        try:
            owner.start(self.options, why="schedule", finished=self._over)
        except RuntimeError as error:
            self._session.note(f"no profile now ({error}); it comes {max(1, self.options.wait)} steps later")
            self._countdown = Countdown(self._session, max(1, self.options.wait), self._due)

    def _over(self, profiled: Profiled) -> None:
        self.finished(profiled)
        self._left -= 1
        if self._left > 0:
            self._countdown = Countdown(self._session, max(1, self.options.wait), self._due)


class DriveProfiler:
    """Step somebody's own ``torch.profiler.profile`` with the training: its schedule, its trace handler, our table."""

    name = "performance-profiler"

    def __init__(self, profiler: Any) -> None:
        self.profiler = profiler

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        owner = profiler_of(session)
        self._countdown = Countdown(
            session,
            int(session.user_state.get(WARMUP, 0)),
            lambda: owner.start(ProfileOptions(warmup=0), why="profiler", profiler=self.profiler),
        )


# --------------------------------------------------------------------------- the action


class ProfileAction:
    """Profile the next steps: a trace for Chrome, Perfetto and TensorBoard, and a table of the slowest operators.

    One at a time, at most three in a run. The profiled steps are slower and enter no step time; the step under way is the
    first of the warm-up. The table names operators with their modules, and goes into the record, the report and the page.
    """

    name = "performance.profile"
    stage = "observe"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "steps": {"type": "integer", "minimum": 1, "maximum": 100, "description": "Steps to record (default 3)."},
            **_RECORDED,
        },
    }

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        # Rules of short steps are judged in blocks, of which no event is built: then the session of this process is meant.
        session = current() if context.event is None else None
        state = (
            session.user_state if session is not None else context.event.user_state if context.event is not None else {}
        )
        owner = state.get(STATE)
        if not isinstance(owner, RunProfiler):
            return ActionOutcome.nothing_done(self.name, "the plugin is not configured in this session")
        if threading.get_ident() != owner.thread:
            return ActionOutcome.nothing_done(self.name, "the training thread is not at a step")
        if owner.by_rules >= MAX_BY_RULES:
            return ActionOutcome.nothing_done(self.name, f"rules have started {MAX_BY_RULES} in this run already")
        given = dict(context.options)
        given.pop("after", None)
        options = ProfileOptions(active=given.pop("steps", 3), **given)
        outcome = ActionOutcome.of(self.name, f"profiling {options.active} steps")

        def finished(profiled: Profiled) -> None:
            outcome.text = f"profile of {profiled.sentence}"
            outcome.data |= {
                "trace": profiled.trace,
                "table": profiled.table,
                "steps": [profiled.first, profiled.last],
                "operators": profiled.reading.rows(options.rows),
            }
            if profiled.verdict is not None:
                outcome.data["bound"] = {"bound": profiled.verdict.bound, "shares": profiled.verdict.shares}

        try:
            owner.start(options, owner.model, why=alert.rule, finished=finished)
        except RuntimeError as error:
            return ActionOutcome.nothing_done(self.name, str(error))
        owner.by_rules += 1
        return outcome


def options_text(options: ProfileOptions) -> str:
    """For the environment variable of the setting."""
    default = ProfileOptions()
    given = {key: value for key, value in asdict(options).items() if value != getattr(default, key)}
    return json.dumps(given or {"wait": default.wait})
