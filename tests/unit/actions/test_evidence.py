"""Evidence: enough to understand an alert, nothing that is private, nothing that needs unpickling."""

from __future__ import annotations

import csv
import json
import os
import random
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from healthcheck.actions import evidence as evidence_module
from healthcheck.actions.evidence import MAX_BUNDLES, Evidence
from healthcheck.core.alerts import Alert
from healthcheck.core.protocols import ActionContext

Context = Callable[..., ActionContext]


def read(path: Path, name: str) -> object:
    return json.loads((path / name).read_text())


def test_a_bundle_holds_alert_series_parameters_batch_rng_and_environment(alert: Alert, context: Context) -> None:
    batch = {
        "x": torch.tensor([[1.0, float("nan")], [3.0, -2.0]]),
        "label": torch.tensor([1, 0]),
        "id": ["row-7", "row-9"],
    }
    outcome = Evidence().run(alert, context(batch=batch))
    assert outcome.done
    folder = Path(outcome.data["path"])
    assert folder.name == "001"
    assert outcome.text == f"evidence: {folder}"
    assert {p.name for p in folder.iterdir()} == {
        "alert.json", "series.csv", "parameters.csv", "batch.json", "rng.json", "environment.json", "README",
    }  # fmt: skip
    assert read(folder, "alert.json")["value"] == "nan"  # type: ignore[index]


def test_the_parameter_table_finds_the_bad_gradient_and_its_norm_is_of_the_finite_rest(
    alert: Alert, context: Context, view: object
) -> None:
    folder = Path(Evidence().run(alert, context()).data["path"])
    rows = {row["name"]: row for row in csv.DictReader((folder / "parameters.csv").read_text().splitlines())}
    assert set(rows) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert rows["0.weight"]["shape"] == "3x4"
    assert rows["0.weight"]["grad_nonfinite"] == "1"
    assert rows["1.weight"]["grad_nonfinite"] == "0"
    model = view.model  # type: ignore[attr-defined]
    assert float(rows["1.weight"]["grad_norm"]) == pytest.approx(model[1].weight.grad.norm().item(), rel=1e-5)
    rest = model[0].weight.grad.flatten()[1:]
    assert float(rows["0.weight"]["grad_norm"]) == pytest.approx(rest.norm().item(), rel=1e-5)


def test_a_gradient_without_any_finite_value_has_no_norm_of_zero(alert: Alert, context: Context, view: object) -> None:
    view.model[0].bias.grad.fill_(float("nan"))  # type: ignore[attr-defined]
    folder = Path(Evidence().run(alert, context()).data["path"])
    rows = {row["name"]: row for row in csv.DictReader((folder / "parameters.csv").read_text().splitlines())}
    assert (rows["0.bias"]["grad_norm"], rows["0.bias"]["grad_nonfinite"]) == ("nan", "3")


def test_the_series_table_has_a_row_per_step_and_leaves_missing_values_empty(alert: Alert, context: Context) -> None:
    folder = Path(Evidence().run(alert, context({"steps": 10})).data["path"])
    rows = list(csv.DictReader((folder / "series.csv").read_text().splitlines()))
    assert [row["step"] for row in rows][-1] == "131"
    assert rows[-1]["loss"] == ""
    assert float(rows[-1]["grad_norm"]) == 1.131
    assert len(rows) == 11  # ten values of each; loss ends one step earlier


