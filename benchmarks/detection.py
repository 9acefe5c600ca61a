"""How good a rule pack is on recorded runs of other people: recall, delay, false alarms.

    python benchmarks/detection.py                                   # healthcheck:recommended on both sets of recordings
    python benchmarks/detection.py --corpus ../shared/corpus2        # on one of them
    python benchmarks/detection.py --rules my.yaml --set spike.causes.loss.when.robust_z.above=12
    python benchmarks/detection.py --only-wrong                      # misses and false alarms only
    python benchmarks/detection.py --faults --seeds 0,1,2            # the toy faults too, run live (needs torch)
    python benchmarks/detection.py --leave-one-out                   # every tuned number, without each source in turn
    python benchmarks/detection.py --faults --figures benchmarks/figures.yaml   # what the pages of rules show
    python benchmarks/detection.py --json
    python benchmarks/detection.py --markdown docs/explanation/detection-quality.md

The recordings (``../shared/corpus`` and ``corpus2``) are not part of this repository; without them there is nothing to score,
exit 0. Both were in view when rules were chosen: what is printed is in-sample, but for ``--leave-one-out``.
What counts as caught and as false: benchmarks/scoring.py. Which cause names which kind: benchmarks/kinds.yaml.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scoring import CORPORA, Found, Scored, judged_causes, kinds, labels, named_causes, score

from healthcheck.assembly import RuleChoice
from healthcheck.cli.replay import Given, judge_of
from healthcheck.reports.tables import table_lines

BEGIN, END = "<!-- detection: begin (benchmarks/detection.py --markdown) -->\n", "<!-- detection: end -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rules", action="append", help="rule file or pack (default healthcheck:recommended)")
    parser.add_argument("--set", action="append", default=[], metavar="RULE.KEY=VALUE")
    parser.add_argument("--only", action="append", default=[], metavar="RULE")
    parser.add_argument("--off", action="append", default=[], metavar="RULE")
    parser.add_argument("--profile")
    parser.add_argument(
        "--corpus", type=Path, action="append", metavar="FOLDER", help="a set of recordings (default: both)"
    )
    parser.add_argument("--run", action="append", default=[], metavar="ID", help="these runs only")
    parser.add_argument("--only-wrong", action="store_true", help="print misses and false alarms only")
    parser.add_argument("--faults", action="store_true", help="run the toy faults live, too")
    parser.add_argument("--seeds", default="0", help="seeds of the toy faults, such as 0,1,2")
    parser.add_argument("--leave-one-out", action="store_true", help="what the tuned numbers owe to single sources")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="write recall and false alarms of each cause")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the generated part of this page")
    args = parser.parse_args()
    wanted = args.corpus or list(CORPORA)
    corpora = [corpus for corpus in wanted if (corpus / "labels.yaml").exists()]
    if not corpora:
        print(f"detection: no recordings in {' or '.join(map(str, wanted))}; nothing to score")
        return 0
    given = Given(
        RuleChoice(
            rules=args.rules or ["healthcheck:recommended"],
            set=args.set,
            only=args.only,
            off=args.off,
            profile=args.profile,
        )
    )
    scored = [s for corpus in corpora for s in run_corpus(given, corpus, args.run)]
    faults = _faults(args) if args.faults else []
    varied, left = _varied(given, corpora, scored) if args.leave_one_out else ([], [])
    if args.json:
        print(json.dumps(as_json(scored, faults), indent=1))
    elif args.figures:
        from figures import write_figures

        write_figures(args.figures, scored, faults, [cause.id for cause in given.load().causes])
        print(f"wrote {args.figures}: {headline(scored)}")
    elif args.markdown:
        write_markdown(args.markdown, scored, faults, given, varied, left)
        print(f"wrote {args.markdown}: {headline(scored)}")
    else:
        print_text(scored, faults, given, only_wrong=args.only_wrong)
        if varied:
            from leave_one_out import HEADER as LEFT_HEADER

            print("\n" + "\n".join(table_lines(varied, heads=LEFT_HEADER)))
            print(f"\n{LEFT}")
            print("\n".join(table_lines(by_set(left), "lrrrrr", heads=SET_HEADER)))
    return 0


def run_corpus(given: Given, corpus: Path, wanted: Sequence[str] = ()) -> list[Scored]:
    """Replay and score every run of the corpus."""
    named = kinds()
    judge = judge_of(given)
    results = []
    for entry in labels(corpus):
        if wanted and entry["id"] not in wanted:
            continue
        entry["set"] = corpus.name
        path = str(corpus / entry["file"])
        outcome = judge(path)
        if outcome.problem:
            results.append(
                Scored(entry, [], "missed" if entry["label"] == "incident" else "clean", problem=outcome.problem)
            )
            continue
        found = [
            Found(name, step, severity, named.get(name, frozenset()), alert["series"][0]["name"])
            for alert in outcome.report["alerts"]
            for name, step, severity in named_causes(alert)
        ]
        steps = {name: list(column.steps) for name, column in given.read(path).series().items()}
        scored = score(entry, sorted(found, key=lambda f: f.step or 0), steps)
        scored.judged = judged_causes(outcome.report)
        results.append(scored)
    return results


def _faults(args: argparse.Namespace) -> list[Any]:
    from toyfaults import run_faults

    return run_faults(args.rules or ["healthcheck:recommended"], [int(s) for s in args.seeds.split(",")])


def _varied(given: Given, corpora: Sequence[Path], scored: Sequence[Scored]) -> tuple[list[list[str]], list[Scored]]:
    """What each tuned number owes to single sources, and every run by the numbers that the other sources choose."""
    from leave_one_out import left_out, rows, vary

    whole = {(s.entry["set"], s.entry["id"]): s for s in scored}
    numbers = vary(given, corpora, whole)
    left = {(s.entry["set"], s.entry["id"]): s for s in left_out(given, corpora, numbers, whole)}
    return rows(numbers), [left[key] for key in whole]


LEFT = "each run by the numbers that all sources but its own choose"


# --------------------------------------------------------------------------- summary


def headline(scored: Sequence[Scored]) -> str:
    bad, good = _split(scored)
    warned = sum(bool(s.false) for s in good)
    errors = sum(any(f.severity == "error" for f in s.false) for s in good)
    early = sum(bool(s.false) for s in bad)
    caught = sum(s.verdict == "caught" for s in bad)
    return (
        f"caught {caught} of {len(bad)} incidents; healthy runs with a warning {warned} of {len(good)}, "
        f"with an error {errors}; incidents with an alert clearly before the window {early}"
    )


SET_HEADER = ["", "caught", "mean of sources", "healthy: warning", "mean of sources", "error"]


def by_set(scored: Sequence[Scored]) -> list[list[str]]:
    """Rows: each set of recordings and all together; in numbers of runs, and as the mean over sources, each of which counts once."""
    sets = list(dict.fromkeys(str(s.entry["set"]) for s in scored))
    rows = []
    for name, members in [(n, [s for s in scored if s.entry["set"] == n]) for n in sets] + [("together", list(scored))]:
        bad, good = _split(members)
        rows.append(
            [
                name,
                f"{sum(s.verdict == 'caught' for s in bad)}/{len(bad)}",
                _mean_of_sources(bad, lambda s: s.verdict == "caught"),
                f"{sum(bool(s.false) for s in good)}/{len(good)}",
                _mean_of_sources(good, lambda s: bool(s.false)),
                str(sum(any(f.severity == "error" for f in s.false) for s in good)),
            ]
        )
    return rows if len(sets) > 1 else rows[:1]


def _mean_of_sources(scored: Sequence[Scored], holds: Callable[[Scored], bool]) -> str:
    sources: dict[str, list[bool]] = defaultdict(list)
    for s in scored:
        sources[s.source].append(holds(s))
    return f"{mean(mean(held) for held in sources.values()):.0%} of {len(sources)}" if sources else "-"


def _split(scored: Iterable[Scored]) -> tuple[list[Scored], list[Scored]]:
    listed = list(scored)
    return [s for s in listed if s.incident], [s for s in listed if not s.incident]


def groups(scored: Sequence[Scored], key: Callable[[Scored], str]) -> list[list[str]]:
    """Rows: group, caught / late / early / missed, median delay, healthy with warning / error, false before the window."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for s in scored:
        found[key(s)].append(s)
    rows = []
    for name, members in sorted(found.items()):
        bad, good = _split(members)
        count = Counter(s.verdict for s in bad)
        delays = [s.delay for s in bad if s.verdict == "caught" and s.delay is not None]
        rows.append(
            [
                name,
                f"{count['caught']}/{len(bad)}" if bad else "-",
                str(count["late"] or ""),
                str(count["early"] or ""),
                str(count["missed"] or ""),
                f"{median(delays):.2f}" if delays else "-",
                f"{sum(bool(s.false) for s in good)}/{len(good)}" if good else "-",
                f"{sum(any(f.severity == 'error' for f in s.false) for s in good)}/{len(good)}" if good else "-",
                str(sum(bool(s.false) for s in bad) or ""),
            ]
        )
    return rows


