"""Ranks that are slower than others, and in which phase of their steps: from what each rank says of its own time.

A step of a job takes as long on every rank, because they meet in it: how long a rank's step takes says nothing. So only the phases
are compared in which a rank is by itself: until its forward pass, until its backward pass, until it enters a collective after that, and
in its optimizer. The time inside of collectives is that of waiting for others, and no score. The reductions of DDP are made inside of
the backward pass, which therefore has none under DDP: of a rank that is slow there the others cannot be distinguished.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low, quantiles
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow
from healthcheck.core.runinfo import RankTalk, RunFacts
from healthcheck.core.samples import Metric, Sample
from healthcheck.probes.labels import first_few
from healthcheck.probes.memory_readings import waited_for_cpu
from healthcheck.probes.parity import group_text, groups_of

WINDOW = 20
"""Steps of which a rank tells the median."""
LEAST = 0.02
"""Seconds that a phase must take longer than on other ranks to be worth a word."""
FEWEST = 6
"""Steps from which there is one."""
PHASES = {
    "data": "from the update before to the forward pass: drawing data, and what else the loop does there",
    "forward": "from there to the backward pass",
    "backward": "in the backward pass, where nothing waits for other ranks in it",
    "collective": "between the backward pass and the collectives after it, and from one of these to the next",
    "optimizer": "in the optimizer's step",
}
EVERY = 20
AS_SLOW = 0.75
"""Part of the slowest rank's delay from which another rank is named beside it: it would be the slowest in a moment."""
SHOWN = 64
"""Ranks whose times are recorded, the slowest of more."""


