"""What ``torch.compile`` did in this process: graph breaks with their places, recompilations with their guards, compile time.

Read from what Dynamo keeps itself (``torch._dynamo.utils``: its counters, the reasons of graph breaks, and the metrics of the
last 64 compilations), so that nothing is logged, switched on or slowed down. Dynamo is never imported for it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from healthcheck.core.events import Event, EventKind, ModelView
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Metric, Sample
from healthcheck.probes.looks import LOOK_SELDOM, next_look

LOOK_EVERY = 5
"""Steps between two looks while nothing was compiled, in a young run."""
NAMED = 3
"""Places that an alert names."""
KEPT = 2000
"""Compilations that are remembered: Dynamo forgets all but 64."""


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """One line at which a graph ended."""

    file: str
    line: int
    function: str
    reason: str
    """What torch says, in one sentence."""
    advice: str
    """What to change."""
    times: int = 1

    def place(self, model: ModelView | None = None) -> str:
        """``train.py:31 in forward (module encoder.0, a Block)``."""
        return place_of(self.file, self.line, self.function, model)

    def modules(self, model: ModelView | None) -> list[tuple[str, str]]:
        """``(name, class)`` of the modules whose class has that line."""
        return modules_at(self.file, self.line, model)


@dataclass(frozen=True, slots=True)
class Recompile:
    """A function that was compiled once more because a guard failed."""

    file: str
    line: int
    function: str
    guard: str
    """The guard that failed, as torch says it."""
    advice: str
    times: int = 1
    """How often it failed, with other numbers too."""

    def place(self, model: ModelView | None = None) -> str:
        return place_of(self.file, self.line, self.function, model)


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A function of the user, with all that was compiled of it: one frame, and one more behind each graph break."""

    file: str
    line: int
    function: str
    compilations: int
    seconds: float
    """Time in the compiler: Dynamo, AOTAutograd and the backend, backward graphs included."""

    def place(self, model: ModelView | None = None) -> str:
        return place_of(self.file, self.line, self.function, model)


@dataclass(frozen=True, slots=True)
class CompileLog:
    """What was compiled in this process so far. Empty where nothing was."""

    graph_breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    functions: tuple[CompiledFunction, ...] = ()
    seen: tuple[int, int] = (0, 0)
    """How many graph breaks and compilations this process had when it was read."""

    @property
    def seconds(self) -> float:
        """Time in the compiler, all functions together."""
        return sum(function.seconds for function in self.functions)


_compilations: dict[tuple[Any, ...], Any] = {}
"""By identity, in their order: those that Dynamo still has, and those that it has forgotten since somebody looked."""
_forgotten = [0]
"""How many we have forgotten, too."""


def compile_log(since: CompileLog | None = None) -> CompileLog:
    """Read what Dynamo has kept. Costs host time only; safe to call at any step, never imports Dynamo.

    :param since: an earlier log: what it knew is left out (another training of this process, say).
    """
    before_breaks, before_made = since.seen if since is not None else (0, 0)
    reasons, made = _reasons(), list(_remembered().values())
    if before_breaks > len(reasons):  # Dynamo was reset, and has forgotten its reasons
        before_breaks = 0
    new = made[max(0, before_made - _forgotten[0]) :]
    return CompileLog(
        _breaks(reasons[before_breaks:]),
        _recompiles(new),
        _functions(new),
        (len(reasons), len(made) + _forgotten[0]),
    )