HEADER = ["", "caught", "late", "early", "missed", "delay", "healthy: warning", "error", "before window"]


def by_rule(scored: Sequence[Scored]) -> list[list[str]]:
    """Rows: cause, runs in which it decided a catch, fired in (incident, healthy), false in (incident, healthy)."""
    rules = sorted({f.name for s in scored for f in s.found})
    rows = []
    for rule in rules:
        bad, good = _split(s for s in scored if any(f.name == rule for f in s.found))
        rows.append(
            [
                rule,
                str(sum(s.verdict == "caught" and s.by is not None and s.by.name == rule for s in bad)),
                str(sum(s.verdict in ("early", "late") and s.by is not None and s.by.name == rule for s in bad)),
                str(len(bad)),
                str(sum(any(f.name == rule for f in s.false) for s in bad)),
                str(len(good)),
                ", ".join(s.entry["id"] for s in good[:6]),
            ]
        )
    return rows


RULE_HEADER = ["cause", "catches", "early/late", "incidents", "before window", "healthy", "healthy runs"]


# --------------------------------------------------------------------------- text


def line(s: Scored) -> str:
    """``gpt-x  divergence  [100, 200]  caught at 0.3 by loss-divergence   alerts: loss-spike 90, ...``."""
    window = "{:,}..{:,}".format(*s.entry["onset_step_range"]) if s.incident else "-"
    mark = {"caught": "ok  ", "clean": "ok  ", "false": "FALSE"}.get(s.verdict, s.verdict.upper())
    extra = f" +{len(s.false)} false" if s.incident and s.false else ""
    said = ", ".join(
        f"{'!' if f.severity == 'error' else ''}{f.name}@{f.step:,}{'*' if s.by is f else ''}{'?' if f in s.false else ''}"
        for f in s.found[:8]
    )
    more = f" and {len(s.found) - 8} more" if len(s.found) > 8 else ""
    delay = f" {s.delay:+.2f}" if s.delay is not None else ""
    kind = s.entry["kind"] if s.incident else f"healthy: {s.entry['kind']}"[:24]
    confidence = s.entry.get("confidence", "")[:1]
    return f"{s.entry['id']:<26} {kind:<24} {confidence} {window:<22} {mark}{delay}{extra}  {said}{more}{s.problem}"


