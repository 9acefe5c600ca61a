"""``healthcheck evidence``: what was kept for an alert, readable without torch; or ask a run that goes on for it now."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from healthcheck.cli.choosing import add_choice, numbered, run_and_alert, worst_first
from healthcheck.cli.options import add_format, print_json
from healthcheck.core.errors import UsageError
from healthcheck.core.text import decode_number, number, plural, shorten, size_text, step, suggest
from healthcheck.record.evidence import Bundle, bundles_of, kept_beside
from healthcheck.record.requests import LOOK_SECONDS, ask_for_evidence
from healthcheck.record.runs import Run
from healthcheck.reports.tables import table_lines

NAME = "evidence"
HELP = "what was kept for an alert: parameters, batch, series, environment, and how to load the files"


def configure(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, "the only one with evidence, else a list")
    parser.add_argument(
        "--now", action="store_true", help="ask a run in progress to keep evidence of its next step, without an alert"
    )
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    run, wanted = run_and_alert(list(args.what), NAME)
    if args.now:
        return _ask(run, wanted)
    bundles = bundles_of(run)
    chosen = bundles if wanted is None else _chosen(run, bundles, wanted)
    if args.format == "json":
        content = {"run": run.name, "bundles": [bundle.to_json() for bundle in chosen]}
        print_json(content)
    elif len(chosen) == 1:
        print("\n".join(bundle_text(run, chosen[0])))
    else:
        print("\n".join(list_text(run, chosen)))
    return 0


def _chosen(run: Run, bundles: list[Bundle], wanted: str) -> list[Bundle]:
    """The bundles of one alert (ranks and repetitions make several). Raises ``UsageError`` that says why there is none."""
    if wanted.isdigit():
        number = int(wanted)
        found = [bundle for bundle in bundles if bundle.number == number]
        if not found:
            alert = numbered(run, number)
            raise UsageError(f"alert {wanted} ({alert['rule']}) of {run.name} has no evidence: {_why_none(alert)}")
        return found
    found = [bundle for bundle in bundles if bundle.rule == wanted]
    if found:
        return found
    alerts = worst_first(alert for alert in run.alerts if alert["rule"] == wanted)
    if alerts:
        raise UsageError(f"{wanted} of {run.name} has no evidence: {_why_none(alerts[0])}")
    kept = list(dict.fromkeys(bundle.rule for bundle in bundles))
    hint = suggest(wanted, kept) or (f"kept for: {', '.join(kept)}" if kept else "this run kept none")
    raise UsageError(f'{run.name} has no evidence of "{wanted}"; {hint}')


def _why_none(alert: dict[str, object]) -> str:
    outcomes = alert.get("actions")
    for outcome in outcomes if isinstance(outcomes, list) else ():
        if outcome.get("action") == "evidence":
            return str(outcome.get("text"))
    return "its rule does not ask for it (then: [evidence])"


def _ask(run: Run, wanted: str | None) -> int:
    if wanted is not None:
        raise UsageError("healthcheck evidence: --now takes a run and no alert")
    if run.status not in ("running", "unfinished"):
        raise UsageError(
            f"healthcheck evidence: {run.name} has ended ({run.status}); what it kept: healthcheck evidence {run.name}"
        )
    # Keeping evidence is slow, and no rank knows that the others were asked: they would wait in the next collective.
    if int(run.facts.get("world_size") or 1) > 1:
        raise UsageError(
            "healthcheck evidence: --now asks runs of a single process only; ranks would stop for it one by one"
        )
    try:
        ask_for_evidence(run.folder)
    except OSError as error:
        raise UsageError(f"healthcheck evidence: {run.folder} cannot be written ({error.strerror})") from None
    print(
        f"asked {run.name} for evidence of its next step; it looks every {LOOK_SECONDS:g} s\n"
        f"then: healthcheck evidence {run.name}"
    )
    return 0


# --------------------------------------------------------------------------- what to say

_WIDTH = 10
"""Of the names of facts, which stand left of them."""
_HOLDS = {
    "README": "a summary of this folder",
    "alert.json": "the alert, as in report.json",
    "series.csv": "one row per step, one column per series",
    "parameters.csv": "one row per parameter: norms and values that are not finite",
    "batch.json": "shapes, types, ranges and hashes of the batch",
    "batch/index.json": "which file holds which tensor of the batch",
    "rng.json": "states of the random number generators",
    "environment.json": "versions, cards, launcher variables, command line",
}
_LAST_ROWS = 4


def list_text(run: Run, bundles: list[Bundle]) -> list[str]:
    """Several bundles, or none."""
    beside = kept_beside(run)
    if not bundles:
        lines = [f"{run.shown} kept no evidence: {_nothing_kept(run)}"]
    else:
        total = sum(bundle.total_bytes for bundle in bundles)
        lines = [f"{run.shown}: evidence of {plural(len(bundles), 'alert')}, {size_text(total)}"]
        table = []
        for bundle in bundles:
            at = bundle.alert.get("fired_step")
            folder = bundle.folder.relative_to(run.folder).as_posix()
            table.append(
                [str(bundle.number), bundle.rule, step(at) if at else "-", size_text(bundle.total_bytes), folder]
            )
        lines += table_lines(table, "rlrrl", heads=("alert", "rule", "step", "size", "folder"))
        lines.append(f"  one of them: healthcheck evidence {run.name} {bundles[0].number}")
    if beside:
        lines.append(f"  kept by other actions: {shorten(beside)}")
    return lines


def bundle_text(run: Run, bundle: Bundle) -> list[str]:
    """One bundle: what it says, which files it has, how to load them."""
    alert = bundle.alert
    at = f" at step {step(alert['fired_step'])}" if "fired_step" in alert else ""
    lines = [f"evidence of {bundle.rule}{at}         {run.shown}/{bundle.folder.relative_to(run.folder).as_posix()}"]
    for name, text in _facts(bundle):
        lines.append(f"  {name.ljust(_WIDTH)} {text}".rstrip())
    lines += ["", *_file_lines(bundle), "", *_how_to_load(bundle)]
    beside = kept_beside(run)
    if beside:
        lines.append(f"  kept by other actions: {shorten(beside)}")
    return lines


def _nothing_kept(run: Run) -> str:
    if not run.alerts:
        return "it had no alerts"
    for alert in run.alerts:
        for outcome in alert.get("actions", ()):
            if outcome["action"] == "evidence":
                return str(outcome["text"])
    return "none of its rules that fired asks for it (then: [evidence])"


def _facts(bundle: Bundle) -> Iterator[tuple[str, str]]:
    alert = bundle.alert
    if alert.get("message"):
        yield "said", f"{alert['severity']}: {alert['message']}"
    if alert.get("facts"):
        yield "seen", "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in alert["facts"].items())
    if bundle.moment:
        yield "moment", bundle.moment
    yield from _blocks("parameters", _parameters(bundle))
    yield from _blocks("batch", _batch(bundle))
    yield from _blocks("series", _series(bundle))
    if bundle.generators:
        yield "random", f"states of {', '.join(bundle.generators)}, after the batch was drawn"
    yield from _blocks("made on", _surroundings(bundle.environment))
    yield from _blocks("not here", bundle.not_here)
    if alert.get("hint"):
        yield "try", str(alert["hint"])


def _blocks(name: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for i, line in enumerate(lines):
        yield (name if i == 0 else "", line)


def _parameters(bundle: Bundle) -> list[str]:
    rows = bundle.parameters
    if not rows:
        return []
    bad = [sum(_count(row[key]) > 0 for row in rows) for key in ("weight_nonfinite", "grad_nonfinite")]
    without = sum(row["grad_norm"] == "" for row in rows)
    head = f"{plural(len(rows), 'tensor')}: not finite in {bad[0]:,} (weights) and {bad[1]:,} (gradients)"
    head += f"; {without:,} without a gradient" if without else ""
    table = []
    for row in bundle.worst_parameters():
        wrong = [
            f"{_count(row[key]):,} {what}"
            for key, what in (("weight_nonfinite", "weights"), ("grad_nonfinite", "gradients"))
            if _count(row[key])
        ]
        table.append(
            [row["name"], row["shape"], _cell(row["weight_norm"]), _cell(row["grad_norm"]), ", ".join(wrong) or "-"]
        )
    heads = ("worst first", "shape", "weight norm", "gradient norm", "not finite")
    return [head, *_inner_table(table, "llrrl", heads)]


def _inner_table(rows: list[list[str]], align: str = "", heads: Sequence[str] = (), indent: int = 2) -> list[str]:
    """Lines of a table that stands to the right of a fact's name, and so has less room than a table of its own."""
    left = len(f"  {'':<{_WIDTH}} ")
    return [line[left:] for line in table_lines(rows, align, heads=heads, indent=left + indent)]


