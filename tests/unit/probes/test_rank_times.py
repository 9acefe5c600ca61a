"""Slow ranks, from what each rank says of the phases of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.core.rows import StepRow
from healthcheck.core.runinfo import RunFacts
from healthcheck.probes.rank_times import RankTimesProbe


class Ranks:
    """Hears what a test gives it to hear."""

    rank, world_size, hears = 0, 4, True

    def __init__(self) -> None:
        self.words: list[tuple[int, Mapping[int, Mapping[str, Any]]]] = []
        self.said: list[Mapping[str, Any]] = []

    def say(self, topic: str, step: int, values: Mapping[str, Any]) -> None:
        self.said.append(values)

    def heard(self, topic: str) -> list[tuple[int, Mapping[int, Mapping[str, Any]]]]:
        words, self.words = self.words, []
        return words


def probe() -> tuple[RankTimesProbe, Ranks]:
    ranks, made = Ranks(), RankTimesProbe()
    made._run, made.idle = RunFacts(world_size=4), False
    made._run.ranks = ranks  # type: ignore[assignment]
    return made, ranks


def words(**phases: list[float]) -> dict[int, dict[str, Any]]:
    """Medians of four ranks in seconds; steps of 0.26 s, quartiles 5 % around."""
    return {
        rank: {
            "d": "0:3:1",
            "t": 0.26,
            "p": {name: [times[rank] * 0.95, times[rank], times[rank] * 1.05] for name, times in phases.items()},
        }
        for rank in range(4)
    }


def judged(*checks: dict[int, dict[str, Any]]) -> list[tuple[dict[str, float], dict[str, dict[str, Any]]]]:
    made, ranks = probe()
    found = []
    for number, said in enumerate(checks, start=1):
        ranks.words = [(20 * number, said)]
        samples = list(made.sample_rows([StepRow(20 * number)], None))  # type: ignore[arg-type]
        details = {s.metric: dict(s.detail()) for s in samples if s.detail is not None}
        scores = {s.metric.removeprefix("ranks.slow_"): s.value for s in samples if not s.labels}
        found.append((scores, details))
    return found


SLOW = words(data=[0.2, 0.2, 0.26, 0.2], forward=[0.01, 0.01, 0.01, 0.01])


def test_a_rank_is_named_once_it_was_the_slowest_twice_in_the_same_phase() -> None:
    (first, _), (second, details) = judged(SLOW, SLOW)
    assert first == {"data": 0.0, "forward": 0.0}
    assert round(second["data"], 2) == 0.23
    assert second["forward"] == 0.0
    assert details["ranks.slow_data"]["ranks"] == "2"
    assert "260 ms where the median rank takes 200" in details["ranks.slow_data"]["phase"]


def test_another_rank_each_time_is_nobody() -> None:
    other = words(data=[0.2, 0.26, 0.2, 0.2])
    assert [score["data"] for score, _ in judged(SLOW, other, SLOW)] == [0.0, 0.0, 0.0]


def test_ranks_that_are_about_as_slow_are_named_together_whichever_is_the_slowest_at_the_moment() -> None:
    first = words(data=[0.2, 0.258, 0.26, 0.2], forward=[0.01, 0.01, 0.01, 0.01])
    second = words(data=[0.2, 0.26, 0.258, 0.2], forward=[0.01, 0.01, 0.01, 0.01])
    _, (scores, details) = judged(first, second)
    assert round(scores["data"], 2) == 0.23
    assert details["ranks.slow_data"]["ranks"] == "1, 2"


def test_a_rank_that_is_slow_by_half_as_much_is_not_named_beside_the_slowest() -> None:
    said = words(data=[0.2, 0.23, 0.26, 0.2])
    _, (_, details) = judged(said, said)
    assert details["ranks.slow_data"]["ranks"] == "2"


def test_times_that_vary_as_much_as_ranks_differ_and_milliseconds_say_nothing() -> None:
    wide = words(data=[0.2, 0.2, 0.26, 0.2])
    for said in wide.values():
        said["p"]["data"][0] *= 0.5
        said["p"]["data"][2] *= 1.5
    short = {rank: {**said, "t": 0.026} for rank, said in words(data=[0.02, 0.02, 0.026, 0.02]).items()}
    assert [score["data"] for score, _ in judged(wide, wide)] == [0.0, 0.0]
    assert [score["data"] for score, _ in judged(short, short)] == [0.0, 0.0]


def test_a_rank_that_waits_for_a_processor_is_not_blamed_for_it() -> None:
    busy = {rank: {**said, "w": 0.05 if rank == 2 else 0.0} for rank, said in SLOW.items()}
    assert [score["data"] for score, _ in judged(busy, busy)] == [0.0, 0.0]


def row(step: int, **more: Any) -> StepRow:
    made = StepRow(
        step, attempted=True, ends=True, over=True, time=step * 1.0, update_time=step - 0.1, passes=[step - 0.5]
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_rank_tells_its_phases_and_leaves_the_wait_in_collectives_out() -> None:
    made, ranks = probe()
    made._run.collectives = None  # type: ignore[union-attr]
    rows = [row(step, collectives=(0.0, step - 0.4, 0.2, 0.05), data_wait=0.25) for step in range(1, 42)]
    list(made.sample_rows(rows, None))  # type: ignore[arg-type]
    [said] = ranks.said
    cuts = {phase: round(times[1], 3) for phase, times in said["p"].items()}
    assert cuts == {"data": 0.25, "forward": 0.25, "backward": 0.1, "collective": 0.05, "optimizer": 0.1}


def test_the_time_of_each_rank_is_recorded_and_of_many_ranks_the_slowest() -> None:
    made, ranks = probe()
    said = {
        rank: {"d": "0:99:1", "t": 1.0, "p": {"data": [0.1, 0.1 + rank / 1000, 0.5], "optimizer": [0.1, 0.1, 0.1]}}
        for rank in range(100)
    }
    ranks.words = [(20, said)]
    times = [s for s in made.sample_rows([StepRow(20)], None) if s.metric == "ranks.time"]  # type: ignore[arg-type]
    assert [dict(s.labels)["rank"] for s in times] == [str(rank) for rank in range(36, 100)]
    assert times[0].value == 0.1 + 36 / 1000 + 0.1