def _reasons() -> list[Any]:
    return list(getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", None) or ())


def _remembered() -> dict[tuple[Any, ...], Any]:
    read = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    for one in read() if read is not None else ():
        key = (
            getattr(one, "compile_id", None),
            getattr(one, "is_forward", None),
            getattr(one, "start_time_us", id(one)),
        )
        _compilations.setdefault(key, one)
    while len(_compilations) > KEPT:
        del _compilations[next(iter(_compilations))]
        _forgotten[0] += 1
    return _compilations


# --------------------------------------------------------------------------- graph breaks

_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
"""The name of what is compiled behind a graph break."""

ADVICE: tuple[tuple[str, str], ...] = (
    (
        "data-dependent branching|generic_jump",
        "compute both sides and choose with torch.where, or use torch.cond, instead of `if` on a tensor's value",
    ),
    ("data-dependent assertion", "check it outside the compiled region, or use torch._check"),
    (
        r"tensor\.item|\.item\(\)|_local_scalar_dense|tolist|scalar_outputs",
        "keep the value a tensor (no .item(), int(), float()); where it is needed, read it outside the compiled region",
    ),
    ("builtin.*print|logging", "take the print or log call out of the compiled function, or make it after the call"),
    (r"graph_break\(\)|graph break in", "remove the call of torch._dynamo.graph_break()"),
    (
        "disable",
        "do not call a function that is excluded by torch.compiler.disable inside the compiled region: move the call out, or "
        "remove the decorator",
    ),
    (
        "dynamic shape operator|nonzero|masked_select",
        "avoid operators whose output size depends on values (nonzero, boolean masks, unique): multiply by the mask or use torch.where",
    ),
    ("backward", "call backward() outside the compiled function"),
    ("numpy", "use torch operations instead of NumPy's"),
    ("time\\.|random|datetime", "call it outside the compiled function and pass the result in"),
    (
        "marked as skipped|skipped function|c function|builtin operator|untraceable",
        "torch cannot look into what is called there: call it outside the compiled function, use a torch operation, or make it a "
        "torch.library.custom_op",
    ),
    ("generator|yield", "build a list, or iterate outside the compiled function"),
    ("hook", "register hooks outside the compiled function"),
)
"""Pattern of torch's reason -> what to change. First match wins."""

_NO_HELP = ("please report", "fundamental", "may be possible to write", "please file", "tracing rules")


def _breaks(reasons: Iterable[Any]) -> tuple[GraphBreak, ...]:
    """One for each line: a break is met again in every compilation, and on the way back with another reason."""
    found: dict[tuple[str, int], GraphBreak] = {}
    for one in reasons:
        frame = _users(getattr(one, "user_stack", None) or ())
        if frame is None or not getattr(one, "graph_break", True):
            continue
        text = str(getattr(one, "reason", ""))
        key = (frame.filename, int(frame.lineno or 0))
        known = found.get(key)
        explained = "Explanation:" in text
        if known is None:
            found[key] = GraphBreak(*key, _plain(frame.name), _sentence(text), _advice(text))
        else:
            times = known.times + (1 if explained or "Explanation" not in known.reason else 0)
            better = explained and not known.reason.endswith(".")
            reason, advice = (_sentence(text), _advice(text)) if better else (known.reason, known.advice)
            found[key] = GraphBreak(*key, known.function, reason, advice, times)
    return tuple(found.values())


def _users(stack: Iterable[Any]) -> Any:
    """The innermost frame that is not torch's own; else the innermost."""
    frames = list(stack)
    own = [f for f in frames if f"{os.sep}torch{os.sep}" not in f.filename]
    return (own or frames or [None])[-1]


def _sentence(text: str) -> str:
    """Title and first sentence of torch's explanation."""
    title = text.partition("\n")[0].strip()
    found = re.search(r"Explanation: (.*?)(?:\n\s*\n|\n\s*Hint:|$)", text, re.DOTALL)
    if found is None:
        return title
    return f"{title}: {' '.join(found[1].split()).rstrip('.')}."


def _advice(text: str) -> str:
    context = re.search(r"Developer debug context: (.*)", text)
    asked = f"{text.partition(chr(10))[0]} {context[1] if context else ''}".lower()
    for pattern, advice in ADVICE:
        if re.search(pattern, asked):
            return advice
    hints = [" ".join(hint.split()) for hint in re.findall(r"Hint: (.*)", text)]
    useful = [hint for hint in hints if not any(word in hint.lower() for word in _NO_HELP)]
    return useful[0].rstrip(".") if useful else "move this call out of the compiled function"


# --------------------------------------------------------------------------- recompilations and time

GUARDS: tuple[tuple[str, str], ...] = (
    (
        "backend_match",
        "the same function is compiled by several calls of torch.compile with other options: compile it once",
    ),
    (
        r"tensor '(?P<name>[^']*)' size mismatch at index (?P<dim>\d+)",
        "the size of dimension {dim} of `{name}` changes: pad to a few lengths (drop_last=True for a smaller last batch), or "
        "torch.compile(dynamic=True), or torch._dynamo.mark_dynamic on the input",
    ),
    (r"tensor '(?P<name>[^']*)' (rank|dim)", "`{name}` comes with another number of dimensions: give it one shape"),
    (r"tensor '(?P<name>[^']*)' stride mismatch", "the memory layout of `{name}` changes: call .contiguous() before"),
    (r"tensor '(?P<name>[^']*)' dtype mismatch", "the dtype of `{name}` changes: convert it before the call"),
    (
        r"tensor '(?P<name>[^']*)' requires_grad",
        "`{name}` sometimes wants a gradient: call .detach() on it, or compile for both on purpose",
    ),
    (
        r"grad_mode|global_state|autocast",
        "gradients or autocast are on in one call and off in another: training and evaluation are compiled apart, once each",
    ),
    (r"\.training\b", "train() and eval() are compiled apart, once each"),
    (
        r"len\(|list length|dict_keys|dictgetitem|___dict",
        "a list or dict changes its length: give it the same entries in every call",
    ),
    (
        r"___check_obj_id|___check_type_id|is not",
        "another object is used in each call: create it once, outside the compiled function",
    ),
    (
        r"==|!=|%|<|>",
        "a Python number that changes is compiled in: pass it as a tensor, or keep it out of the compiled function",
    ),
)
"""Pattern of a guard that failed -> what to change. First match wins."""


_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


def _guard_advice(guard: str) -> str:
    for pattern, advice in GUARDS:
        found = re.search(pattern, guard, re.IGNORECASE)
        if found:
            return advice.format(**found.groupdict())
    return "keep what this guard looks at the same in every call"


def _recompiles(made: Iterable[Any]) -> tuple[Recompile, ...]:
    found: dict[tuple[Any, ...], Recompile] = {}
    for one in made:
        guard = str(getattr(one, "recompile_reason", None) or "")
        if not guard:
            continue
        text, *comments = re.sub(r"^\d+/\d+: ", "", guard.partition("\n")[0]).split("  # ")
        code = comments[0].strip() if comments else ""
        guard = f"{text.strip()} (in `{code}`)" if code else text.strip()
        place = (str(one.co_filename), int(one.co_firstlineno or 0), _plain(str(one.co_name)))
        key = (*place, _NUMBER.sub("#", guard))
        known = found.get(key)
        found[key] = (
            Recompile(*place, guard, _guard_advice(guard)) if known is None else replace(known, times=known.times + 1)
        )
    return tuple(found.values())


def _functions(made: Iterable[Any]) -> tuple[CompiledFunction, ...]:
    """Each function with its frames; a compiled backward graph counts for the forward frame of its id."""
    owner: dict[str, tuple[str, str]] = {}
    first: dict[tuple[str, str], int] = {}
    count: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], float] = {}
    for one in made:
        frame_id = str(getattr(one, "compile_id", "") or "").rpartition("/")[0]
        if one.co_filename:
            key = owner[frame_id] = (str(one.co_filename), _plain(str(one.co_name)))
            first[key] = min(first.get(key, 1 << 60), int(one.co_firstlineno or 0))
            count[key] = count.get(key, 0) + 1
            taken = getattr(one, "entire_frame_compile_time_s", None)
        else:
            known = owner.get(frame_id)
            if known is None:
                continue
            key = known
            taken = (getattr(one, "duration_us", None) or 0) / 1e6
        seconds[key] = seconds.get(key, 0.0) + float(taken or 0.0)
    return tuple(
        CompiledFunction(file, first[file, name], name, number, seconds[file, name])
        for (file, name), number in count.items()
    )


