"""Finding runs, damage, our own record, mapping, plugins' readers."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from healthcheck.core.errors import UsageError
from healthcheck.extend.host import PluginHost
from healthcheck.extend.registry import Registry
from healthcheck.readers.base import UnreadableRunError
from healthcheck.readers.find import find_runs, read_run
from healthcheck.readers.series import RecordedRun

Read = Callable[..., RecordedRun]
Write = Callable[[str, str], Path]
Points = Callable[[RecordedRun, str], object]

CSV = "step,loss\n1,2.5\n2,2.25\n"


def test_folders_hold_runs_of_several_formats(write: Write, tmp_path: Path) -> None:
    write("a/metrics.csv", CSV)
    write("a/hparams.yaml", "lr: 0.5\n")
    write("b/log.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    write("c/run.py", "loss = 1.0\nloss = 2.0\n")
    write("c/notes.txt", "nothing to see\n")

    found = find_runs([tmp_path])

    assert [(str(run.path.relative_to(tmp_path)), run.reader.name if run.reader else "") for run in found] == [
        ("a/metrics.csv", "csv"),
        ("b/log.jsonl", "jsonl"),
    ]


RAGGED = {
    "rows that end early": ("episode,timestep,reward,lr\n1,100,5.0,0.5\n2,200,6.0\n3,300,7.0\n", "2 have fewer"),
    "settings in the first row only": ("step;reward;gamma;seed;\n100;5.0;0.9;1;\n200;6.0\n300;7.0\n", "2 have fewer"),
    "columns that came later": ("step,reward\n100,5.0\n200,6.0,0.5\n300,7.0,0.5\n", "2 have more"),
    "both": ("step\treward\tloss\n100\t5.0\n200\t6.0\t0.5\t9\n300\t7.0\n", "2 have fewer: the last columns are empty there; 1 has more"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RAGGED)
def test_a_table_whose_rows_differ_in_width_is_read_and_that_is_said_once(
    read: Read, points: Points, kind: str
) -> None:
    text, said = RAGGED[kind]
    run = read("log.csv", text)
    assert run.reader.name == "csv"
    assert points(run, "reward") == [(100, 5.0), (200, 6.0), (300, 7.0)]
    assert [said in note for note in run.notes] == [True]


def test_a_separator_at_the_end_of_each_row_is_not_worth_a_word(read: Read, points: Points) -> None:
    run = read("log.csv", "step,loss\n1,0.5,\n2,0.25,\n3,0.125,\n")
    assert points(run, "loss") == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert run.notes == []


def test_numbers_of_rows_that_no_name_stands_above_are_no_column_of_another_name(read: Read, points: Points) -> None:
    run = read("log.csv", '"loss","lr"\n"1",0.5,0.1\n"2",0.25,0.1\n"3",0.125,0.1\n')
    assert points(run, "loss") == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_prose_with_commas_is_no_table(write: Write) -> None:
    path = write("notes.txt", "First, some words\nthe loss was 0.5, which is high\nthen 2 epochs, or 3, later\n")
    assert find_runs([path])[0].reader is None


@pytest.mark.parametrize(
    "text", ["1,0.5,0.9,3\n2,0.4,0.8,3\n", "0.5,0.9\n0.4,0.8\n0.3,0.7\n", "1 0.5 0.9 0.1\n2 0.4 0.8 0.1\n"]
)
def test_a_table_without_header_is_named_as_such_with_what_to_do(read: Read, points: Points, text: str) -> None:
    with pytest.raises(UnreadableRunError, match=r"no header.*--map column1=step --map column2=loss") as caught:
        read("log.csv", text).series()
    assert ", ".join(text.split("\n")[0].replace(",", " ").split()) in str(caught.value)
    assert points(read("log.csv", text, mapping={"column2": "loss"}), "loss")


def test_a_folder_is_not_blamed_for_numbers_that_nothing_names(write: Write, tmp_path: Path) -> None:
    write("data.csv", "1,0.5,0.9,3\n2,0.4,0.8,3\n")
    write("log.csv", "step,loss\n1,0.5\n2,0.25\n")
    assert [run.path.name for run in find_runs([tmp_path])] == ["log.csv"]


def test_a_header_with_names_that_are_numbers_is_a_header(read: Read, points: Points) -> None:
    assert points(read("log.csv", "epoch,loss,0,1\n1,0.5,0.2,0.3\n2,0.25,0.1,0.2\n"), "loss") == [(1, 0.5), (2, 0.25)]


def test_a_run_folder_of_ours_is_one_run(write: Write, tmp_path: Path) -> None:
    write("7/samples.jsonl", '{"step": 1, "t": 0.5, "p": "train", "m": {"loss": 2.0}}\n')
    write("7/alerts.jsonl", '{"rule": "loss-spike", "step": 1}\n')
    write("7/report.json", "{}")

    assert [(r.path.name, r.reader.name if r.reader else "") for r in find_runs([tmp_path])] == [("7", "record")]


def test_of_checkpoints_the_latest_is_read(write: Write, tmp_path: Path, points: Points) -> None:
    for step in (500, 1000):
        history = [{"step": s, "loss": float(s)} for s in range(500, step + 1, 500)]
        write(f"out/checkpoint-{step}/trainer_state.json", json.dumps({"log_history": history}))

    [found] = find_runs([tmp_path / "out"])
    run = read_run(found)

    assert points(run, "loss") == [(500, 500.0), (1000, 1000.0)]
    assert any("checkpoint-1000" in note for note in run.notes)


def test_globs_and_what_is_not_there(write: Write, tmp_path: Path) -> None:
    write("x1.csv", CSV)
    write("x2.csv", CSV)
    write("empty.csv", "")
    write("prose.txt", "hello\nworld\n")

    found = find_runs(
        [
            str(tmp_path / "x*.csv"),
            tmp_path / "x1.csv",
            tmp_path / "no.csv",
            tmp_path / "empty.csv",
            tmp_path / "prose.txt",
        ]
    )

    assert [(r.path.name, r.reader is not None) for r in found] == [
        ("x1.csv", True),
        ("x2.csv", True),
        ("no.csv", False),
        ("empty.csv", False),
        ("prose.txt", False),
    ]
    assert ["no such file" in found[2].problem, "empty" in found[3].problem, "--pattern" in found[4].problem] == [
        True
    ] * 3


def test_content_decides_not_the_ending(read: Read) -> None:
    assert read("metrics.json", CSV).reader.name == "csv"
    assert read("log.csv", '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n').reader.name == "jsonl"


def test_a_packed_file_is_read(tmp_path: Path, points: Points) -> None:
    path = tmp_path / "metrics.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))

    assert points(read_run(path), "loss") == [(1, 2.5), (2, 2.25)]


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path, points: Points) -> None:
    for encoding in ("utf-8-sig", "utf-16"):
        path = tmp_path / f"{encoding}.csv"
        path.write_bytes(CSV.encode(encoding))
        assert points(read_run(path), "loss") == [(1, 2.5), (2, 2.25)]


def test_a_line_cut_off_at_the_end_is_noted(read: Read, points: Points) -> None:
    run = read("a.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')

    assert points(run, "loss") == [(1, 2.0), (2, 1.5)]
    assert run.notes == ["line 3 is cut off (the run was ended while writing); skipped"]


def test_a_damaged_trainer_state_gives_what_is_whole(read: Read, points: Points) -> None:
    run = read(
        "trainer_state.json", '{"log_history": [{"loss": 1.0, "step": 10}, {"loss": 0.5, "step": 20}, {"loss": 0.'
    )

    assert points(run, "loss") == [(10, 1.0), (20, 0.5)]
    assert any("damaged" in note for note in run.notes)


def test_a_binary_file_is_refused_with_the_formats_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 20)

    with pytest.raises(UnreadableRunError, match="formats: record, trainer_state"):
        read_run(path)


def test_our_record_is_read_as_it_was_judged(read: Read) -> None:
    """Same values, times, phases and batches: a replay must see what the live run saw."""
    text = (
        '{"series":{"odd":["loss",[["dataset","a,b"]]]}}\n'
        '{"step": 1, "t": 0.5, "p": "train", "m": {"loss": 2.0, "grad_norm[enc.weight]": "inf"}}\n'
        '{"step": 2, "t": 1.0, "p": "train", "at": 3, "m": {"loss": "nan"}}\n'
        '{"cont": true, "step": 2, "t": 1.0, "p": "eval", "at": 3, "m": {"odd": 1.5}}\n'
        '{"gap": 2}\n'
        '{"step": 4, "t": 1.25, "p": "train", "m": {"train_loss": 1}}\n'
    )
    run = read("samples.jsonl", text)

    batches = [(s, t, [(x.metric, x.labels, x.step, repr(x.value), x.phase) for x in xs]) for s, t, xs in run.batches()]

    assert batches == [
        (1, 0.5, [("loss", (), 1, "2.0", "train"), ("grad_norm", (("parameter", "enc.weight"),), 1, "inf", "train")]),
        (3, 1.0, [("loss", (), 2, "nan", "train"), ("loss", (("dataset", "a,b"),), 2, "1.5", "eval")]),
        (4, 1.25, [("train_loss", (), 4, "1.0", "train")]),
    ]
    assert run.notes == ["2 evaluations are missing: they could not be written in time"]


def test_our_record_reads_back_what_its_writer_wrote(tmp_path: Path) -> None:
    from healthcheck.record.lines import SampleEncoder

    rows = [
        ("loss", (), 7, "train", math.inf),
        ("lr", (("group", "1"),), 7, "train", 0.5),
        ("eval.loss", (("dataset", "a"),), 6, "eval", math.nan),
        ("loss", (("odd", "a]b,c"),), 7, "train", 1.0),
    ]
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"".join(SampleEncoder().lines(8, 2.5, rows)))

    [(step, seconds, samples)] = read_run(path).batches()

    assert (step, seconds) == (8, 2.5)
    assert [(s.metric, s.labels, s.step, s.phase, repr(s.value)) for s in samples] == [
        (metric, labels, at, phase, repr(value)) for metric, labels, at, phase, value in rows
    ]


def test_a_mapping_wins_over_the_aliases(read: Read, points: Points) -> None:
    run = read(
        "a.csv",
        "n,loss,my_obj,extra\n5,9.0,2.5,1\n6,9.0,2.25,1\n",
        mapping={"n": "step", "my_obj": "loss", "extra": "ignore"},
    )

    assert points(run, "loss") == [(5, 2.5), (6, 2.25)]
    assert "extra" not in run.series()


def test_a_mapping_of_an_unknown_column_names_those_that_exist(read: Read) -> None:
    run = read("a.csv", CSV, mapping={"los": "loss"})

    with pytest.raises(UsageError, match='no column is called "los"; there are step, loss'):
        list(run.batches())


def test_show_columns_says_what_became_what(read: Read) -> None:
    shown = read("a.csv", "iter,train_loss,val_loss,seed\n1,2.0,2.5,7\n2,1.5,2.25,7\n").show_columns()

    assert shown.splitlines() == ["step <- iter", "loss      <- train_loss", "eval.loss <- val_loss", "not used: seed"]


def test_the_settings_beside_a_lightning_run_are_at_hand(write: Write) -> None:
    path = write("metrics.csv", CSV)
    write("hparams.yaml", "learning_rate: 0.5\n")

    assert read_run(path).facts == {"learning_rate": 0.5}


def test_settings_with_python_tags_are_not_constructed(write: Write) -> None:
    path = write("metrics.csv", CSV)
    write("hparams.yaml", "a: !!python/object/apply:os.getcwd []\n")

    assert read_run(path).facts == {}


def test_builtin_readers_come_through_the_hook() -> None:
    from healthcheck import readers

    host = PluginHost()
    host.load_builtins([readers])

    assert list(host.registry.readers) == [reader.name for reader in readers.READERS]


def test_the_page_has_a_row_for_every_builtin_reader(repository: Path) -> None:
    from healthcheck import readers

    page = (repository / "docs" / "reference" / "recorded-runs.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| .+ \|$", page.split("## Formats", 1)[1].split("\n## ", 1)[0], re.MULTILINE)
    assert sorted(listed) == sorted(reader.name for reader in readers.READERS)


class PointsReader:
    name = "acme.points"
    help = "lines of our own tool"

    def recognises(self, path: Path, head: bytes) -> float:
        return 1.0 if head.startswith(b"ACME") else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[None, Mapping[str, Any]]]:
        for line in path.read_text().splitlines()[1:]:
            step, loss = line.split("@")
            yield None, {"step": int(step), "loss": float(loss)}


def test_a_plugin_adds_a_format(write: Write, points: Points) -> None:
    registry = Registry()
    registry.adder("readers", "acme")(PointsReader())
    path = write("run.acme", "ACME\n1@2.5\n2@2.25\n")

    assert points(read_run(path, registry=registry), "loss") == [(1, 2.5), (2, 2.25)]


def test_a_reader_that_breaks_does_not_keep_the_others_from_looking(write: Write) -> None:
    class Broken(PointsReader):
        def recognises(self, path: Path, head: bytes) -> float:
            raise RuntimeError("boom")

    from healthcheck.readers.find import default_readers

    [found] = find_runs([write("a.csv", CSV)], {"broken": Broken(), **default_readers()})

    assert found.reader is not None
    assert found.reader.name == "csv"


def test_event_files_are_read(tmp_path: Path, points: Points) -> None:
    tensorboard = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = tensorboard.EventFileWriter(str(tmp_path / "tb"))
    for step, loss in ((1, 2.5), (2, float("nan"))):
        values = [Summary.Value(tag="Loss/train", simple_value=loss), Summary.Value(tag="lr-AdamW", simple_value=0.5)]
        writer.add_event(Event(wall_time=100.0 + step, step=step, summary=Summary(value=values)))
    writer.close()

    [found] = find_runs([tmp_path / "tb"])
    run = read_run(found)

    assert points(run, "loss") == [(1, 2.5), (2, "nan")]
    assert points(run, "lr") == [(1, 0.5), (2, 0.5)]
    assert [time for _, time, _ in run.batches()] == [0.0, 1.0]


def test_event_files_in_the_validation_folder_of_keras_are_of_the_evaluation(tmp_path: Path, points: Points) -> None:
    tensorboard = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = tensorboard.EventFileWriter(str(tmp_path / "logs" / "validation"))
    for step, tag, value in (
        (0, "epoch_loss", 2.5),
        (40, "evaluation_loss_vs_iterations", 2.5),
        (1, "epoch_loss", 1.5),
    ):
        writer.add_event(
            Event(wall_time=100.0, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
        )
    writer.close()

    run = read_run(tmp_path / "logs" / "validation")

    assert points(run, "eval.loss") == [(0, 2.5), (1, 1.5)]
    assert set(run.series()) == {"eval.loss"}


def test_the_two_event_folders_of_keras_are_one_run(tmp_path: Path, points: Points) -> None:
    tensorboard = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    for folder, late, losses in (("train", 0.0, (2.5, 2.0, 1.5)), ("validation", 0.5, (2.75, 2.25, 2.5))):
        writer = tensorboard.EventFileWriter(str(tmp_path / "logs" / folder))
        for epoch, loss in enumerate(losses):
            value = Summary(value=[Summary.Value(tag="epoch_loss", simple_value=loss)])
            writer.add_event(Event(wall_time=100.0 + epoch + late, step=epoch, summary=value))
        writer.close()

    [found] = find_runs([tmp_path])
    run = read_run(found)

    assert found.path == tmp_path / "logs"
    assert points(run, "loss") == [(0, 2.5), (1, 2.0), (2, 1.5)]
    assert points(run, "eval.loss") == [(0, 2.75), (1, 2.25), (2, 2.5)]
    assert not run.resumes


def test_event_files_without_the_extra_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    path = tmp_path / "events.out.tfevents.0.host"
    path.write_bytes(b"\x18" + bytes(11) + b"\n\rbrain.Event:2" + bytes(20))

    with pytest.raises(UnreadableRunError, match=r"pip install 'torch-healthcheck\[tensorboard\]'"):
        list(read_run(path).batches())
