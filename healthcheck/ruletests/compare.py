"""What a test expected against what was played: the differences, and nothing else."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from healthcheck.rulelang.document import KeyPath
from healthcheck.ruletests.loading import Expected, RuleTest
from healthcheck.ruletests.play import Episode, Played


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that came out otherwise."""

    rule: str
    text: str
    """``expected to fire at step 302, fired at 303``."""
    kind: str
    """``fires``, ``silent`` (never fired), ``unexpected``, ``clears``, or the name of another key."""
    where: KeyPath = ()
    """Place in the test file: the entry of ``expect``, or the test."""
    wanted: int | None = None
    """Step that was expected, where one was."""
    happened: int | None = None
    """Step at which it happened instead."""
    rank: int = 0
    series: str = ""
    cause: str = ""
    """``rule.cause`` that it is about, where it is about one."""


def compare(test: RuleTest, played: Played) -> list[Difference]:
    """All differences, in the order of ``expect``; unexpected alerts come last.

    An entry names a rule, and means its episodes, or ``rule.cause``, and means what that cause found in them.

    Each entry with ``fires`` takes one episode per step, exact matches first; an entry without
    takes all that nobody else took. What is left over was not expected: the world is closed.
    """
    taken: dict[int, list[Episode]] = {i: [] for i in range(len(test.expect))}
    free, optional = _named(test, played)
    free += optional
    dated = [(i, entry) for i, entry in enumerate(test.expect) if entry.fires is not None]
    for i, entry in dated:
        for step in entry.fires or ():
            _take(free, taken[i], (e for e in free if _fits(entry, e) and e.alert.fired_step == step))
    for i, entry in dated:  # what fired at another step, in order: the likeliest meaning
        while len(taken[i]) < len(entry.fires or ()) and _take(free, taken[i], (e for e in free if _fits(entry, e))):
            pass
    for i, entry in enumerate(test.expect):
        if entry.fires is None:
            while _take(free, taken[i], (e for e in free if _fits(entry, e))):
                pass
    found: list[Difference] = []
    for i, entry in enumerate(test.expect):
        found += _entry(entry, sorted(taken[i], key=lambda e: e.alert.fired_step), played)
    left = [episode for episode in free if not any(episode is known for known in optional)]
    return found + [_unexpected(test, episode, len(played.engines)) for episode in left]


def _named(test: RuleTest, played: Played) -> tuple[list[Episode], list[Episode]]:
    """The episodes as this test names them: by rule, or in parts by cause; and parts of those that it names by rule."""
    names = {entry.rule for entry in test.expect}
    must: list[Episode] = []
    may: list[Episode] = []
    for episode in played.episodes:
        alert = episode.alert
        by_cause = alert.cause and any(name.startswith(f"{alert.rule}.") for name in names)
        if not by_cause or alert.rule in names:
            must.append(episode)
        if by_cause:
            parts = [episode.part(finding.cause) for finding in alert.findings]
            (may if alert.rule in names else must).extend(parts)
    return must, may


def _take(free: list[Episode], into: list[Episode], candidates: Iterator[Episode]) -> bool:
    episode = next(candidates, None)
    if episode is None:
        return False
    free.remove(episode)
    into.append(episode)
    return True


def _fits(entry: Expected, episode: Episode) -> bool:
    return entry.rule == episode.name and (entry.rank is None or entry.rank == episode.alert.rank)


def _entry(entry: Expected, episodes: list[Episode], played: Played) -> Iterable[Difference]:
    steps = [e.alert.fired_step for e in episodes]
    wanted = list(entry.fires or ())
    on_rank = f" on rank {entry.rank}" if entry.rank is not None else ""
    rank = entry.rank if entry.rank is not None else min(played.engines)
    if not episodes:
        at = f" at {_steps(wanted)}" if wanted else ""
        first = wanted[0] if wanted else None
        yield Difference(
            entry.rule, f"expected to fire{at}{on_rank}, never fired", "silent", entry.where, first, rank=rank
        )
        return
    if wanted and steps != sorted(wanted):
        away, came = _first_apart(sorted(wanted), steps)
        did = f"{steps[0]:,}" if len(steps) == 1 else _steps(steps)
        text = f"expected to fire at {_steps(wanted)}{on_rank}, fired at {did}"
        kind = "fires" if came is not None else "silent"
        yield _about(entry, episodes[0], text, kind, away, came)
    if entry.clears is not None:
        yield from _clears(entry, episodes)
    for episode in episodes:
        yield from _details(entry, episode)


