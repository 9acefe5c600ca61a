"""samples.jsonl gives back what the engine saw: same order, same evaluations, same bits."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from healthcheck.core.samples import series_name
from healthcheck.record.lines import Row, SampleEncoder, Thinner, parse_series, read_samples

words = st.text(alphabet="abz.=,[]'_0", min_size=1, max_size=5)
labels = st.lists(
    st.tuples(st.sampled_from(["parameter", "group", "rank"]), words), max_size=2, unique_by=lambda p: p[0]
)
rows = st.lists(
    st.tuples(
        st.sampled_from(["loss", "grad_norm", "x.y"]),
        labels.map(lambda pairs: tuple(sorted(pairs))),
        st.integers(1, 3),
        st.sampled_from(["train", "eval"]),
        st.floats(),
    ),
    max_size=8,
)


def as_rows(batch: object) -> list[Row]:
    return [(s.metric, s.labels, s.step, s.phase, s.value) for s in batch.samples]  # type: ignore[attr-defined]


def same(a: list[Row], b: list[Row]) -> bool:
    return len(a) == len(b) and all(
        x[:4] == y[:4] and (x[4] == y[4] or (math.isnan(x[4]) and math.isnan(y[4]))) for x, y in zip(a, b, strict=True)
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), rows), max_size=5))
def test_any_evaluations_come_back_in_the_same_order(evaluations: list[tuple[int, list[Row]]]) -> None:
    """Late values, two phases, repeated series, odd label values: a replay must see all of it."""
    encoder = SampleEncoder()
    lines = [line for i, (at, batch) in enumerate(evaluations) for line in encoder.lines(at, i * 0.5, batch)]

    found = read_samples(lines)

    assert found.complete
    assert [batch.at for batch in found.batches] == [at for at, _ in evaluations]
    assert [batch.now for batch in found.batches] == [i * 0.5 for i in range(len(evaluations))]
    for batch, (_, expected) in zip(found.batches, evaluations, strict=True):
        assert same(as_rows(batch), expected)


@settings(deadline=None)
@given(st.integers(1, 5), rows)
def test_lines_are_what_the_json_module_would_write(at: int, batch: list[Row]) -> None:
    for line in SampleEncoder().lines(at, 1 / 3, batch):
        assert line == json.dumps(json.loads(line), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def test_the_usual_evaluation_is_one_plain_line() -> None:
    (line,) = SampleEncoder().lines(131, 12.25, [("loss", (), 131, "train", math.nan), ("lr", (), 131, "train", 1e-4)])
    assert json.loads(line) == {"step": 131, "t": 12.25, "p": "train", "m": {"loss": "nan", "lr": 1e-4}}


def test_plain_labels_need_no_line_of_their_own() -> None:
    name = series_name("grad_norm", (("parameter", "head.scale"),))
    assert parse_series(name) == ("grad_norm", (("parameter", "head.scale"),))
    assert len(SampleEncoder().lines(1, 0.0, [("grad_norm", (("parameter", "head.scale"),), 1, "train", 1.0)])) == 1


def test_a_torn_last_line_costs_only_itself() -> None:
    lines = SampleEncoder().lines(1, 0.0, [("loss", (), 1, "train", 1.0)])
    found = read_samples([*lines, b'{"step":2,"t":0.1,"p":"tr'])
    assert (len(found.batches), found.bad_lines) == (1, 1)


def test_a_gap_is_told() -> None:
    found = read_samples([b'{"gap":7}\n'])
    assert found.gaps == 7
    assert not found.complete


def test_thinning_halves_the_record_but_keeps_the_steps_around_alerts() -> None:
    encoder = SampleEncoder()
    odd = (("parameter", "a=b"),)
    lines = [
        line
        for step in range(1, 1001)
        for line in encoder.lines(step, 0.0, [("loss", odd, step, "train", 1.0), ("lr", (), 1, "train", 1.0)])
    ]

    thinner = Thinner(1000, around=[500], keep_steps=20)
    half = len(lines) // 2  # piece by piece is the same as at once
    smaller = thinner.marker(1) + thinner.take(b"".join(lines[:half])) + thinner.take(b"".join(lines[half:]))
    found = read_samples(smaller.splitlines())

    steps = [batch.at for batch in found.batches]
    assert found.thinned_to > 0
    assert set(range(480, 521)) <= set(steps)
    assert 500 <= len(steps) <= 525
    assert all(batch.samples[0].labels == odd for batch in found.batches), "labels must survive"
    assert all(len(batch.samples) == 2 for batch in found.batches), "no evaluation may be cut in half"


def test_a_second_thinning_replaces_the_marker() -> None:
    encoder = SampleEncoder()
    content = b"".join(
        line for step in range(1, 101) for line in encoder.lines(step, 0.0, [("loss", (), step, "train", 1.0)])
    )
    once = Thinner(100, []).marker(1) + Thinner(100, []).take(content)
    twice = Thinner(100, []).marker(2) + Thinner(100, []).take(once)
    assert twice.count(b'"thinned"') == 1
    assert len(read_samples(twice.splitlines()).batches) == 25
