"""Rules that join a run: of callbacks, ``watch()`` and others that come into a process which somebody watches already.

All rules of a run are layers of one rule set: packs at the bottom; over them what the run was opened with (``--rules``, the
marker of a test, the rule file that was found); then each that joins, in the order in which they come. A layer adds rules,
and changes those of packs key by key, as a rule file does. What people wrote in one layer is never undone by another: two
that contradict each other are an error, before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import TRAITS
from healthcheck.engine.lookups import RuleDemand
from healthcheck.rulelang.discover import discover
from healthcheck.rulelang.rule import RuleSet
from healthcheck.rulelang.sources import Joining, RuleLayers
from healthcheck.run.budget import acting_metrics, acts_on
from healthcheck.run.judge import acted_upon

if TYPE_CHECKING:
    from healthcheck.run.opening import SessionOptions
    from healthcheck.run.session import Session

FROM_OPTIONS = ("mode", "fail_on")
"""Settings that somebody who joins may decide, where the run leaves them at their defaults."""


def join(session: Session, options: SessionOptions, name: str = "") -> None:
    """Somebody with these options comes into a session that is open: their rules, metrics and callbacks count as well.

    Raises ``RuleFileError`` for mistakes in the rules and ``UsageError`` for options, each also where they contradict what
    the run was opened with; nothing has changed then.
    """
    layers = session.layers
    if any(known is options for known in layers.known) or options is layers.opened_with:
        return
    layers.known.append(options)
    for callback in options.callbacks:
        session.register(callback)
    if options.metrics and session.watching:
        session.collect(*options.metrics)
    if options.max_steps is not None and session.stop.most_steps is None:
        session.stop.most_steps = options.max_steps
    sources = _sources(options, layers)
    changes = bool(options.off or options.set or options.mute or options.profile or options.only)
    settings = {key: value for key, value in options.all_settings().items() if key in FROM_OPTIONS}
    if layers.load is None or layers.opened_with is None:
        if sources:
            session.note(f"{name or 'what'} joined a session that was made by hand; its own rules are not used")
        return
    _take_settings(session, settings)
    if not (sources or changes):
        return
    opened = _with(layers.opened_with, options)
    before = session.rules
    joined = [*layers.joined, Joining(name or f"what joined as number {len(layers.joined) + 1}", sources)]
    rules = layers.load(opened, joined)
    layers.opened_with, layers.joined = opened, joined
    if sources and options.rules is None:
        layers.of_callbacks = False  # they are found now
    known = {rule.id for rule in before.rules}
    new = [rule.id for rule in rules.rules if rule.id not in known]
    if not new and rules.text == before.text:
        return
    change_rules(session, rules)
    if new:
        shown = ", ".join(new) if len(new) <= 4 else f"{', '.join(new[:3])} and {len(new) - 3} more"
        session.note(f"rules of {name or 'a callback'} joined: {shown}")


def _sources(options: SessionOptions, layers: RuleLayers) -> list[Any]:
    if options.rules is not None:
        return discover(options.rules).sources
    return discover(None).sources if layers.of_callbacks else []


def _with(opened: SessionOptions, options: SessionOptions) -> SessionOptions:
    """What the run was opened with, and what somebody changes of it who joins."""
    if options.profile and opened.profile and options.profile != opened.profile:
        raise UsageError(f"profile {options.profile} joins a run under profile {opened.profile}: a run has one")
    if options.only and tuple(options.only) != tuple(opened.only):
        raise UsageError(
            "only=... would switch off the rules of the run that it joins: name its own rules with rules=..."
        )
    return replace(
        opened,
        profile=opened.profile or options.profile,
        off=(*opened.off, *options.off),
        set=(*opened.set, *options.set),
        mute=(*opened.mute, *options.mute),
        force=opened.force or options.force,
    )


def _take_settings(session: Session, given: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for a setting of which the run says something else."""
    for name, value in given.items():
        known, origin = session.settings.get(name), session.rules.setting_origins.get(name)
        if known == value:
            continue
        if origin is not None:
            raise UsageError(f"{name}: {value!r} joins a run in which {origin} says {known!r}: a run has one")
        session.rules.settings[name] = value
        if name == "mode":
            session.actor.observe = session.observing


def change_rules(session: Session, rules: RuleSet) -> None:
    """Judge by other rules from here on, between two steps. Causes that stay go on as they are."""
    old, host, demand = session.engine, session.host, session.demand
    if old.step or session.judge.waiting:
        session.judge.flush(session.step, session.active())
    state = old.state_dict()
    extra = demand.every.keys() - RuleDemand.of(session.rules.causes, session.rules.derived).every.keys() - {*TRAITS}
    rules.settings = {**rules.settings, **session.rules.settings}
    host.modify_rules(rules.rules)
    engine = Engine(
        rules,
        rank=session.info.rank,
        start_step=old.step,
        watch_transitions=old.watch_transitions,
        going_on=old.by_id,
    )
    engine.mutes += [mute for mute in old.mutes if mute not in engine.mutes]
    engine.load_state_dict(state, now=old.now)
    engine.alerts += old.alerts
    session.rules, session.settings, session.engine = rules, rules.settings, engine
    extra = {*extra, *(TRAITS if engine.episodes.undecided else ())}
    demand.take(RuleDemand.of(rules.causes, rules.derived, extra))
    actions = host.registry.actions
    session.acts_on_loss = acts_on("loss", rules.causes, actions)
    session.budget.keep = acting_metrics(rules.causes)
    session.judge.take(
        engine,
        lambda gated: frozenset() if session.observing else acted_upon(rules.causes, rules.derived, actions, gated),
    )
    session.rules_changed()
    session.tell("rules", session)