def test_a_batch_is_described_without_its_contents(alert: Alert, context: Context) -> None:
    batch = (
        {"text": "the patient's name", "x": torch.tensor([0.25, float("inf"), 0.75]), "ids": torch.tensor([4, 5])},
    )
    folder = Path(Evidence().run(alert, context(batch=batch)).data["path"])
    described = read(folder, "batch.json")
    leaves = {leaf["path"]: leaf for leaf in described["leaves"]}  # type: ignore[index]
    x = leaves["[0].x"]
    assert (x["shape"], x["dtype"], x["min"], x["max"], x["mean"], x["nonfinite"]) == (
        [3],
        "float32",
        0.25,
        0.75,
        0.5,
        1,
    )
    assert len(x["sha256"]) == 64
    assert described["sample_ids"] == {"[0].ids": [4, 5]}  # type: ignore[index]
    assert all(b"patient" not in p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert not (folder / "batch").exists()


def test_equal_batches_have_equal_hashes_and_others_do_not(alert: Alert, context: Context) -> None:
    action = Evidence()
    hashes = []
    for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 2.5]):
        folder = Path(action.run(alert, context(batch=torch.tensor(values))).data["path"])
        hashes.append(read(folder, "batch.json")["leaves"][0]["sha256"])  # type: ignore[index]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("batch", ["statistics", "full"])
def test_of_a_step_that_is_over_what_is_gone_is_said_and_not_replaced(
    alert: Alert, context: Context, batch: str
) -> None:
    alert.fired_step = 128
    given = context({"batch": batch}, batch={"x": torch.zeros(2)}, before_update=False)
    bundle = Path(Evidence().run(alert, given).data["path"])
    names = {path.name for path in bundle.rglob("*")}
    assert not {"batch.json", "rng.json", "index.json"} & names
    text = (bundle / "README").read_text()
    assert "batch.json: that of step 128 is gone: it was judged during step 131" in text
    assert "rng.json: that of step 128 is gone" in text
    assert "Weights and gradients were read at step 131: those of step 128 are gone." in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_full_contents_load_back_without_unpickling(alert: Alert, context: Context, dtype: torch.dtype) -> None:
    batch = {"x": torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)[:, 1:]}  # not contiguous
    folder = Path(Evidence().run(alert, context({"batch": "full"}, batch=batch)).data["path"])
    (entry,) = read(folder, "batch/index.json")  # type: ignore[misc]
    raw = bytearray((folder / entry["file"]).read_bytes())
    stored = torch.uint8 if dtype is torch.bool else getattr(torch, entry["dtype"])
    assert torch.equal(torch.frombuffer(raw, dtype=stored).reshape(entry["shape"]).to(dtype), batch["x"])


def test_contents_of_a_part_of_a_larger_tensor_are_those_of_the_part(alert: Alert, context: Context) -> None:
    """A batch is often a slice of the data set's one tensor."""
    rows = torch.arange(12.0).reshape(6, 2)
    folder = Path(Evidence().run(alert, context({"batch": "full"}, batch=rows[2:4])).data["path"])
    raw = bytearray((folder / "batch" / "000.bin").read_bytes())
    assert torch.frombuffer(raw, dtype=torch.float32).tolist() == [4.0, 5.0, 6.0, 7.0]


def test_rng_states_restore_the_same_draws_and_taking_them_draws_nothing(alert: Alert, context: Context) -> None:
    torch.manual_seed(3)
    random.seed(3)
    folder = Path(Evidence().run(alert, context(batch=torch.randn(4))).data["path"])
    expected = torch.rand(3), random.random()
    states = read(folder, "rng.json")
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch_cpu"]), dtype=torch.uint8))  # type: ignore[index]
    python = states["python"]  # type: ignore[index]
    random.setstate((python["version"], tuple(python["state"]), python["gauss_next"]))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_no_secret_of_the_environment_or_the_command_line_is_written(
    alert: Alert, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_SECRETSECRETSECRET")
    monkeypatch.setenv("NCCL_TOKEN", "SECRET-nccl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--lr", "1e-3", "--api-key", "SECRET1", "--data", "s3://me:SECRET2@host/x"]
    )
    folder = Path(Evidence().run(alert, context()).data["path"])
    assert all(b"SECRET" not in p.read_bytes() for p in folder.rglob("*") if p.is_file())
    environment = read(folder, "environment.json")
    assert environment["variables"]["CUDA_VISIBLE_DEVICES"] == "0,1"  # type: ignore[index]
    assert environment["argv"][1:3] == ["--lr", "1e-3"]  # type: ignore[index]


