"""What the engine remembers as plain JSON values, and back: for runs that are resumed.

The clock of a run counts active training from its start, so that it begins again at zero after a
resume. Points in time are therefore saved as how long ago they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import SeriesState
from healthcheck.errors import StateError
from healthcheck.samples import decode_number, encode_number
from healthcheck.verdicts import State

if TYPE_CHECKING:
    from healthcheck.engine.engine import Engine

VERSION = 2

_COUNTS = (
    "n",
    "bucket",
    "streak",
    "clear_streak",
    "episodes",
    "last_step",
    "warm_until",
    "warming",
    "excused_count",
    "peak_step",
)
_TIMES = ("since", "clear_since", "first_time")


def save_engine(engine: Engine) -> dict[str, Any]:
    """Everything that must survive a resume."""
    return {
        "version": VERSION,
        "step": engine.step,
        "rules": {state.rule.id: save_rule(state, engine.now) for state in engine.states},
        **engine.lookups.state_dict(),
    }


def restore_engine(engine: Engine, saved: Mapping[str, Any], now: float) -> list[str]:
    """Restore an engine; returns one sentence for each rule that starts fresh, and why.

    Raises ``StateError`` for a state of another format version.
    """
    if saved.get("version") != VERSION:
        raise StateError(f"saved detector state has version {saved.get('version')!r}, this is {VERSION}")
    step, entries, told = int(saved["step"]), saved["rules"], []
    for state in engine.states:
        entry = entries.get(state.rule.id)
        why = f"{state.rule.id} is new" if entry is None else _restore_or_why(state, entry, now)
        if why:
            state.start_fresh(step)
            told.append(why)
    told += engine.lookups.load_state_dict(saved)
    engine.step, engine.now = step, now
    return told


def _restore_or_why(state: RuleState, entry: Any, now: float) -> str:
    """Restore one rule; why it must start fresh instead, or empty."""
    try:
        if entry["fingerprint"] != state.rule.fingerprint:
            return f"{state.rule.id} starts fresh: its metric or condition changed"
        restore_rule(state, entry, now)
    except Exception as error:  # whatever another version of a condition, or somebody's plugin, makes of it
        return f"{state.rule.id} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
    return ""


def save_rule(state: RuleState, now: float) -> dict[str, Any]:
    return {
        "fingerprint": state.rule.fingerprint,
        "start_step": state.start_step,
        "series": [_save_series(s, now) for s in state.series.values() if s is not None],
        "sides": [side.state() for side in state.sides],
        "firing": [[list(pair) for pair in labels] for labels in sorted(state.firing)],
        "episodes": state.past_episodes + len(state.episodes),
        "action_runs": state.action_runs,
        "last_action_step": state.last_action_step,
        "held": state.held,
    }


def restore_rule(state: RuleState, saved: Mapping[str, Any], now: float) -> None:
    state.start_step = saved["start_step"]  # series that are still to come warm up from there
    for entry in saved["series"]:
        series = state.state_of(tuple((name, value) for name, value in entry["labels"]))
        if series is not None:
            _restore_series(series, entry, now)
    for side, memory in zip(state.sides, saved["sides"], strict=True):
        side.restore(memory)
    state.firing = {tuple((name, value) for name, value in labels) for labels in saved["firing"]}
    state.past_episodes = saved["episodes"]
    state.held = saved["held"]
    state.action_runs = saved["action_runs"]
    state.last_action_step = saved["last_action_step"]


def _save_series(series: SeriesState, now: float) -> dict[str, Any]:
    saved: dict[str, Any] = {name: getattr(series, name) for name in _COUNTS}
    for name in _TIMES:
        at = getattr(series, name)
        saved[name] = None if at is None else now - at
    saved["labels"] = [list(pair) for pair in series.labels]
    saved["state"] = series.state.value
    saved["value"] = encode_number(series.value)
    saved["score"] = encode_number(series.score)
    saved["recent"] = None if series.recent is None else list(series.recent)
    saved["scorer"] = series.scorer.state()
    saved["normal"] = encode_number(series.scorer.normal)
    saved["peak"] = encode_number(series.peak)
    return saved


def _restore_series(series: SeriesState, saved: Mapping[str, Any], now: float) -> None:
    for name in _COUNTS:
        setattr(series, name, saved[name])
    for name in _TIMES:
        setattr(series, name, None if saved[name] is None else now - saved[name])
    series.state = State(saved["state"])
    series.value = decode_number(saved["value"])
    series.score = None if saved["score"] is None else decode_number(saved["score"])
    if series.recent is not None and saved["recent"] is not None:
        series.recent.extend(saved["recent"])
        series.hits = sum(series.recent)
    series.scorer.restore(saved["scorer"])
    series.scorer.normal = None if saved["normal"] is None else decode_number(saved["normal"])
    series.peak = decode_number(saved["peak"])
    series.calm_down()
