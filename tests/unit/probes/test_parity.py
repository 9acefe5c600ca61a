"""What follows from what ranks say of their copies of the model: who is apart, in what, and when nobody can tell."""

from __future__ import annotations

from typing import Any

from healthcheck.probes.parity import Found, ParityJudge, group_text, ranks_of

SAME = {
    "g": "0:3:1",
    "d": "0:3:1",
    "l": 7,
    "c": 3,
    "m": 1,
    "y": 1,
    "w": [1, 2, 3],
    "n": [5, 6],
    "r": [0.1],
    "u": 4,
    "t": [8],
}


def said(world: int = 4, **apart: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of all ranks, but for ``r2={"w": ...}``."""
    group = group_text(range(world))
    return {rank: {**SAME, "g": group, "d": group, **apart.get(f"r{rank}", {})} for rank in range(world)}


def values(found: list[Found]) -> dict[str, float]:
    return {one.metric.removeprefix("ranks."): one.value for one in found}


def facts(found: list[Found], metric: str) -> dict[str, Any]:
    return next(one.facts for one in found if one.metric == f"ranks.{metric}")


def test_equal_copies_are_judged_and_silent() -> None:
    found = values(ParityJudge().check(50, said()))
    assert set(found.values()) == {0.0}
    assert {"weights_apart", "gradients_apart", "state_apart", "lr_apart"} <= set(found)


def test_the_rank_that_differs_from_most_is_named_and_of_two_none_is() -> None:
    four = ParityJudge().check(50, said(r2={"n": [5, 9]}))
    assert values(four)["gradients_apart"] == 1.0
    assert facts(four, "gradients_apart")["ranks"] == "2"
    assert "in some steps only" in facts(four, "gradients_apart")["when"]
    two = ParityJudge().check(50, said(2, r1={"t": [9]}))
    assert facts(two, "state_apart")["ranks"] == "0, 1"
    assert "cannot tell" in facts(two, "state_apart")["which"]


def test_what_follows_from_different_gradients_or_rates_is_not_said_beside_them() -> None:
    found = values(ParityJudge().check(50, said(r2={"n": [5, 9], "w": [0, 0, 0], "t": [1]})))
    assert "weights_apart" not in found
    assert "state_apart" not in found
    found = values(ParityJudge().check(50, said(r2={"r": [0.2], "w": [0, 0, 0]})))
    assert found["lr_apart"] == 1.0
    assert "weights_apart" not in found


def test_ranks_that_train_by_themselves_on_purpose_are_not_compared() -> None:
    words = said(r2={"w": [0, 0, 0], "n": [0, 0]})
    for word in words.values():
        word["y"] = 0
    assert not {"weights_apart", "gradients_apart"} & set(values(ParityJudge().check(50, words)))


def test_ranks_of_different_groups_and_without_copies_are_not_compared() -> None:
    words = said()
    for rank, word in words.items():
        word["g"] = "" if rank < 2 else group_text((2, 3))
        word["w"] = [rank // 2] * 3
    assert values(ParityJudge().check(50, words))["weights_apart"] == 0.0


def test_other_tensors_are_a_difference_of_the_start_and_weights_are_not_compared() -> None:
    found = ParityJudge().check(5, said(r3={"l": 8, "w": [9, 9, 9]}))
    assert values(found)["start_apart"] == 1.0
    assert "weights_apart" not in values(found)


def asked(judge: ParityJudge) -> dict[str, Any]:
    [question] = judge.questions
    judge.questions.clear()
    return dict(question)


def conclude(judge: ParityJudge, one: dict[str, Any], other: dict[str, Any], names: int = 1) -> list[Found]:
    """Answer both questions about ranks 0 and 2 (or 0 and 1)."""
    question = asked(judge)
    mine = [[f"layer{n}", 100 + n, 50] for n in range(3)]
    theirs = [[name, mark + (1000 if n < names else 0), size] for n, (name, mark, size) in enumerate(mine)]
    first, second = question["of"]
    judge.tensors(question["step"], {first: {"sums": mine}, second: {"sums": theirs}})
    assert asked(judge)["values"] == [f"layer{n}" for n in range(names)]
    return judge.values(60, {first: {"for": question["step"], **one}, second: {"for": question["step"], **other}})


def answer(sums: list[int], odd: list[list[int]], samples: list[float]) -> dict[str, Any]:
    return {"values": [["layer0", 50, sums, samples]], "odd": odd}


def test_a_rank_that_wrote_once_more_is_blamed_also_of_two() -> None:
    judge = ParityJudge()
    judge.check(50, said(2))
    assert values(judge.check(100, said(2, r1={"w": [1, 9, 3]}))).keys() & {"weights_apart"} == set()
    found = conclude(judge, answer([10, 100], [], [1.0, 2.0]), answer([17, 900], [[51, 1]], [1.5, 2.5]))
    assert values(found) == {"weights_apart": 0.0, "single_value_apart": 0.0, "changed_apart": 1.0}
    told = facts(found, "changed_apart")
    assert told["ranks"] == "1"
    assert "step 51" in told["evidence"]
    assert told["since"] == "step 50 to 100"


def test_a_single_value_is_named_with_its_bit() -> None:
    judge = ParityJudge()
    judge.check(50, said(r2={"w": [1, 9, 3]}))
    found = conclude(judge, answer([10, 100], [], [1.0]), answer([10 + 2**21, 100 + 7 * 2**21], [], [1.0]))
    assert values(found)["single_value_apart"] == 1.0
    told = facts(found, "single_value_apart")
    assert (told["ranks"], told["value"]) == ("2", "element 7 of layer0, bit 21 of it")


def test_many_values_without_a_writer_are_weights_that_differ_and_nobody_is_blamed_of_two() -> None:
    judge = ParityJudge()
    judge.check(50, said(2, r1={"w": [1, 9, 3]}))
    found = conclude(judge, answer([10, 101], [], [1.0]), answer([17, 905], [], [1.25]), names=2)
    assert values(found)["weights_apart"] == 1.0
    told = facts(found, "weights_apart")
    assert told["ranks"] == "0, 1"
    assert "cannot tell" in told["which"]
    assert "up to 0.25" in told["sampled"]


def test_a_question_that_nobody_answers_delays_the_alert_by_some_comparisons_and_no_more() -> None:
    judge = ParityJudge()
    told = [values(judge.check(step, said(r2={"w": [1, 9, 3]}))).get("weights_apart") for step in (50, 100, 150, 200)]
    assert told == [None, None, None, 1.0]


def test_two_equal_batches_in_a_row_count_and_one_batch_for_ever_does_not() -> None:
    apart = {f"r{rank}": {"b": [rank, rank + 10]} for rank in range(4)}
    assert values(ParityJudge().check(50, said(**apart)))["equal_batches"] == 0.0
    apart["r3"] = apart["r1"]
    found = ParityJudge().check(50, said(**apart))
    assert values(found)["equal_batches"] == 2.0
    assert facts(found, "equal_batches")["ranks"] == "1, 3"
    assert "equal_batches" not in values(
        ParityJudge().check(50, said(**{f"r{rank}": {"b": [3, 3]} for rank in range(4)}))
    )


def test_software_that_differs_is_named_with_both_versions() -> None:
    words = said(**{f"r{rank}": {"s": {"torch": "2.13.0", "script": "ab"}} for rank in range(4)})
    words[1]["s"] = {"torch": "2.12.0", "script": "ab"}
    found = ParityJudge().check(5, words)
    assert facts(found, "start_apart")["what"] == "torch: 2.12.0 on rank 1, 2.13.0 on others"


def test_groups_of_ranks_survive_their_short_form() -> None:
    for group in ((0, 1), tuple(range(16384)), (0, 8, 16, 24), (1, 5, 6), (3, 2)):
        assert ranks_of(group_text(group)) == group
    assert len(group_text(range(16384))) < 16