def _batch(bundle: Bundle) -> list[str]:
    leaves = bundle.batch.get("leaves", [])
    table = []
    for leaf in leaves[:8]:
        shape = "x".join(map(str, leaf["shape"])) or "scalar" if "shape" in leaf else ""
        kind = f"{leaf.get('dtype', leaf.get('type', '?'))} {shape}".strip()
        span = (
            f"{_value(leaf['min'])} to {_value(leaf['max'])}, mean {_value(leaf.get('mean'))}" if "min" in leaf else ""
        )
        bad = f"{leaf['nonfinite']:,} not finite" if leaf.get("nonfinite") else ""
        seen = ", ".join(text for text in (span, bad) if text)
        table.append([leaf.get("path") or "(the batch)", kind, seen, f"sha256 {str(leaf.get('sha256', ''))[:12]}"])
    lines = _inner_table(table, indent=0)
    if len(leaves) > 8:
        lines.append(f"and {plural(len(leaves) - 8, 'more part')}: batch.json")
    lines += [
        f"sample ids {path}: {shorten([str(i) for i in ids], 12)}"
        for path, ids in bundle.batch.get("sample_ids", {}).items()
    ]
    return lines


def _series(bundle: Bundle) -> list[str]:
    rows = bundle.series
    if not rows:
        return []
    names = [name for name in rows[0] if name != "step"]
    own = [str(fact["name"]) for fact in bundle.alert.get("series", []) if fact.get("name") in names]
    shown = list(dict.fromkeys([*own, *(name for name in ("loss", "grad_norm", "lr") if name in names)]))[:5]
    head = f"{plural(len(names), 'series', 'series')}, steps {rows[0]['step']} to {rows[-1]['step']}; the last values:"
    table = [[row["step"], *(_cell(row[name]) for name in shown)] for row in rows[-_LAST_ROWS:]]
    return [head, *_inner_table(table, "r" * (1 + len(shown)), ("step", *shown))]


