"""Graph breaks, recompilations and compile time of a run, as a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from healthcheck import CompileLog, ModelView, Session, compile_log, hookimpl

from healthcheck_performance.profiling import Countdown

COMPILE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "log_file": {"type": "string", "minLength": 1, "description": "File to write (default graph_breaks.log)."},
        "skip": {"type": "integer", "minimum": 0, "description": "Steps whose compilations do not count (default 0)."},
        "fullgraph": {
            "type": "boolean",
            "description": "Have torch.compile ask for fullgraph=True: the first graph break ends the run (default false).",
        },
    },
}
RULE = "=" * 80


class GraphBreakLog:
    """Write what ``torch.compile`` broke, compiled again and took time for, with places and what to change.

    :param log_file: the file; replaced after the first step that counts, and at the end.
    :param skip: steps at the start whose compilations are left out.
    :param fullgraph: compile what is compiled from now on with ``fullgraph=True``, so that the first graph break raises.
    """

    name = "performance-compile"

    def __init__(self, log_file: str = "graph_breaks.log", skip: int = 0, fullgraph: bool = False) -> None:
        self.log_file, self.skip, self.fullgraph = Path(log_file), skip, fullgraph
        self.log = CompileLog()
        self._start: CompileLog | None = None
        self._model: ModelView | None = None
        self._failure = ""
        self._undo: list[Callable[[], None]] = []

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        self._session = session
        self._start = compile_log()
        if self.fullgraph:
            self._undo.append(ask_for_fullgraph())
        self._undo.append(session.on("train_start", lambda event: setattr(self, "_model", event.model)))
        self._undo.append(session.on("train_end", lambda event: self._over()))
        self._undo.append(session.on("exception", lambda event: self._failed(event.exception)))
        self._countdown = Countdown(session, self.skip or 1, self._counts)

    def _counts(self) -> None:
        if self.skip:
            self._start = compile_log()
            self._countdown = Countdown(self._session, 1, self.write)
        else:
            self.write()

    def _over(self) -> None:
        self._countdown.cancel()
        while self._undo:
            self._undo.pop()()
        before = self.log
        if self.write() or before.functions:
            self._session.note(f"{self.sentence()}: {self.log_file}")

    def _failed(self, error: BaseException | None) -> None:
        if self.fullgraph and error is not None and type(error).__module__.startswith("torch._dynamo"):
            self._failure = f"fullgraph=True: {error}\n"
            self.write()

    def sentence(self) -> str:
        """``2 graph breaks, 1 recompilation, 3.1 s in the compiler``."""
        log = self.log
        breaks, again = len(log.graph_breaks), len(log.recompiles)
        return (
            f"{breaks} graph break{'' if breaks == 1 else 's'}, {again} recompilation{'' if again == 1 else 's'}, "
            f"{log.seconds:.1f} s in the compiler"
        )

    def write(self) -> bool:
        """Write the file; whether anything was compiled since the steps that are skipped."""
        self.log = compile_log(self._start)
        if not self._failure and not self.log.functions and not self.log.graph_breaks:
            return False
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file.write_text(log_text(self.log, self._model) + self._failure, encoding="utf-8")
        return True

    @hookimpl
    def healthcheck_performance(
        self, session: Session, performance: dict[str, Any]
    ) -> Mapping[str, Mapping[str, Any]] | None:
        if not self.log.functions:
            return {}
        rows: list[dict[str, Any]] = [
            {"place": one.place(self._model), "what": "graph break", "why": one.reason, "change": one.advice}
            for one in self.log.graph_breaks
        ]
        rows += [
            {"place": one.place(self._model), "what": "recompiled", "why": one.guard, "change": one.advice}
            for one in self.log.recompiles
        ]
        rows += [
            {"place": one.place(self._model), "what": f"{one.seconds:.2f} s in {one.compilations} compilations"}
            for one in sorted(self.log.functions, key=lambda one: -one.seconds)[:10]
        ]
        return {"performance.compile": {"text": self.sentence(), "value": self.log.seconds, "unit": "s", "rows": rows}}


def log_text(log: CompileLog, model: ModelView | None = None) -> str:
    """The file: one block for each graph break and recompilation, then time by function."""
    parts = []
    for one in log.graph_breaks:
        modules = one.modules(model)
        head = ", ".join(name or kind for name, kind in modules[:3]) or one.function
        parts.append(
            f"{RULE}\n{head}\n{one.file}:{one.line} - Graph break due to:\n  - {one.reason}\n  - Suggested fix: {one.advice}\n"
        )
    parts += [
        f"{RULE}\n{again.function}\n{again.file}:{again.line} - Recompiled because of:\n  - {again.guard}\n"
        f"  - Suggested fix: {again.advice}\n"
        for again in log.recompiles
    ]
    parts.append(f"{RULE}\nCompile time: {log.seconds:.2f} s\n")
    for function in sorted(log.functions, key=lambda one: -one.seconds):
        place = f"{function.file}:{function.line} {function.function}"
        parts.append(f"  {function.seconds:8.2f} s  {function.compilations:3} compilations  {place}\n")
    return "".join(parts)


def ask_for_fullgraph() -> Callable[[], None]:
    """From now on ``torch.compile`` and ``Module.compile`` ask for ``fullgraph=True``; returns what ends that."""
    import torch

    of_torch, of_module = torch.compile, torch.nn.Module.compile

    def compile(model: Any = None, **options: Any) -> Any:
        return of_torch(model, **{**options, "fullgraph": True})

    def compile_module(module: Any, *args: Any, **options: Any) -> Any:
        return of_module(module, *args, **{**options, "fullgraph": True})

    torch.compile, torch.nn.Module.compile = compile, compile_module

    def undo() -> None:
        if torch.compile is compile:
            torch.compile = of_torch
        if torch.nn.Module.compile is compile_module:
            torch.nn.Module.compile = of_module

    return undo