def wrong(s: Scored) -> bool:
    return s.verdict not in ("caught", "clean") or bool(s.false)


def print_text(scored: Sequence[Scored], faults: Sequence[Any], given: Given, *, only_wrong: bool) -> None:

    print("per run (* decided, ? false, ! error; delay 0 = start of the window, 1 = its end):")
    for s in sorted(scored, key=lambda s: (not s.incident, s.entry["kind"], s.entry["id"])):
        if not only_wrong or wrong(s):
            print("  " + line(s))
    incidents = [s for s in scored if s.incident]
    for title, rows in (
        ("by kind (incidents)", groups(incidents, lambda s: s.entry["kind"])),
        ("by confidence", groups(scored, lambda s: s.entry.get("confidence", "?"))),
        ("by source", groups(scored, lambda s: s.source)),
    ):
        print(f"\n{title}")
        print("\n".join(table_lines(rows, "lrrrrrrrr", heads=HEADER)))
    print("\nby cause (one that is not in kinds.yaml cannot catch)")
    print("\n".join(table_lines(by_rule(scored), "lrrrrrl", heads=RULE_HEADER)))
    unnamed = sorted({c.id for c in given.load().causes} - set(kinds()))
    print(f"\ncauses of the pack without a kind: {', '.join(unnamed) or 'none'}")
    if faults:
        from toyfaults import text

        print("\n" + text(faults))
    print("\n" + "\n".join(table_lines(by_set(scored), "lrrrrr", heads=SET_HEADER)))
    print(f"\n{headline(scored)}")


# --------------------------------------------------------------------------- JSON and Markdown


def as_json(scored: Sequence[Scored], faults: Sequence[Any]) -> dict[str, Any]:
    return {
        "summary": headline(scored),
        "runs": [
            {
                "id": s.entry["id"],
                "label": s.entry["label"],
                "kind": s.entry["kind"],
                "confidence": s.entry.get("confidence"),
                "source": s.source,
                "window": s.entry["onset_step_range"],
                "verdict": s.verdict,
                "by": s.by.name if s.by else None,
                "step": s.by.step if s.by else None,
                "delay": s.delay,
                "alerts": [[f.name, f.step, f.severity] for f in s.found],
                "false": [[f.name, f.step, f.severity] for f in s.false],
                "problem": s.problem or None,
            }
            for s in scored
        ],
        "faults": [f.to_json() for f in faults],
    }


