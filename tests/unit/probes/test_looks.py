"""When a probe looks at the graph of the loss, and until when it rests."""

from __future__ import annotations

from typing import Any

import torch

from healthcheck.core.events import Event, EventKind
from healthcheck.probes.looks import GraphProbe, ask_again

GRAPH = (torch.ones(1, requires_grad=True) * 2).grad_fn


class Looking(GraphProbe):
    looks_at = (2, 3, 20)


def passes(*steps: tuple[int, Any]) -> tuple[list[int], list[int]]:
    """Steps in which it was asked, and those in which it looked, of backward passes given as (step, graph)."""
    probe, asked, looked = Looking(), list[int](), list[int]()
    rests = 0
    for step, graph in steps:
        if step not in asked:
            rests = probe.rests_until  # whoever calls it settles that once a step
        if rests > step:
            continue
        asked.append(step)
        if probe.due(Event(EventKind.LOSS, step, loss_graph=graph)):
            looked.append(step)
    return asked, looked


def test_it_is_asked_up_to_its_last_look_and_rests_from_then_on() -> None:
    asked, looked = passes(*((step, GRAPH) for step in range(1, 200)))
    assert asked == [1, 2, 3, 20]
    assert looked == [2, 3, 20]


def test_passes_of_the_steps_in_which_it_rests_count_as_those_of_the_step_before() -> None:
    _, looked = passes(*((step, GRAPH) for step in range(1, 30) for _ in range(4)))
    assert looked == [1, 1, 5]


def test_a_run_that_shows_no_graph_is_asked_once() -> None:
    asked, looked = passes(*((step, None) for step in range(1, 200)))
    assert (asked, looked) == ([1], [])


def test_a_loss_of_an_evaluation_is_no_pass_and_sends_nobody_to_rest() -> None:
    probe = Looking()
    for _ in range(5):
        assert not probe.due(Event(EventKind.LOSS, 1, phase="eval"))
    assert probe.rests_until == 0
    assert [probe.due(Event(EventKind.LOSS, step, loss_graph=GRAPH)) for step in (1, 2)] == [False, True]


def test_who_found_nothing_asks_at_every_step_at_first_and_more_seldom_in_a_settled_run() -> None:
    assert ask_again(3) == 3
    assert ask_again(21) == 30
    assert ask_again(1021) == 1100