def _plain(name: str) -> str:
    """The function in which a frame that goes on behind a graph break began."""
    found = _RESUMED.match(name)
    return found[1] if found else name


# --------------------------------------------------------------------------- places


def place_of(file: str, line: int, function: str, model: ModelView | None = None) -> str:
    """``train.py:31 in forward (module encoder.0, a Block)``; the module where one of ``model`` has that line."""
    where = f"{os.path.basename(file)}:{line} in {function}"
    modules = modules_at(file, line, model)
    if not modules:
        return where
    name, kind = modules[0]
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    return f"{where} (module {name}{more}, a {kind})" if name else f"{where} (the model, a {kind})"


def modules_at(file: str, line: int, model: ModelView | None) -> list[tuple[str, str]]:
    """``(name, class)`` of the modules whose class has a method with that line. Empty without a model."""
    if model is None:
        return []
    holds: dict[type, bool] = {}
    found = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in holds:
            holds[kind] = _has_line(kind, file, line)
        if holds[kind]:
            found.append((name, kind.__name__))
    return found


def _has_line(kind: type, file: str, line: int) -> bool:
    for value in vars(kind).values():
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        if code is None or code.co_filename != file:
            continue
        lines = [number for _, _, number in code.co_lines() if number]
        if lines and code.co_firstlineno <= line <= max(lines):
            return True
    return False