def _md(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def markdown(
    scored: Sequence[Scored],
    faults: Sequence[Any],
    given: Given,
    varied: Sequence[Sequence[str]] = (),
    left: Sequence[Scored] = (),
) -> str:
    bad, _ = _split(scored)
    loaded = given.load()
    lines = [
        f"Rules: `{' '.join(given.choice['rules'])}`, {len(loaded.rules)} rules with {len(loaded.causes)} causes; {len(scored)} recorded runs.",
        "",
        f"**{headline(scored)[0].upper()}{headline(scored)[1:]}.**",
        "",
        "A delay of 0 is the start of the onset window, 1 its end; it is the median over caught incidents. *Before window*",
        "counts incidents with any alert more than one sample before the window.",
        "",
        *_sets(scored, left),
        "",
        "### By kind",
        "",
        *_md(["kind", *HEADER[1:6], HEADER[8]], [[*r[:6], r[8]] for r in groups(bad, lambda s: s.entry["kind"])]),
        "",
        "### By confidence of the label",
        "",
        *_md(["confidence", *HEADER[1:]], groups(scored, lambda s: s.entry.get("confidence", "?"))),
        "",
        "### By source",
        "",
        *_md(["source", *HEADER[1:]], groups(scored, lambda s: s.source)),
        "",
        "### By cause",
        "",
        *_md(RULE_HEADER, by_rule(scored)),
        "",
        "### Misses",
        "",
    ]
    misses = [s for s in bad if s.verdict != "caught"]
    lines += [f"- {_sentence(s)}" for s in misses] or ["None."]
    lines += ["", "### False alarms", ""]
    lines += [f"- {_false_sentence(s)}" for s in scored if s.false] or ["None."]
    if varied:
        from leave_one_out import HEADER as LEFT_HEADER

        lines += ["", "### Each tuned number, without one source at a time", "", *_md(LEFT_HEADER, varied)]
    if faults:
        from toyfaults import markdown as faults_markdown

        lines += ["", "### Toy faults, run live", "", *faults_markdown(faults)]
    return "\n".join(lines) + "\n"


def _sets(scored: Sequence[Scored], left: Sequence[Scored]) -> list[str]:
    """The table of sets; beside each figure that of runs judged by the numbers that all other sources choose."""
    if not left:
        return _md(["set", *SET_HEADER[1:]], by_set(scored))
    columns = [column for name in SET_HEADER[1:] for column in (name, "source left out")]
    rows = [
        [own[0], *(cell for pair in zip(own[1:], other[1:], strict=True) for cell in pair)]
        for own, other in zip(by_set(scored), by_set(left), strict=True)
    ]
    return [*_md(["set", *columns], rows), "", f"*Source left out*: {LEFT}."]


def _sentence(s: Scored) -> str:
    first, last = s.entry["onset_step_range"]
    how = {
        "missed": "nothing fitting was said",
        "early": f"{s.by.name if s.by else ''} at {s.by.step if s.by else 0:,}, before the window",
        "late": f"{s.by.name if s.by else ''} at {s.by.step if s.by else 0:,}, after the window",
    }[s.verdict]
    other = sorted({f.name for f in s.found if s.by is not f})
    more = f" (also said: {', '.join(other)})" if other else ""
    return f"`{s.entry['id']}`, {s.entry['kind']}, window {first:,} to {last:,}: {how}{more}. Label: {s.entry.get('note', '')}."


def _false_sentence(s: Scored) -> str:
    said = ", ".join(f"{f.name} at {f.step:,}" + (" (error)" if f.severity == "error" else "") for f in s.false[:4])
    what = "incident, before its window" if s.incident else "healthy"
    return f"`{s.entry['id']}` ({what}): {said}. Label: {s.entry.get('note', '')}."


def write_markdown(
    path: Path,
    scored: Sequence[Scored],
    faults: Sequence[Any],
    given: Given,
    varied: Sequence[Sequence[str]] = (),
    left: Sequence[Scored] = (),
) -> None:
    """Rewrite what stands between the two marks; the rest of the page is written by hand."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Detection quality\n\n{BEGIN}{END}"
    before, mark, rest = text.partition(BEGIN)
    if not mark:
        before, rest = text.rstrip() + "\n\n", END
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{markdown(scored, faults, given, varied, left)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