def _surroundings(found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    versions = [f"python {found.get('python', '?')}"]
    versions += [f"{name} {version}" for name, version in found.get("distributions", {}).items()]
    lines = [", ".join(versions), ", ".join(map(str, found.get("devices", [])))]
    if found.get("variables"):
        lines.append(" ".join(f"{name}={value}" for name, value in found["variables"].items()))
    if found.get("argv"):
        lines.append(f"command: {shlex.join(map(str, found['argv']))}")
    return [line for line in lines if line]


def _file_lines(bundle: Bundle) -> list[str]:
    contents = {str(entry.get("file")): entry for entry in bundle.contents}
    rows = []
    for name, amount in bundle.files.items():
        entry = contents.get(name)
        shape = "x".join(map(str, entry.get("shape", []))) if entry else ""
        holds = f"{entry.get('path') or 'the batch'}: {entry.get('dtype')} {shape}" if entry else _HOLDS.get(name, "")
        rows.append([name, size_text(amount), holds])
    return ["  files", *table_lines(rows, "lrl", indent=4)]


def _how_to_load(bundle: Bundle) -> list[str]:
    """Lines to paste, for the files that are here; only what reads torch's own states and tensors needs torch."""
    here = shlex.quote(str(bundle.folder))
    lines = ["  load", f"    cd {here} && python"]
    lines += ["    import csv, json, random", "    from pathlib import Path"]
    if "series.csv" in bundle.files:
        lines.append('    rows = list(csv.DictReader(Path("series.csv").read_text().splitlines()))')
    if bundle.generators:
        lines += [
            '    states = json.loads(Path("rng.json").read_text())      # the draws after this moment again',
            '    saved = states["python"]; random.setstate((saved["version"], tuple(saved["state"]), saved["gauss_next"]))',
            "    import torch",
            '    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch_cpu"]), dtype=torch.uint8))',
        ]
    if "numpy" in bundle.generators:
        lines += [
            '    import numpy; of = states["numpy"]',
            '    numpy.random.set_state((of["kind"], of["keys"], of["position"], of["has_gauss"], of["cached_gaussian"]))',
        ]
    if bundle.contents:
        lines += [
            '    entry = json.loads(Path("batch/index.json").read_text())[0]      # bool was written as uint8',
            '    data = bytearray(Path(entry["file"]).read_bytes())',
            '    tensor = torch.frombuffer(data, dtype=getattr(torch, entry["dtype"])).reshape(entry["shape"])',
        ]
    return lines


def _cell(text: str) -> str:
    if not text:
        return "-"
    try:
        return number(float(text))
    except ValueError:
        return text


def _value(value: Any) -> str:
    try:
        return number(float(decode_number(value)))
    except (TypeError, ValueError):
        return "-"


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        return 0
    return int(value) if math.isfinite(value) else 0
