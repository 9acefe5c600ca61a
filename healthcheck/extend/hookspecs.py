"""The hook specification: everything a plugin can listen to, add and say. Start here.

A plugin is any object, class instance or module with functions that carry the names below and
the mark ``@healthcheck.hookimpl``. Take only the arguments you need; their names matter, their
order does not::

    import healthcheck


    class LossPrinter:
        @healthcheck.hookimpl
        def healthcheck_step_end(self, event):
            event.user_state["printer.steps"] = event.step

Three kinds of hooks:

*Registration* hooks run once, before training. They may be slow. Wrappers are not allowed.

*Loop* hooks, one per :class:`~healthcheck.core.events.EventKind`, run inside the training loop, on
**every rank**, in the order in which plugins were registered. They take ``(session, event)`` and
return nothing; wrappers are not allowed. Only hooks that somebody implements are called, and an
adapter does not even build the event when nothing listens. Those marked *hot* run on every step:
do not move data to the host there (``.item()``, ``float(tensor)``, ``print(tensor)``).
``session`` is the run as a :class:`healthcheck.core.protocols.Session`: read it, log to it, never change it.

*Judgement* hooks run when samples, alerts and verdicts exist, with numbers on the host.

**If you raise** in a loop or judgement hook, training continues: the error is shown once, kept in
the report with your plugin's name and the step, and after three errors your plugin is
quarantined for the rest of the run. ``on_plugin_error: raise`` (and pytest mode) lets it
propagate instead. Whatever you raise counts as an error, ``SystemExit`` and other exceptions that
are no ``Exception`` too; only a real Ctrl-C, and what a signal handler raises meanwhile, passes. If
you raise in a registration hook, your plugin is not loaded, which is one clear warning (an error
with ``--strict-plugins``).

The specification is additive: hooks and arguments are added, never renamed or removed within a
major version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pluggy

from healthcheck.core.alerts import Alert, Transition
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Action, ConditionType, Probe, Reader, Report, Session
from healthcheck.core.samples import Sample
from healthcheck.core.setting import Setting

PROJECT = "healthcheck"
PREFIX = "healthcheck_"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

# --------------------------------------------------------------------------- registration


@hookspec
def healthcheck_register_probes(register: Callable[[Probe], None]) -> None:
    """Add probes. Once per session, on every rank, before the first event.

    :param register: call it with an object of the shape :class:`healthcheck.Probe`.
        A metric name that another probe provides already is refused.

    Do not import torch at module level here: ``healthcheck check`` reads what a probe provides
    on machines without torch. If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_register_conditions(register: Callable[[ConditionType], None]) -> None:
    """Add conditions for ``when:``. Once per process that reads rules, on every rank.

    :param register: call it with a :class:`healthcheck.ConditionType`. Names from
        plugins carry a dot (``acme.cusum``); built-in names cannot be replaced.

    Your schema is merged into the rule-file schema, so that mistakes in your options are
    reported with line and column like our own. If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_register_actions(register: Callable[[Action], None]) -> None:
    """Add actions for ``then:``. Once per session, on every rank.

    :param register: call it with an object of the shape :class:`healthcheck.Action`.
        Names from plugins carry a dot (``acme.page``); built-in names cannot be replaced.

    If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_register_reports(register: Callable[[Report], None]) -> None:
    """Add places where samples and alerts go. Once per session, on every rank.

    :param register: call it with an object of the shape :class:`healthcheck.Report`.

    If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_register_readers(register: Callable[[Reader], None]) -> None:
    """Add formats of recorded runs for ``healthcheck replay``. Once per process that replays.

    :param register: call it with an object of the shape :class:`healthcheck.Reader`.

    If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_register_settings(register: Callable[[Setting], None]) -> None:
    """Add keys of ``settings:``. Once per process that reads rules, on every rank.

    :param register: call it with a :class:`healthcheck.Setting`. Names from plugins carry a dot (``acme.room``);
        built-in names cannot be replaced.

    Its value is read from the rule file, ``[tool.healthcheck]`` and the environment (``HEALTHCHECK_ACME_ROOM``), compared
    with the schema, and handed out as ``session.settings["acme.room"]``. If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_register_rulepacks(register: Callable[[str, str], None]) -> None:
    """Add rule packs for ``extends:``. Once per process that reads rules, on every rank.

    :param register: ``register(name, path)`` with a pack name without colon and the path of its
        YAML file; users write ``extends: [yourplugin:name]``.

    If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_register_trainers(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """Add trainer adapters. Once per session, on every rank.

    :param register: ``register(name, attach)``. ``attach(session, target)`` is asked with the
        object that a user gave to ``session.attach(target)`` and returns an adapter with
        ``capabilities`` and ``close()``, or ``None`` if the object is not its own.

    If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_add_commands(register: Callable[[str, str, Callable[[list[str]], int]], None]) -> None:
    """Add sub-commands to the command ``healthcheck``. Once per command-line process.

    :param register: ``register(name, help, main)``; ``main(argv)`` returns the exit code.
        Built-in commands cannot be replaced.

    If you raise, your plugin is not loaded.
    """


@hookspec
def healthcheck_configure(session: Session) -> None:
    """A session is ready and has not seen an event yet. Once per session, on every rank.

    In the order of pluggy: last registered first. A plugin registered later is called at its
    registration. Attach your own listeners here, for instance ``session.on("eval_end", fn)``. If you
    raise, your plugin is not loaded: nothing of it is called any more, but conditions that rules use
    already go on judging.
    """


@hookspec
def healthcheck_modify_rules(rules: list[Any]) -> None:
    """The rules are compiled; reorder, drop or replace them in place before the run.

    Once per session, on every rank; all ranks must do the same. In the order of pluggy, last registered
    first: plugins that were loaded before yours see what you made of the rules. If you raise, the rules
    are used as they were and your plugin is not loaded.

    :param rules: list of :class:`healthcheck.rulelang.rule.Rule`, in file order.
    """


# --------------------------------------------------------------------------- loop


@hookspec
def healthcheck_train_start(session: Session, event: Event) -> None:
    """Training begins. Once per run and attempt, on every rank.

    In a plain script this is the first backward pass, since nothing announces itself before;
    frameworks with a callback for it fire earlier. ``event.model`` is known where the framework
    has built the model. ``event.step`` is the step about to be made (after a resume, not 1).
    """


@hookspec
def healthcheck_epoch_start(session: Session, event: Event) -> None:
    """An epoch begins, where the trainer knows epochs. Once per epoch, on every rank.

    ``event.epoch`` counts from 0. Plain scripts have no such event.
    """


@hookspec
def healthcheck_step_start(session: Session, event: Event) -> None:
    """A step begins: before its first batch or forward pass. Hot; every rank.

    In a plain script it fires with the first batch or backward pass of the step.
    """


@hookspec
def healthcheck_batch_ready(session: Session, event: Event) -> None:
    """A micro-batch has been drawn and not been used yet. Hot; every rank.

    Fires for each micro-batch of an accumulated step. ``event.batch`` is what the loader gave,
    possibly still on the CPU; ``event.data_wait`` says how long it took to come.
    """


@hookspec
def healthcheck_loss(session: Session, event: Event) -> None:
    """A loss exists and is about to be differentiated. Hot; every rank; per micro-batch.

    ``event.loss`` is a detached scalar on its device, with a ``GradScaler``'s scale taken out.
    DDP losses differ between ranks.
    """


@hookspec
def healthcheck_backward_end(session: Session, event: Event) -> None:
    """Gradients of this step exist and nothing has changed them yet. Hot; every rank.

    Fires once per step, after the last micro-batch's backward pass and before gradient clipping
    and unscaling. Where a trainer cannot tell which micro-batch is the last (a plain script that
    does not clip), it fires together with ``before_update``.
    """


@hookspec
def healthcheck_before_update(session: Session, event: Event) -> None:
    """The optimizer is about to use these gradients. Hot; every rank; once per optimizer step.

    The last moment to skip the update. ``event.optimizer`` is the torch optimizer;
    ``event.grad_norm`` is the norm before clipping if the loop computed it. Does not fire for a
    step that a ``GradScaler`` skips.
    """


@hookspec
def healthcheck_after_update(session: Session, event: Event) -> None:
    """The optimizer has stepped; gradients are usually still there. Hot; every rank; once per optimizer step.

    Does not fire where a ``GradScaler`` did not apply the update.
    """


@hookspec
def healthcheck_step_end(session: Session, event: Event) -> None:
    """The step is over, applied or skipped (``event.skipped``). Hot; every rank; once per step."""


@hookspec
def healthcheck_eval_start(session: Session, event: Event) -> None:
    """An evaluation begins. Every rank; once per evaluation set (``event.dataset``)."""


@hookspec
def healthcheck_eval_step(session: Session, event: Event) -> None:
    """One batch of an evaluation (or prediction) is done. Hot; every rank."""


@hookspec
def healthcheck_eval_end(session: Session, event: Event) -> None:
    """An evaluation set is done; ``event.metrics`` holds its results. Every rank.

    In a plain script it fires when the script logs or reports an evaluation metric.
    """


@hookspec
def healthcheck_test_start(session: Session, event: Event) -> None:
    """A test run after training begins. Every rank; once per set (``event.dataset``)."""


@hookspec
def healthcheck_test_step(session: Session, event: Event) -> None:
    """One batch of a test run is done. Hot; every rank."""


@hookspec
def healthcheck_test_end(session: Session, event: Event) -> None:
    """A test run is done; ``event.metrics`` holds its results. Every rank."""


@hookspec
def healthcheck_checkpoint_saved(session: Session, event: Event) -> None:
    """A checkpoint has been written to ``event.path``. On the ranks that write."""


@hookspec
def healthcheck_epoch_end(session: Session, event: Event) -> None:
    """An epoch is over. Once per epoch, on every rank that knows epochs."""


@hookspec
def healthcheck_exception(session: Session, event: Event) -> None:
    """Training is being left by ``event.exception``. At most once per run, on the rank it hits.

    A deliberate stop (:class:`healthcheck.StopTraining`) does not come here.
    """


@hookspec
def healthcheck_train_end(session: Session, event: Event) -> None:
    """Training is over, for whatever reason. Exactly once per run, on every rank.

    The report is written after this.
    """


# --------------------------------------------------------------------------- judgement


@hookspec
def healthcheck_samples(session: Session, step: int, samples: Sequence[Sample]) -> None:
    """Samples of this step as numbers on the host, before they are judged. Every rank.

    Usually once per step; a trainer that can skip an update hands out those that exist before
    the update first and the rest at the end of the step. On a GPU they belong to
    earlier steps, usually to two at once every second step: see ``sample.step``.
    """


@hookspec
def healthcheck_transition(session: Session, transition: Transition) -> None:
    """One series of one rule changed its state (ok, pending, firing, ...). Every rank."""


@hookspec
def healthcheck_alert(session: Session, alert: Alert) -> None:
    """A rule began to fire, and its actions have run. Every rank, for its own alerts.

    ``alert.actions`` says what was done. Once per alert, and again with ``alert.repeat`` where a
    rule with ``cooldown`` acts again.
    """


@hookspec
def healthcheck_alert_amended(session: Session, alert: Alert) -> None:
    """Another cause of a rule whose alert is open has fired, and its actions have run. Every rank, once per cause.

    Where it is a more certain one, the alert speaks with it from now on: ``alert.cause``, ``alert.message``,
    ``alert.changes``. The severity of the alert may be higher than before.

    Also where nothing new has fired, but what has goes on for so long that the alert is an error now (``error_after``).
    """


@hookspec
def healthcheck_report_section(session: Session, report: dict[str, Any]) -> None:
    """The content of ``report.json`` is complete and about to be written. Once, every rank.

    Add a key of your own (prefix it with your plugin's name) holding plain JSON values. What stands
    there already cannot be changed: you are given a copy.
    """


@hookspec
def healthcheck_performance(session: Session, performance: dict[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """The run is over: say what you know of its speed. Once, every rank, before ``healthcheck_report_section``.

    Return a mapping of named findings, or None; prefix the names with your plugin's. They go into
    ``performance.findings`` of ``report.json`` and onto the page of the run. A finding is a mapping of plain JSON values:

    - ``text``: one sentence that says what was found, with its number; the only key that must be there;
    - ``value`` and ``unit``: the number alone, the unit as in :class:`healthcheck.Metric`;
    - ``bound`` and ``share``: what the run waits for (``data``, ``memory``, ``host``, ``communication`` or ``compute``), and
      what part of a step's time that is, from 0 to 1. Of all findings with both the largest share is the verdict;
    - ``advice``: one sentence on what to try;
    - ``rows``: a list of mappings, shown as a table below the sentence (kernels, modules, places).

    A name that is taken, or a finding of another form, is an error of your plugin; the other findings stay.

    :param performance: what is known so far, as it goes into the report; a copy, so changing it changes nothing.
    """


def loop_hook(kind: EventKind) -> str:
    """Name of the hook of an event kind: ``healthcheck_step_end``."""
    return PREFIX + kind.value