def test_folders_and_files_are_for_the_owner_only(alert: Alert, context: Context) -> None:
    folder = Path(Evidence().run(alert, context({"batch": "full"}, batch=torch.ones(2))).data["path"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()} == {0o600}


def test_a_run_gets_five_bundles_at_most(alert: Alert, context: Context) -> None:
    outcomes = []
    for number in range(1, MAX_BUNDLES + 2):
        alert.number = number
        outcomes.append(Evidence().run(alert, context()))
    assert [o.done for o in outcomes] == [True] * MAX_BUNDLES + [False]
    assert outcomes[-1].text == "this run has 5 bundles already"


@pytest.mark.slow
def test_what_does_not_fit_the_size_cap_is_left_out_and_named(
    alert: Alert, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_module, "MAX_BYTES", 200_000)
    outcome = Evidence().run(alert, context({"batch": "full"}, batch=torch.zeros(100_000)))
    folder = Path(outcome.data["path"])
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 200_000
    assert any("batch/000.bin" in entry for entry in outcome.data["left_out"])
    assert "batch/000.bin" in (folder / "README").read_text()


def test_without_a_record_nothing_is_done_and_it_says_why(alert: Alert, context: Context) -> None:
    outcome = Evidence().run(alert, context(run_dir=None))
    assert (outcome.done, outcome.text) == (False, "this run keeps no record")


def test_an_unwritable_place_is_an_outcome_and_no_exception(alert: Alert, context: Context, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    outcome = Evidence().run(alert, context())
    assert not outcome.done
    assert "directory" in outcome.text.lower()


def test_an_alert_of_the_watchdog_has_no_event_and_still_gives_what_is_known(alert: Alert, context: Context) -> None:
    outcome = Evidence().run(alert, context(event=None, before_update=False))
    folder = Path(outcome.data["path"])
    assert (folder / "series.csv").exists()
    assert any("model is not known" in entry for entry in outcome.data["left_out"])


def test_a_broken_batch_costs_only_its_own_file(alert: Alert, context: Context) -> None:
    class Broken(dict[str, object]):
        def items(self) -> object:  # type: ignore[override]
            raise RuntimeError("lazy batch")

    outcome = Evidence().run(alert, context(batch=Broken(x=1)))
    assert outcome.done
    assert (Path(outcome.data["path"]) / "parameters.csv").exists()
    assert any("lazy batch" in entry for entry in outcome.data["left_out"])


def test_the_contents_of_a_batch_are_shown_and_the_printed_lines_read_them_back(alert: Alert, context: Context) -> None:
    from healthcheck.cli.evidence import bundle_text
    from healthcheck.record.evidence import bundles_of
    from healthcheck.record.runs import Run

    batch = {"x": torch.tensor([[1.0, float("nan")], [3.0, -2.0]]), "id": ["row-7", "row-9"]}
    folder = Path(Evidence().run(alert, context({"batch": "full"}, batch=batch)).data["path"])
    run = Run(folder.parents[1])
    (bundle,) = bundles_of(run)
    lines = bundle_text(run, bundle)
    assert any("x   float32 2x2" in line and "1 not finite" in line for line in lines)
    assert any("sample ids id: row-7, row-9" in line for line in lines)
    load = "\n".join(line.strip() for line in lines[lines.index("  load") + 2 :])
    found: dict[str, object] = {}
    before = (random.getstate(), torch.get_rng_state(), os.getcwd())
    os.chdir(folder)
    try:
        exec(load, found)  # the lines that a person would paste
    finally:
        os.chdir(before[2])
        random.setstate(before[0])
        torch.set_rng_state(before[1])
    assert torch.equal(torch.nan_to_num(found["tensor"]), torch.nan_to_num(batch["x"]))  # type: ignore[arg-type]