class RankTimesProbe:
    """Tells the median time of each phase on every rank; compares them on the rank that hears.

    The score of a rank is how much longer its phase takes than that of the median rank, as a part of the median rank's step. It is
    given once the same rank was the slowest in the same phase, or about as slow, in two comparisons in a row.
    """

    name = "rank-times"
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.STEP_END)
    noted = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        *(
            Metric(
                f"ranks.slow_{phase}",
                f"How much longer the slowest rank takes {help}, as a part of the step of the median rank.",
                "fraction",
                needs=("several data-parallel ranks",),
            )
            for phase, help in PHASES.items()
        ),
        Metric(
            "ranks.time",
            f"Seconds of a step for which a rank is by itself, waiting for no other: its phases together, each the median of up to "
            f"{WINDOW} steps (label `rank`; the {SHOWN} slowest).",
            "s",
            needs=("several data-parallel ranks",),
        ),
    )

    def __init__(self) -> None:
        self.idle = True
        self.rests_until = self.events_from = 0
        self._run: RunFacts | None = None
        self._every = EVERY
        self._last: float | None = None
        self._times: deque[tuple[float, dict[str, float]]] = deque(maxlen=WINDOW)
        self._met = 0
        """Steps in a row that entered a collective of their own."""
        self._said = 0
        self._waited: tuple[int, float] | None = None
        """Step of the last word, and seconds for which this thread had waited for a processor by then."""
        self._slowest: dict[tuple[str, tuple[int, ...]], tuple[list[int], int]] = {}
        """Phase and group -> the slowest ranks of the last comparison, and since which step one of them was."""

    def plan(self, demand: Demand) -> None:
        wanted = [demand.every_of(metric.key) for metric in self.provides if demand.wants(metric.key)]
        self._every = min([every for every in wanted if every > 1], default=EVERY)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_START:
            self._run = event.run
            self.idle = event.run is None or event.run.world_size < 2
            self._last = None
            if self.idle:
                self.rests_until = self.events_from = sys.maxsize
        return ()

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        run = self._run
        if self.idle or run is None or run.ranks is None:
            return ()
        for row in rows:
            if row.over and row.ends:
                self._take(row)
                if row.step % self._every == 0 and row.step != self._said and len(self._times) >= FEWEST:
                    self._said = row.step
                    self._say(run, run.ranks, row.step)
        if not run.ranks.hears:
            return ()
        step = rows[-1].step
        found: list[Sample] = []
        for at, words in run.ranks.heard("times"):
            found += self._compare(at, step, words)
        for sample in found:
            sample.time = rows[-1].time
        return found

    # -- this rank --------------------------------------------------------------------------

    def _take(self, row: StepRow) -> None:
        before, self._last = self._last, row.time
        if before is None or not row.passes or not row.attempted or row.collectives is None or row.time <= before:
            return
        forward_at, pass_ended, inside, delayed = row.collectives
        begins = row.passes[0]
        phases: dict[str, float] = {"optimizer": row.time - row.update_time}
        if forward_at and before <= forward_at - row.origin <= begins:
            phases["data"] = forward_at - row.origin - before
            phases["forward"] = begins - (forward_at - row.origin)
        elif row.data_wait is not None:
            phases["data"] = row.data_wait
            phases["forward"] = max(0.0, begins - before - row.data_wait)
        else:
            phases["forward"] = begins - before
        wrapped = bool(self._run and self._run.replicas.wrappers())
        if pass_ended and not wrapped:
            phases["backward"] = pass_ended - row.origin - begins
        if inside:
            self._met += 1
            phases["collective"] = delayed
            # What the forward pass waited for others is no time of its own.
            phases["forward"] = max(0.0, phases["forward"] - (inside if not delayed else 0.0))
        else:
            self._met = 0
        self._times.append((row.time - before, phases))

    def _say(self, run: RunFacts, talk: RankTalk, step: int) -> None:
        group = run.replicas.data_group
        if not group:
            found = run.replicas.modules()
            group = found[0][1] if found else ()
        if not group and self._met >= len(self._times):
            group = tuple(range(talk.world_size))  # ranks that meet at every step, as the loop itself sees to it
        if len(group) < 2:
            return
        phases = {
            phase: [float(f"{cut:.4g}") for cut in quantiles((parts[phase] for _, parts in self._times), n=4)]
            for phase in PHASES
            if all(phase in parts for _, parts in self._times)
        }
        whole = median(taken for taken, _ in self._times)
        waited = waited_for_cpu()
        before, self._waited = self._waited, (step, waited)
        queued = max(0.0, waited - before[1]) / max(1, step - before[0]) if before is not None else 0.0
        word = {"d": group_text(group), "p": phases, "t": float(f"{whole:.4g}"), "w": float(f"{queued:.4g}")}
        self._times.clear()
        if before is not None:  # the first steps are those in which everything is made
            talk.say("times", step, word)

    # -- all of them ------------------------------------------------------------------------

    def _compare(self, at: int, step: int, words: Mapping[int, Mapping[str, Any]]) -> list[Sample]:
        groups = groups_of(words, "d")
        worst: dict[str, tuple[float, dict[str, Any]]] = {}
        alone: dict[int, float] = {}
        for group, members in groups.items():
            alone |= {rank: sum(cuts[1] for cuts in said["p"].values()) for rank, said in members.items()}
            whole = median(said["t"] for said in members.values())
            for phase in PHASES:
                times = {rank: said["p"][phase] for rank, said in members.items() if phase in said["p"]}
                if len(times) < 2 or whole <= 0:
                    continue
                queued = {rank: float(said.get("w", 0.0)) for rank, said in members.items()}
                score, facts = self._score(phase, group, times, whole, at, queued)
                if phase not in worst or score > worst[phase][0]:
                    worst[phase] = score, facts
        shown = sorted(sorted(alone, key=alone.__getitem__, reverse=True)[:SHOWN])
        return [
            *(Sample("ranks.time", step, alone[rank], (("rank", str(rank)),)) for rank in shown),
            *(
                Sample(f"ranks.slow_{phase}", step, score, detail=lambda facts=facts: facts)  # type: ignore[misc]
                for phase, (score, facts) in worst.items()
            ),
        ]

    def _score(
        self,
        phase: str,
        group: tuple[int, ...],
        cuts: Mapping[int, Sequence[float]],
        whole: float,
        at: int,
        queued: Mapping[int, float],
    ) -> tuple[float, dict[str, Any]]:
        times = {rank: quarter[1] for rank, quarter in cuts.items()}
        usual, queue = median_low(times.values()), median_low(queued.values())
        # A rank that waits for a processor is slow because of what else runs on its machine, and another one in a moment. What
        # all of them wait alike is in the usual time as well.
        delays = {rank: taken - usual - max(0.0, queued[rank] - queue) for rank, taken in times.items()}
        rank = max(times, key=times.__getitem__)
        longer = delays[rank]
        slow = sorted(r for r, delay in delays.items() if r == rank or delay >= AS_SLOW * longer > 0)
        before = self._slowest.get((phase, group))
        since = before[1] if before is not None and not set(before[0]).isdisjoint(slow) else at
        self._slowest[phase, group] = slow, since
        score = longer / whole
        # Times that vary by as much as ranks are apart say nothing, nor do milliseconds on a busy machine.
        if longer < LEAST or cuts[rank][0] <= median_low(quarter[2] for quarter in cuts.values()):
            score, since = min(score, 0.0), at
            self._slowest.pop((phase, group), None)
        facts = {
            "ranks": first_few([str(each) for each in slow]),
            "phase": f"{phase}, {times[rank] * 1e3:,.0f} ms where the median rank takes {usual * 1e3:,.0f} of a step of "
            f"{whole * 1e3:,.0f} ms",
            "since": f"step {since:,} at the latest",
        }
        return (score if since < at else 0.0), facts