# --------------------------------------------------------------------------- the probe


class CompilationProbe:
    """Reads Dynamo's counters. Says nothing while nothing was compiled, and never loads Dynamo.

    The counters are those of the process: in one that has trained before (pytest, a notebook) the run counts from its own start.
    """

    name = "compilation"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("compile.recompiles", "Compilations of a frame beyond its first, since the start.", needs=("compile",)),
        Metric(
            "compile.limit_hits",
            "Functions that Dynamo gave up on because they were recompiled too often, since the start.",
            needs=("compile",),
        ),
        Metric("compile.graph_breaks", "Graph breaks met while compiling, since the start.", needs=("compile",)),
        Metric("compile.seconds", "Time in the compiler, since the start.", "s", needs=("compile",)),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._start = compile_log()
        self._frames, self._before = _compiled()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        frames, counts = _compiled()
        if frames == self._frames:
            self.rests_until = next_look(event.step, LOOK_EVERY, LOOK_SELDOM)
            return ()
        if frames < self._frames:  # somebody has reset Dynamo, which forgets its frames
            self._frames, self._before = 0, {**self._before, "compile.recompiles": 0.0}
        model, start = event.model, self._start
        _remembered()  # before Dynamo forgets
        details = {
            "compile.graph_breaks": lambda: break_facts(compile_log(start), model),
            "compile.recompiles": lambda: recompile_facts(compile_log(start), model),
            "compile.limit_hits": lambda: recompile_facts(compile_log(start), model),
        }
        samples = [
            Sample(metric, event.step, max(0.0, count - self._before.get(metric, 0.0)), detail=details.get(metric))
            for metric, count in counts.items()
        ]
        if demand.wants("compile.seconds"):
            log = compile_log(start)
            samples.append(Sample("compile.seconds", event.step, log.seconds, detail=lambda: time_facts(log, model)))
        return samples


def break_facts(log: CompileLog, model: ModelView | None = None) -> Mapping[str, Any]:
    """What an alert about graph breaks says: the first with place, reason and change; the others with their places."""
    if not log.graph_breaks:
        return {}
    first, *others = log.graph_breaks
    facts: dict[str, Any] = {"where": first.place(model), "reason": first.reason, "change": first.advice}
    return facts | _also([f"{one.place(model)}: {one.reason.partition(':')[0]}; {one.advice}" for one in others])


def recompile_facts(log: CompileLog, model: ModelView | None = None) -> Mapping[str, Any]:
    """What an alert about recompilations says: the function that was compiled most often, and its guards."""
    if not log.recompiles:
        return {}
    first, *others = sorted(log.recompiles, key=lambda one: -one.times)
    facts: dict[str, Any] = {"where": first.place(model), "guard": _often(first), "change": first.advice}
    return facts | _also([f"{one.place(model)}: {_often(one)}" for one in others])


def _often(one: Recompile) -> str:
    return f"{one.guard}, {one.times} times" if one.times > 1 else one.guard


def time_facts(log: CompileLog, model: ModelView | None = None) -> Mapping[str, Any]:
    """What an alert about compile time says: functions by their time."""
    slowest = sorted(log.functions, key=lambda one: -one.seconds)
    if not slowest:
        return {}
    texts = [f"{one.place(model)}: {one.seconds:.1f} s in {one.compilations} compilations" for one in slowest]
    return {"where": slowest[0].place(model), "slowest": texts[0].partition(": ")[2]} | _also(texts[1:])


def _also(texts: list[str]) -> dict[str, str]:
    facts = {f"also_{i}": text for i, text in enumerate(texts[:NAMED], start=2)}
    return facts | ({"more": f"{len(texts) - NAMED} more"} if len(texts) > NAMED else {})


def _compiled() -> tuple[int, dict[str, float]]:
    """Compilations of frames in this process so far, and the counters by metric."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return 0, {}
    made = list((getattr(frames, "FRAME_COMPILE_COUNTER", None) or {}).values())
    counts = {"compile.recompiles": float(sum(made) - len(made))}
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters is not None:
        gave_up = [n for reason, n in counters.get("unimplemented", {}).items() if "recompile limit" in reason.lower()]
        counts["compile.limit_hits"] = float(sum(gave_up))
        breaks = sum(counters["graph_break"].values()) if "graph_break" in counters else 0
        counts["compile.graph_breaks"] = float(breaks)
    return sum(made), counts
