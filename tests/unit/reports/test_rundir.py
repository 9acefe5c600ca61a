"""The folder of a run: unique, private, out of git, found as ``latest``."""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest

from healthcheck.record import folder as rundir

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))


def make(target: str = "train.py") -> Path:
    made, _ = rundir.open_run_dir(target, {})
    assert made is not None
    (made / "run.json").write_text("{}")
    return made


@pytest.mark.parametrize(
    ("target", "end"),
    [
        ("train.py", "-train"),
        ("/a/b c/my train.py", "-train"),
        ("-m pkg.train", "-train"),
        ("x:y?.py", "-x-y"),
        ("", "-run"),
    ],
)
def test_a_name_says_when_and_what_and_suits_every_file_system(target: str, end: str) -> None:
    made = make(target)
    assert made.name.endswith(end)
    assert not set(made.name) & set(':?*<>|"\\/ ')


def test_two_runs_of_one_minute_get_two_folders() -> None:
    assert len({make(), make(), make()}) == 3


def _open(_: int) -> str:
    return str(rundir.open_run_dir("train.py", {})[0])


def test_simultaneous_starts_get_different_folders() -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.map(_open, range(16), chunksize=1)
    assert len(set(made)) == 16


def test_records_are_private_and_stay_out_of_git() -> None:
    made = make()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert (made.parent / ".gitignore").read_text() == "*\n"


def test_latest_is_the_newest_run() -> None:
    make()
    newest = make("other.py")
    assert (newest.parent / "latest").resolve() == newest
    assert rundir.latest_name(newest.parent) == newest.name


def test_latest_works_without_symbolic_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise OSError("links need a privilege here")

    monkeypatch.setattr(Path, "symlink_to", refused)
    make()
    newest = make("other.py")
    assert not (newest.parent / "latest").exists()
    assert rundir.latest_name(newest.parent) == newest.name


def test_a_deleted_latest_falls_back_to_what_is_there() -> None:
    import shutil

    first = make()
    shutil.rmtree(make("other.py"))
    assert rundir.latest_name(first.parent) == first.name


def test_where_nothing_can_be_written_the_record_goes_to_a_temporary_folder_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "file" / "runs"))
    notes: list[str] = []
    made, _ = rundir.open_run_dir("train.py", {}, notes)
    assert made is not None
    assert made.is_dir()
    assert len(notes) == 1
    assert str(made) in notes[0]


def test_where_nothing_at_all_can_be_written_there_is_no_folder_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "file" / "runs"))
    monkeypatch.setattr(rundir.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "file" / "tmp"))
    notes: list[str] = []
    assert rundir.open_run_dir("train.py", {}, notes)[0] is None
    assert len(notes) == 1


def test_keep_deletes_the_oldest_finished_runs_only() -> None:
    finished = [make() for _ in range(4)]
    for i, run in enumerate(finished):
        os.utime(run / "run.json", (1000 + i, 1000 + i))
        if i != 1:
            (run / "report.json").write_text("{}")
    stranger = finished[0].parent / "notes"
    stranger.mkdir()

    rundir.open_run_dir("train.py", {"keep": 3})

    assert [run.is_dir() for run in finished] == [False, True, True, True], "the second may still be running"
    assert stranger.is_dir()


class TestManyRanks:
    @pytest.fixture(autouse=True)
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("MASTER_PORT", "29500")
        monkeypatch.setenv("WORLD_SIZE", "2")

    def test_another_rank_finds_the_folder_of_rank_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        made = make()
        monkeypatch.setenv("RANK", "1")
        assert rundir.open_run_dir("train.py", {}) == (made / "rank-1", False)
        assert not (made / "rank-1").exists(), "a quiet rank leaves nothing behind"

    def test_an_old_launch_on_the_same_port_is_not_taken_for_this_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        made = make()
        (pointer,) = made.parent.glob(".launch-*.json")
        os.utime(pointer, (1000, 1000))
        assert rundir.folder_of_launch(made.parent, wait=0.1) is None

    def test_a_rank_does_not_wait_for_ever(self, tmp_path: Path) -> None:
        assert rundir.folder_of_launch(tmp_path, wait=0.1) is None

    def test_where_rank_0_makes_no_record_the_first_that_has_waited_speaks_for_the_others_and_for_a_late_rank_0(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rundir, "STAND_IN_SECONDS", 0.0)
        monkeypatch.setenv("WORLD_SIZE", "4")
        notes: list[str] = []
        monkeypatch.setenv("RANK", "2")
        made, voice = rundir.open_run_dir("train.py", {}, notes)
        assert made is not None
        assert (made.is_dir(), voice) == (True, True)
        assert ["rank 0" in note and "rank 2 keeps it" in note for note in notes] == [True]
        for rank in ("3", "1", "0"):
            monkeypatch.setenv("RANK", rank)
            assert rundir.open_run_dir("train.py", {}) == (made / f"rank-{rank}", False)
        (made / "report.json").write_text("{}")  # that run is over: the next one with rank 0 is another
        monkeypatch.setenv("RANK", "0")
        again, voice = rundir.open_run_dir("train.py", {})
        assert (again != made, voice) == (True, None)

    def test_for_a_rank_0_that_is_known_to_come_the_first_rank_makes_the_folder_and_waits_for_nobody(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        notes: list[str] = []
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "1")
        began = time.monotonic()
        of_rank_1, voice = rundir.open_run_dir("train.py", {}, notes, rank_zero_comes=True)
        assert of_rank_1 is not None
        assert (of_rank_1.name, voice, notes) == ("rank-1", False, [])
        assert time.monotonic() - began < 2.0
        monkeypatch.setenv("RANK", "0")
        made = of_rank_1.parent
        assert rundir.open_run_dir("train.py", {}, notes, rank_zero_comes=True) == (made, None)
        (made / "run.json").write_text("{}")
        monkeypatch.setenv("RANK", "2")
        assert rundir.open_run_dir("train.py", {}, notes, rank_zero_comes=True) == (made / "rank-2", False)
        monkeypatch.setenv("RANK", "0")  # another launch under the same name
        again, voice = rundir.open_run_dir("train.py", {}, notes, rank_zero_comes=True)
        assert (again not in (None, made), voice) == (True, None)

    def test_a_rank_of_another_node_does_not_stand_in_for_a_rank_0_that_it_may_not_see(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rundir, "WAIT_SECONDS", 0.0)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("GROUP_RANK", "1")
        assert rundir.open_run_dir("train.py", {}) == (None, None)

    def test_a_slurm_allocation_is_no_launch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In an interactive allocation SLURM_NTASKS is set in the shell of a single process."""
        monkeypatch.delenv("WORLD_SIZE")
        monkeypatch.setenv("SLURM_NTASKS", "8")
        assert rundir.job_size() == 1


def test_a_dangling_link_in_the_place_of_gitignore_is_not_written_through(tmp_path: Path) -> None:
    records = tmp_path / "runs"
    records.mkdir()
    (records / ".gitignore").symlink_to(tmp_path / "elsewhere")
    rundir.open_run_dir("train.py", {"runs": str(records)}, [])
    assert not (tmp_path / "elsewhere").exists()
