"""Small tools over what is measured anyway: throughput, memory, compile time, a report, and what the run is bound by."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from healthcheck import Session, hookimpl

from healthcheck_performance.compiling import GraphBreakLog
from healthcheck_performance.profiling import WARMUP, Profile, profiler_of


def measure(session: Any, *metrics: str) -> None:
    """Have metrics measured that no rule asks for; a session that cannot is left as it is."""
    collect = getattr(session, "collect", None)
    if collect is not None:
        collect(*metrics)


class Throughput:
    """Samples per second from ``warmup_steps`` on: a line at the end, a number at any time.

    :param warmup_steps: steps at the start that do not count.
    :param every: steps between two lines; 0 for none.
    """

    name = "performance-throughput"

    def __init__(self, warmup_steps: int = 10, every: int = 100) -> None:
        self.warmup_steps, self.every = warmup_steps, every
        self.values: list[float] = []

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        self._session = session
        measure(session, "throughput")
        self.skip = max(self.warmup_steps, int(session.user_state.get(WARMUP, 0)))
        session.on("samples", self._samples)
        session.on("train_end", lambda event: self._over())

    def _samples(self, step: int, samples: Any) -> None:
        for sample in samples:
            if sample.metric == "throughput" and sample.step > self.skip:
                self.values.append(float(sample.value))
                if self.every and sample.step % self.every == 0:
                    self._session.note(f"throughput: {self.mean:.2f} a second since step {self.skip + 1:,}")

    @property
    def mean(self) -> float:
        """Samples (or steps, where the size of a batch is unknown) per second; 0.0 before there are any.

        Harmonic: what the run as a whole did.
        """
        values = [value for value in self.values if value > 0]
        return statistics.harmonic_mean(values) if values else 0.0

    def _over(self) -> None:
        if self.values:
            self._session.note(f"throughput: {self.mean:.2f} a second over {len(self.values):,} steps")

    @hookimpl
    def healthcheck_performance(
        self, session: Session, performance: dict[str, Any]
    ) -> Mapping[str, Mapping[str, Any]] | None:
        if not self.values:
            return {}
        text = f"{self.mean:.4g} a second after {self.skip:,} steps of warm-up"
        return {"performance.throughput": {"text": text, "value": self.mean, "unit": "1/s"}}


MEMORY = ("memory.allocated", "memory.reserved", "memory.peak", "memory.fragmentation", "memory.host")


class Memory:
    """Memory every so many steps, in a file at the end; fragmentation above 30 % is said at once.

    :param profile_every: steps between two readings.
    :param file: JSON, a list with one entry for each reading; bytes, where the device has that reading.
    """

    name = "performance-memory"

    def __init__(self, profile_every: int = 100, file: str = "memory_profile.json") -> None:
        self.profile_every, self.file = profile_every, Path(file)
        self.stats: list[dict[str, float]] = []

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        self._session = session
        measure(session, *MEMORY)
        session.on("samples", self._samples)
        session.on("train_end", lambda event: self._over())

    def _samples(self, step: int, samples: Any) -> None:
        for sample in samples:
            if sample.metric in MEMORY and sample.step % self.profile_every == 0:
                if not self.stats or self.stats[-1]["step"] != sample.step:
                    self.stats.append({"step": sample.step})
                self.stats[-1][sample.metric] = float(sample.value)
                if sample.metric == "memory.fragmentation" and sample.value > 0.3:
                    self._session.note(
                        f"memory: {sample.value:.1%} of what is reserved is not in use at step {sample.step:,}"
                    )

    def _over(self) -> None:
        if self.stats:
            self.file.write_text(json.dumps(self.stats, indent=2), encoding="utf-8")
            self._session.note(f"memory of {len(self.stats):,} steps: {self.file}")


class CompileTimes(GraphBreakLog):
    """Time in the compiler and graph breaks by function, said at the end."""

    name = "performance-compile-times"

    def __init__(self) -> None:
        super().__init__("")

    @property
    def compile_times(self) -> dict[str, float]:
        """Function -> seconds."""
        return {one.place(self._model): one.seconds for one in self.log.functions}

    @property
    def graph_breaks(self) -> dict[str, str]:
        """Place -> reason."""
        return {one.place(self._model): one.reason for one in self.log.graph_breaks}

    def write(self) -> bool:
        from healthcheck import compile_log

        self.log = compile_log(self._start)
        return bool(self.log.functions)

    def _over(self) -> None:
        super()._over()
        for place, seconds in sorted(self.compile_times.items(), key=lambda item: -item[1])[:5]:
            self._session.note(f"  {place}: {seconds:.2f} s")


class Analyzer(Profile):
    """Profile a few steps once and say what the run is bound by, why, and what to try.

    :param at: the step before which nothing is recorded; by then a run has warmed up.
    :param active: steps that are recorded.
    :param said: called with the :class:`~healthcheck_performance.analysis.Verdict`.
    """

    name = "performance-analysis"

    def __init__(
        self, at: int = 30, active: int = 4, said: Callable[[Any], None] = lambda verdict: None, **options: Any
    ) -> None:
        super().__init__(finished=self._profiled, wait=at, active=active, flops=True, **options)
        self.said = said
        self.verdict: Any = None

    def _profiled(self, profiled: Any) -> None:
        self.verdict = profiled.verdict
        if self.verdict is not None:
            self._session.note(f"{self.verdict.text}; try: {self.verdict.advice}")
            self.said(self.verdict)


class Reporter:
    """Write ``performance_report.txt`` at the end: time, throughput, memory, compile time, what the device did, advice.

    :param file: the text file.
    """

    name = "performance-report"

    def __init__(self, file: str = "performance_report.txt") -> None:
        self.file = Path(file)

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        measure(
            session,
            "throughput",
            "time.step",
            "time.data",
            "time.forward",
            "time.backward",
            "time.optimizer",
            "memory.peak",
        )

    @hookimpl(trylast=True)
    def healthcheck_performance(
        self, session: Session, performance: dict[str, Any]
    ) -> Mapping[str, Mapping[str, Any]] | None:
        found = profiler_of(session).findings()
        self.file.write_text(report_text(performance, found), encoding="utf-8")
        session.note(f"performance report: {self.file}")
        return None


def report_text(performance: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]]) -> str:
    """The report, from ``performance`` of ``report.json``; what was not measured is left out."""
    lines = ["Performance Report", "==================", "", "Training Summary:"]
    facts = [
        ("Total time", performance.get("training_seconds"), "{:.2f} s"),
        ("Steps", performance.get("steps"), "{:,}"),
        (
            "Average throughput",
            performance.get("samples_per_second") or performance.get("steps_per_second"),
            "{:.2f} a second",
        ),
        ("Peak memory", performance.get("memory", {}).get("peak_bytes", 0) / 2**30 or None, "{:.2f} GB"),
        ("Compilation time", performance.get("compile_seconds"), "{:.2f} s"),
    ]
    lines += [f"- {name}: {form.format(value)}" for name, value, form in facts if value is not None]
    step = performance.get("step", {})
    if step:
        lines += ["", "A step:"]
        lines += [f"- {name}: {value * 1e3:.3g} ms" for name, value in step.items() if name != "of_last"]
    findings = {**performance.get("findings", {}), **more}
    bound = findings.get("performance.bound")
    if bound:
        lines += ["", "Where the time goes:", f"- {bound['text']}"]
        lines += [
            f"- {row['part']}: {row.get('share', row.get('value', row.get('ms')))}" for row in bound.get("rows", ())
        ]
    advice = [one["advice"] for one in findings.values() if one.get("advice") and one.get("bound")]
    lines += ["", "Recommendations:", *(f"- {text}" for text in dict.fromkeys(advice))]
    if not advice:
        lines.append("- none: nothing was found that holds the run up")
    return "\n".join(lines) + "\n"


class Warmup:
    """Nothing that is registered after it measures or profiles before so many steps.

    :param steps: how many.
    """

    name = "performance-warmup"

    def __init__(self, steps: int = 100) -> None:
        self.steps = steps

    @hookimpl(tryfirst=True)
    def healthcheck_configure(self, session: Session) -> None:
        session.user_state[WARMUP] = self.steps
