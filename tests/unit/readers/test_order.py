"""Resumes, repeats, epochs, several rows per step: defined in docs/reference/recorded-runs.md."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.readers.series import RecordedRun, Resume

Read = Callable[..., RecordedRun]
Points = Callable[[RecordedRun, str], object]


def steps(run: RecordedRun) -> list[int]:
    return [step for step, _, _ in run.batches()]


def test_without_a_step_column_rows_count_from_one(read: Read, points: Points) -> None:
    run = read("a.csv", "loss,kl\n2.0,0.5\n1.5,0.5\n")

    assert points(run, "loss") == [(1, 2.0), (2, 1.5)]
    assert any("rows counted from 1" in note for note in run.notes)


def test_rows_of_one_step_become_one_batch(read: Read) -> None:
    run = read("a.csv", "step,loss,val_loss\n10,3.0,\n10,,3.5\n20,2.0,\n")

    assert [(s, [x.metric for x in batch]) for s, _, batch in run.batches()] == [
        (10, ["loss", "eval.loss"]),
        (20, ["loss"]),
    ]


def test_two_different_values_at_one_step_are_both_kept(read: Read, points: Points) -> None:
    run = read("a.csv", "step,loss\n10,3.0\n10,2.5\n20,2.0\n")

    assert points(run, "loss") == [(10, 3.0), (10, 2.5), (20, 2.0)]


def test_a_row_written_twice_counts_once(read: Read, points: Points) -> None:
    run = read("a.csv", "step,loss,lr\n10,3.0,nan\n10,3.0,nan\n20,2.0,0.5\n")

    assert points(run, "loss") == [(10, 3.0), (20, 2.0)]
    assert run.notes == ["1 rows repeat the row before them exactly; dropped"]


def test_a_run_that_goes_back_is_read_as_resumed_and_both_blocks_are_judged(read: Read) -> None:
    run = read("a.csv", "step,loss\n10,3.0\n20,2.5\n30,9.0\n20,2.5\n30,2.0\n")
    seen = []
    for step, _, _ in run.batches():
        seen.append((step, len(run.resumes)))

    assert seen == [(10, 0), (20, 0), (30, 0), (20, 1), (30, 1)]
    assert run.resumes == [Resume(30, 20)]
    assert run.notes == ["after step 30 the record goes on at step 20 (resumed)"]


def test_a_record_that_begins_again_may_be_another_run_and_that_is_said(read: Read) -> None:
    run = read("a.csv", "step,loss\n10,3.0\n20,2.5\n10,3.0\n20,2.5\n")

    assert steps(run) == [10, 20, 10, 20]
    assert run.resumes == [Resume(20, 10, from_start=True)]
    assert "judged as another run if its loss begins again too, otherwise as a resume" in run.notes[0]


def test_a_second_pass_starts_afresh(read: Read) -> None:
    run = read("a.csv", "step,loss\n10,3.0\n20,2.5\n10,2.0\n")

    assert steps(run) == steps(run)
    assert len(run.resumes) == 1


def test_an_evaluation_written_late_is_no_resume(read: Read, jsonl: Callable[..., str]) -> None:
    run = read("a.jsonl", jsonl({"step": 99, "loss": 2.0}, {"step": 100, "loss": 1.9}, {"step": 99, "val_loss": 2.5}))

    assert steps(run) == [99, 100, 99]
    assert run.resumes == []


def test_a_step_that_starts_again_in_every_epoch_is_counted_on(read: Read) -> None:
    assert steps(read("a.csv", "epoch,batch,loss\n0,0,3\n0,1,2.9\n1,0,2.8\n1,1,2.7\n")) == [0, 1, 2, 3]
    assert steps(read("b.csv", "epoch,iter,loss\n1,10,3\n1,20,2.9\n2,10,2.8\n2,20,2.7\n")) == [10, 20, 30, 40]


def test_counting_on_works_when_the_first_epoch_is_longer_than_the_rows_looked_at(read: Read) -> None:
    text = "epoch,iter,loss\n" + "".join(f"{e},{i},2.5\n" for e in (1, 2) for i in range(1, 601))

    found = steps(read("a.csv", text))

    assert found == list(range(1, 1201))


def test_epochs_are_steps_only_with_one_row_per_epoch(read: Read) -> None:
    assert steps(read("a.csv", "epoch,loss\n0,3\n1,2.9\n2,2.8\n")) == [0, 1, 2]
    assert steps(read("b.csv", "epoch,loss\n0,3\n0,2.9\n0,2.8\n1,2.7\n1,2.6\n")) == [1, 2, 3, 4, 5]


def test_epochs_of_an_appended_run_are_steps_too(read: Read, points: Points) -> None:
    rows = "".join(f"{epoch},{9 - epoch}.5\n" for epoch in [*range(1, 6), *range(1, 6)])
    run = read("history.csv", "epoch,loss\n" + rows)
    assert points(run, "loss") == [(epoch, 9.5 - epoch) for epoch in [*range(1, 6), *range(1, 6)]]
    assert [(r.before, r.step) for r in run.resumes] == [(5, 1)]


def test_steps_of_each_round_are_no_counter_where_rounds_are_counted(read: Read, jsonl: Callable[..., str]) -> None:
    rounds = [{"iteration": n, "train_steps": 300 + 10 * (n > 6), "loss": 10.0 - n} for n in range(1, 9)]
    assert [step for step, _, _ in read("rounds.jsonl", jsonl(*rounds)).batches()] == list(range(1, 9))
    lengths = [2000, 2000, 919, 2000, 1731, 2000, 250, 2000, 2000, 2000]
    episodes = [{"steps": length, "episode": n, "loss": 10.0 - n} for n, length in enumerate(lengths, 1)]
    again = [{"steps": 2000, "episode": n, "loss": 5.0} for n in range(1, 12)]
    steps = [step for step, _, _ in read("episodes.jsonl", jsonl(*episodes, *again)).batches()]
    assert steps == [*range(1, 11), *range(1, 12)]


def test_lengths_of_episodes_are_no_steps_beside_episodes_that_were_resumed_again_and_again(read: Read) -> None:
    """Each stretch begins a few episodes before the end of the last one; most episodes last as long as they may."""
    episodes = [n for start in range(0, 90, 9) for n in range(start, start + 12)]
    rows = [f"{n},{i % 17 * 0.5},{20 + i % 7 if i % 5 == 3 else 50}" for i, n in enumerate(episodes)]
    run = read("log.csv", "\n".join(["episode,total_reward,steps", *rows]))
    assert run.columns.steps == ("episode",)


def test_a_header_in_the_middle_is_skipped(read: Read, points: Points) -> None:
    run = read("a.csv", "step,loss\n10,3.0\n20,2.5\nstep,loss\n20,2.25\n30,2.0\n")

    assert points(run, "loss") == [(10, 3.0), (20, 2.5), (20, 2.25), (30, 2.0)]
    assert any("header is repeated" in note for note in run.notes)


def test_a_clock_that_begins_again_goes_on(read: Read) -> None:
    run = read("a.csv", "step,loss,elapsed\n10,3,0\n20,2.5,100\n30,2.2,5\n40,2.1,25\n")

    times = [time for _, time, _ in run.batches()]

    assert times == sorted(times)
    assert times[-1] == 120.0