def _clears(entry: Expected, episodes: list[Episode]) -> Iterable[Difference]:
    for wanted, episode in zip(entry.clears or (), episodes, strict=False):
        if episode.clears != wanted:
            did = f"cleared at {episode.clears}" if episode.clears is not None else "never cleared"
            text = f"expected to clear at step {wanted:,}, {did}"
            yield _about(entry, episode, text, "clears", wanted, episode.clears)


def _about(
    entry: Expected, episode: Episode, text: str, kind: str, wanted: int | None, happened: int | None
) -> Difference:
    rank = episode.alert.rank
    return Difference(entry.rule, text, kind, entry.where, wanted, happened, rank, _series(episode), episode.alert.name)


def _details(entry: Expected, episode: Episode) -> Iterable[Difference]:
    alert = episode.alert
    at = f" (step {alert.fired_step:,})"

    def differs(key: str, wanted: object, found: object) -> Difference:
        text = f"`{key}`: expected {wanted}, was {found}{at}"
        return _about(entry, episode, text, key, None, alert.fired_step)

    if entry.then is not None and sorted(entry.then) != sorted(episode.actions):
        held = "".join(f"; {name} was held: {why}" for name, why in episode.held.items())
        yield differs("then", _names(entry.then), _names(episode.actions) + held)
    if entry.severity is not None and entry.severity != str(alert.severity):
        yield differs("severity", entry.severity, alert.severity)
    if entry.count is not None and entry.count != alert.count:
        yield differs("count", f"{entry.count} series", f"{alert.count}")
    names = [fact.name for fact in alert.series]
    if entry.series is not None and not any(name == entry.series or _glob(entry.series, name) for name in names):
        yield differs("series", entry.series, ", ".join(names))
    if entry.message is not None and not (entry.message in alert.message or _glob(entry.message, alert.message)):
        yield differs("message", f'"{entry.message}"', f'"{alert.message}"')
    also = [finding.cause for finding in alert.also]
    if entry.also is not None and sorted(entry.also) != sorted(also):
        yield differs("also", _names(entry.also), _names(also))
    if entry.explained_by is not None and entry.explained_by != alert.explained_by:
        yield differs("explained_by", entry.explained_by, alert.explained_by or "not explained")


def _unexpected(test: RuleTest, episode: Episode, ranks: int) -> Difference:
    alert = episode.alert
    on = f" on rank {alert.rank}" if ranks > 1 else ""
    listed = [entry for entry in test.expect if entry.rule == episode.name]
    why = "no alert was expected" if not test.expect else "it is not in `expect`"
    if listed:
        why = (
            "only "
            + " and ".join(_steps(list(e.fires)) if e.fires else f"rank {e.rank}" for e in listed)
            + " was expected"
        )
    text = f"fired at step {alert.fired_step:,}{on}, and {why}: {alert.message}"
    if alert.explained_by:
        text += f" (explained by {alert.explained_by})"
    where = listed[0].where if listed else (*test.where, "expect")
    step, rank = alert.fired_step, alert.rank
    return Difference(episode.name, text, "unexpected", where, None, step, rank, _series(episode), alert.name)


def _series(episode: Episode) -> str:
    return episode.alert.series[0].name if episode.alert.series else ""


def _first_apart(wanted: list[int], steps: list[int]) -> tuple[int | None, int | None]:
    missing = [step for step in wanted if step not in steps]
    extra = [step for step in steps if step not in wanted]
    return (missing[0] if missing else None), (extra[0] if extra else None)


def _steps(steps: list[int]) -> str:
    listed = [f"{step:,}" for step in steps]
    if len(listed) == 1:
        return f"step {listed[0]}"
    return f"steps {', '.join(listed[:-1])} and {listed[-1]}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _glob(pattern: str, text: str) -> bool:
    """``*`` and ``?`` only: brackets belong to series names."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))
