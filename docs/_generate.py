"""Write what is taken from the code: the pages on hooks, errors, metrics and so on, the example plugin, and seals of packs.

    python docs/_generate.py            write them
    python docs/_generate.py --check    exit 1 and name those that are stale

A page here has no text of its own (but those on rules, where only the tables are written): what it says stands in
a docstring or a declaration, and tests/meta fails while the two differ.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
if str(DOCS.parent) not in sys.path:  # a bare checkout, nothing installed
    sys.path.insert(0, str(DOCS.parent))

MARK = "<!-- Written by docs/_generate.py from the code; edit the docstrings, then run `make docs`. -->\n"
DOCSTRING = re.compile(r'"""(.*?)(?:\n\n|""")', re.DOTALL)
"""First paragraph of a docstring, at the very beginning of a file."""


# --------------------------------------------------------------------------- docstrings to Markdown


def markdown(docstring: str | None) -> str:
    """A docstring of ours as Markdown: roles and double backticks become code, ``::`` a fenced block."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m[1].removeprefix('healthcheck.')}`", text)
    text = text.replace("``", "`")
    text = re.sub(r"^:param (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return "\n".join(_fenced(text.split("\n")))


def _fenced(lines: list[str]) -> Iterator[str]:
    inside, pending = False, 0
    for i, line in enumerate(lines):
        opens = i >= 2 and not inside and line.startswith("    ") and lines[i - 2].rstrip().endswith("::")
        if opens:
            inside = True
            is_code = line.lstrip().startswith(("import ", "from ", "def ", "class "))
            yield "```python no-run" if is_code else "```text"
        if inside and not line.strip():
            pending += 1  # blank lines inside a block, unless the block ends here
            continue
        if inside and not line.startswith("    "):
            inside = False
            yield "```"
        yield from [""] * pending
        pending = 0
        yield line[4:] if inside else (line.rstrip()[:-1] if line.rstrip().endswith("::") else line)
    if inside:
        yield "```"


# --------------------------------------------------------------------------- pages


def hooks_page() -> str:
    """docs/plugins/hooks.md: every hook with its exact arguments."""
    from healthcheck.extend import hookspecs

    source = inspect.getsource(hookspecs)
    parts = re.split(r"^# -{20,} (\w+)$", source, flags=re.MULTILINE)
    blocks = [MARK, "# Hooks\n", markdown(hookspecs.__doc__) + "\n"]
    for title, code in zip(parts[1::2], parts[2::2], strict=True):
        blocks.append(f"## {title.capitalize()}\n")
        for name in re.findall(r"^def (healthcheck_\w+)", code, flags=re.MULTILINE):
            function = getattr(hookspecs, name)
            arguments = ", ".join(inspect.signature(function).parameters)
            blocks.append(f"### {name}({arguments})\n")
            blocks.append(markdown(function.__doc__) + "\n")
    return "\n".join(blocks)


def errors_page() -> str:
    """docs/reference/errors.md: every exception class, by its slug."""
    from healthcheck.core import errors

    blocks = [MARK, "# Errors\n"]
    blocks.append("What healthcheck raises on purpose, by the slug that messages carry, and what to do about it.\n")
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.HealthCheckError):
            blocks.append(f"## {value.slug}\n")
            blocks.append(f"`healthcheck.core.errors.{value.__name__}`; exit code {value.exit_code}.\n")
            blocks.append(markdown(value.__doc__) + "\n")
    blocks.append("## StopTraining\n")
    blocks.append("`healthcheck.StopTraining`; exit code as the rule says, 1 unless it says otherwise.\n")
    blocks.append(markdown(errors.StopTraining.__doc__) + "\n")
    return "\n".join(blocks)


def metrics_page() -> str:
    """docs/reference/metrics.md: what the built-in probes provide."""
    from healthcheck import probes
    from healthcheck.extend.host import PluginHost

    host = PluginHost()
    host.load_builtins([probes])
    rows: list[Any] = sorted(host.registry.metrics.values(), key=lambda metric: metric.key)
    blocks = [MARK, "# Metrics\n"]
    blocks.append("What rules can name without any plugin. `name[*]` is a family: one series per label.\n")
    blocks.append("| Metric | Unit | Cost | Needs | What it is |\n|---|---|---|---|---|")
    for metric in rows:
        name = f"{metric.name}[*]" if metric.labels else metric.name
        needs = ", ".join(metric.needs) or "-"
        blocks.append(f"| `{name}` | {metric.unit or '-'} | {metric.cost.value} | {needs} | {metric.help} |")
    return "\n".join(blocks) + "\n"


def mistakes_page() -> str:
    """docs/reference/rule-file-errors.md: what `check` says, from the golden files of the tests."""
    blocks = [
        MARK.replace("the code; edit the docstrings", "tests/rulefile/bad; edit the examples there"),
        "# Mistakes in rule files\n",
    ]
    blocks.append(
        "Every kind of mistake that `healthcheck check` finds, with a file that holds it and the real answer.\n"
    )
    for golden in sorted((DOCS.parent / "tests" / "rulefile" / "bad").glob("*.txt")):
        source = golden.with_suffix(".yaml")
        try:
            text, answer = (
                source.read_text(encoding="utf-8").rstrip("\n"),
                golden.read_text(encoding="utf-8").rstrip("\n"),
            )
        except (OSError, UnicodeDecodeError):
            continue  # a file that is no text cannot be shown
        if len(text) > 1500 or "```" in text + answer or "\x00" in text:
            continue
        blocks += [f"## {golden.stem}\n", "```text", text, "```\n", "```text", answer, "```\n"]
    return "\n".join(blocks)


ADAPTERS = ("huggingface", "lightning", "accelerate", "megatron_bridge", "automodel", "torchtitan", "dream")
"""In the order of the page. What an adapter can do is known without its framework."""


def capabilities_page() -> str:
    """docs/reference/capabilities.md: what each trainer shows and lets us do."""
    import importlib

    from healthcheck.core.events import EventKind
    from healthcheck.instrument.controls import capabilities_of
    from healthcheck.instrument.loop import LOOP_GAPS

    found = [capabilities_of("script"), capabilities_of("loop", LOOP_GAPS)]
    found += [importlib.import_module(f"healthcheck.trainers.{name}").CAPABILITIES for name in ADAPTERS]
    blocks = [MARK, "# Capabilities\n"]
    blocks.append(
        "What each trainer shows and what actions may do there. `script` is `healthcheck run` on any script, `loop` is "
        "`healthcheck.watch`. A rule whose data a trainer cannot show is `not judged`, with the reason below; the "
        "report of each run holds its trainer's table.\n"
    )
    blocks.append("| Event | " + " | ".join(c.trainer for c in found) + " |\n|---" + "|---" * len(found) + "|")
    blocks += [
        f"| `{kind.value}` | " + " | ".join("yes" if kind in c.events else "-" for c in found) + " |"
        for kind in EventKind
    ]
    blocks.append("\n| Control | " + " | ".join(c.trainer for c in found) + " |\n|---" + "|---" * len(found) + "|")
    for control in ("stop", "skip_update", "checkpoint", "scale_lr", "log"):
        marks = " | ".join("yes" if control in c.controls else "-" for c in found)
        blocks.append(f"| `{control}` | {marks} |")
    blocks.append("")
    for c in found:
        blocks.append(f"## {c.trainer}\n")
        reasons: dict[str, list[str]] = {}
        for name, reason in c.gaps.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            blocks.append(f"- {', '.join(f'`{name}`' for name in names)}: {reason}")
        blocks.append("" if c.gaps else "No gaps.\n")
    blocks += _trainers({c.trainer: c.gaps for c in found})
    blocks += _libraries()
    return "\n".join(blocks).rstrip() + "\n"


COLUMNS = ("nan", "spike", "leak", "stop", "resume", "evaluation", "epochs")


def _trainers(gaps: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What the suite has found of each trainer, as `make zoo` has left it; epochs are as declared above."""
    import json

    ran = json.loads((DOCS / "_trainers.json").read_text())
    blocks = [
        "## Trainers, as they were tried\n",
        "One training in each (`tests/trainers/conformance`; `make zoo` writes this table): a NaN in the loss and in a gradient, a spike of the loss, a forward pass "
        "that keeps memory, a stop by a rule, a resume from a checkpoint, and a held-out loss that rises. Megatron Bridge, AutoModel, torchtitan and Dream "
        "Trainer are driven as their loops drive us, without the packages.\n",
        "| Trainer | " + " | ".join(COLUMNS) + " |\n|---" + "|---" * len(COLUMNS) + "|",
    ]
    for name, declared in gaps.items():
        facts = {"resume": "differs: by `session.state_dict()` and `load_state_dict()`"} if name == "loop" else {}
        facts |= ran.get(name, {})
        if "skip_update" in declared and facts.get("stop") == "works":
            facts["stop"] = "works, after the update"
        facts["epochs"] = f"cannot: {declared['epoch_start']}" if "epoch_start" in declared else "works"
        blocks.append(f"| {name} | " + " | ".join(facts.get(column, "not run") for column in COLUMNS) + " |")
    return [*blocks, ""]


def _libraries() -> list[str]:
    """What was found with the real packages, as `make zoo` has left it."""
    import json

    columns = ("steps", *COLUMNS)
    found = json.loads((DOCS / "_libraries.json").read_text())
    blocks = [
        "## Libraries without an adapter\n",
        "Under `healthcheck run`, with the real packages on a CPU (`make zoo`, which writes this table). A NaN is kept out of the "
        "weights and the run stopped. A resume trains two epochs, saves as the library does, and trains the third in another process.\n",
        "| Library | Version | " + " | ".join(columns) + " |\n|---|---" + "|---" * len(columns) + "|",
    ]
    for name, facts in found.items():
        blocks.append(f"| {name} | {facts['version']} | " + " | ".join(facts.get(c, "not run") for c in columns) + " |")
    return blocks


def devices_page() -> str:
    """Metric by device, from the declarations of the built-in probes."""
    from healthcheck.probes import PROBES
    from healthcheck.probes.catalog import DEVICES, availability

    lines = [
        MARK,
        "# Devices",
        "",
        "`late`: every step, read one or two steps later, without a wait. `yes`: at once. `every 10`: read in one step of",
        "ten, because each read waits for the device there; also before a checkpoint, at the end, and before each update",
        "with `settings: {gate: sync}`. `approximate`: of the process instead of the device. `no data`: rules on it are",
        "reported as not judged. How values travel: [the device path](../explanation/device-path.md).",
        "",
        "Tried: CUDA (H100) and CPU. ROCm takes the same code; MPS, XPU and other backends have not been run.",
        "",
        "| metric | " + " | ".join(DEVICES) + " | needs |",
        "|---|" + "---|" * (len(DEVICES) + 1),
    ]
    for metric in sorted((m for probe in PROBES for m in probe.provides), key=lambda m: m.key):
        cells = [availability(metric, device) for device in DEVICES]
        lines.append(f"| `{metric.key}` | " + " | ".join(cells) + f" | {', '.join(metric.needs)} |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """docs/reference/commands.md: every command with its options, from the parsers themselves."""
    from healthcheck.cli.usage import GROUPS, TABLE, command_parser

    lines = [
        MARK,
        "# Commands",
        "",
        "`healthcheck` alone lists them; `healthcheck COMMAND --help` says what stands here. What was asked for goes to stdout, everything",
        "else to stderr. `--format json` is for scripts. Exit codes: [explanation/exit-codes.md](../explanation/exit-codes.md).",
    ]
    for group in GROUPS:
        lines += ["", f"## {group}"]
        for entry in (e for e in TABLE if e.group == group):
            parser = command_parser(entry.name)
            lines += ["", f"### healthcheck {entry.name}", "", _sentence(parser.description or ""), ""]
            if parser.epilog:
                several = "\n" in parser.epilog  # laid out as it stands
                lines += ["```text", parser.epilog, "```", ""] if several else [parser.epilog, ""]
            lines += ["| Argument | Meaning |", "|---|---|"]
            lines += [_option(a) for a in parser._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
    return "\n".join(lines) + "\n"


def actions_page() -> str:
    """docs/reference/actions.md: what `then:` knows without any plugin."""
    from healthcheck.actions import BUILT_IN

    blocks = [MARK, "# Actions\n"]
    blocks.append(
        "What a rule may do about its alert: `then: [warn, {checkpoint: {path: last.pt}}]`. Those that observe run first and also under "
        "`--observe`, then those that mitigate, then `stop`. Plugins bring more ([Writing an action](../plugins/writing-an-action.md)).\n"
    )
    for action in (make() for make in BUILT_IN):
        blocks += [f"## {action.name}\n", f"Stage: {action.stage}.\n", markdown(type(action).__doc__) + "\n"]
        options = action.options_schema.get("properties", {})
        if options:
            blocks.append("| Option | Meaning |\n|---|---|")
            blocks += [f"| `{name}` | {option.get('description', '')} |" for name, option in options.items()]
            blocks.append("")
    return "\n".join(blocks).rstrip() + "\n"


TABLE_OF_RULES = re.compile(r"^<!-- rules/(\w+)\.yaml, by docs/_generate\.py -->\n(?:\|.*\n)*", re.MULTILINE)
BEFORE_CAUSES = re.compile(r"\A(# [^\n]+\n\n\*Finds [^\n]+\*\n).*?(?=^## )", re.DOTALL | re.MULTILINE)
"""Title and first sentence of a rule's page; what follows up to the first heading is written here."""
FINDS = re.compile(r"^\*Finds (.+?)\.(?: Needs: .+)?\*$", re.MULTILINE)
SHIPPED = ("core", "wiring", "curves", "performance", "gan", "rl", "finetune", "moe", "ranks", "preview")
"""The packs in which rules are written; the others take them in."""


def rules_page() -> str:
    """docs/rules/README.md: its own text, and each pack's rules in the order of the pack.

    What a rule finds stands at the beginning of its page, what it does by default in the packs.
    """
    written = {pack: _pack(pack) for pack in SHIPPED}

    def table(mark: re.Match[str]) -> str:
        lines = [mark[0].splitlines()[0], "| Rule | Finds | Causes | By default |", "|---|---|---|---|"]
        for name, body in written[mark[1]].items():
            page = DOCS / "rules" / f"{name}.md"
            found = FINDS.search(page.read_text(encoding="utf-8")) if page.is_file() else None
            finds = found[1] if found else f"its page does not say: docs/rules/{name}.md"
            bodies = _bodies(body)
            does = list(dict.fromkeys(does for cause in bodies.values() for does in _by_default(cause).split(", ")))
            lines.append(f"| [{name}]({name}.md) | {finds} | {len(bodies)} | {', '.join(does)} |")
        return "\n".join(lines) + "\n"

    return TABLE_OF_RULES.sub(table, (DOCS / "rules" / "README.md").read_text(encoding="utf-8"))


def rule_pages() -> dict[str, str]:
    """docs/rules/RULE.md by path from docs/: their own text, and what the packs and the benchmarks say of each cause."""
    import yaml

    benchmarks = DOCS.parent / "benchmarks"
    path = benchmarks / "figures.yaml"
    figures = yaml.safe_load(path.read_text(encoding="utf-8"))["causes"] if path.is_file() else {}
    twins = yaml.safe_load((benchmarks / "twins.yaml").read_text(encoding="utf-8"))
    pages = {}
    for pack in SHIPPED:
        for name, body in _pack(pack).items():
            page = DOCS / "rules" / f"{name}.md"
            text = page.read_text(encoding="utf-8") if page.is_file() else f"# {name}\n"
            block = "\n".join(_causes(pack, name, body, figures, twins)) + "\n"
            pages[f"rules/{name}.md"] = BEFORE_CAUSES.sub(lambda head, block=block: head[1] + block, text)  # type: ignore[misc]
    return pages


def _pack(name: str) -> dict[str, dict[str, Any]]:
    """The rules of a shipped pack as they are written, its defaults filled in."""
    from healthcheck.rulelang.loader import load_file

    data = load_file(DOCS.parent / "rules" / f"{name}.yaml").data
    defaults = data.get("defaults", {})
    return {rule: {**defaults, **body} for rule, body in data["rules"].items()}


def _bodies(rule: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each cause with the rule's keys filled in; a rule without causes is its own only one, without a name."""
    keys = {key: value for key, value in rule.items() if key != "causes"}
    return {name: {**keys, **body} for name, body in rule["causes"].items()} if "causes" in rule else {"": rule}


def _causes(
    pack: str, rule: str, body: dict[str, Any], figures: dict[str, Any], twins: dict[str, list[str]]
) -> Iterator[str]:
    yield ""
    yield f"Pack: `{pack}`{_applies(body.get('applies_if', {}))}."
    yield ""
    yield "| Cause | Kind | By default | Recall | False alarms | Runs |"
    yield "|---|---|---|---|---|---|"
    for name, cause in _bodies(body).items():
        full = f"{rule}.{name}" if name else rule
        shown = f"[{name}](#{name})" if name else f"`{rule}`"
        yield f"| {shown} | {cause['kind']} | {_by_default(cause)} | {' | '.join(_measured(figures.get(full)))} |"
    yield ""
    for name, cause in _bodies(body).items():
        full = f"{rule}.{name}" if name else rule
        yield f"- {f'`{name}`: ' if name else ''}basis: {'; '.join(cause['basis'])}."
        if full in twins:
            fault, twin = (f"[{Path(script).name}](../../tests/faults/{script})" for script in twins[full])
            yield f"  Fault: {fault}; healthy twin: {twin}."
        elif cause["kind"] == "fact":
            yield f"  Fault and healthy twin: its rule tests in [{pack}.hctest.yaml](../../rules/{pack}.hctest.yaml)."
    yield ""
    yield "Recall: faults and incidents of its kind in which this cause fired in time; others may have named the same one. False alarms: healthy"
    yield "runs in which it fired. Runs: those in which it was judged. From `benchmarks/detection.py`: recorded runs of other people, and toys."
    yield ""


def _applies(needed: dict[str, Any]) -> str:
    if not needed:
        return ""
    if "metrics" in needed:
        return (
            f", which comes on by itself where a run has {' or '.join(f'`{metric}`' for metric in needed['metrics'])}"
        )
    return f", which comes on by itself with {' and '.join(f'{value} {key}' for key, value in needed.items())} or more"


def _measured(found: dict[str, Any] | None) -> tuple[str, str, str]:
    """Recall, false alarms, runs: the cells of one cause."""
    if not found or not found["runs"]:
        return "not measured", "not measured", "0"
    recall = f"{found['found']} of {found['faults']}" if found["faults"] else "not measured"
    return recall, f"{found['false']} of {found['healthy']}", str(found["runs"])


def _by_default(cause: dict[str, Any]) -> str:
    """What comes of an alert: in a run, and for CI."""
    if cause.get("enabled") is False:
        return "off"
    actions = cause.get("then", [])
    says = {"error": "fails CI", "warning": "warns", "info": "says so"}[cause["severity"]]
    before, behind = "cleans up, " * ("cleanup" in actions), ", dumps stacks" * ("dump_stacks" in actions)
    return f"{before}{'stops' if 'stop' in actions else says}{behind}"


def source_map_page() -> str:
    """docs/explanation/source-map.md: every file of the package with the first sentence of its docstring."""
    package = DOCS.parent / "healthcheck"
    lines = [
        MARK,
        "# Source map",
        "",
        "Every file and what it is for, in its own words. How an event and a key of a rule file travel through them:",
        "[architecture.md](architecture.md).",
    ]
    folders = sorted({path.parent for path in package.rglob("*.py")}, key=lambda f: f.relative_to(package).parts)
    for folder in folders:
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        lines += [
            "",
            f"## {folder.relative_to(package.parent).as_posix()}/",
            "",
            _first_line(folder / "__init__.py")
            if (folder / "__init__.py").exists()
            else "A folder for PYTHONPATH, no package.",
            "",
        ]
        lines += [f"- `{path.name}`: {_first_line(path)}" for path in modules]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _first_line(path: Path) -> str:
    """First paragraph of the docstring of a module; the rest of the file need not be parsed for it."""
    found = DOCSTRING.match(path.read_text(encoding="utf-8"))
    return markdown(" ".join(found[1].split())) if found else ""


def _sentence(text: str) -> str:
    end = "" if text.endswith(("?", ".")) else "."
    return f"{text[:1].upper()}{text[1:]}{end}"


def _option(action: argparse.Action) -> str:
    """One row: how it is written, and what it does."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        written = value
    else:
        takes = f" {value}" if action.nargs != 0 else ""
        written = ", ".join(action.option_strings) + takes
    cells = (text.replace("|", r"\|") for text in (f"`{written}`", action.help or ""))
    return f"| {' | '.join(cells)} |"


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "plugins/hooks.md": hooks_page,
    "reference/errors.md": errors_page,
    "reference/metrics.md": metrics_page,
    "reference/actions.md": actions_page,
    "reference/capabilities.md": capabilities_page,
    "reference/devices.md": devices_page,
    "reference/rule-file-errors.md": mistakes_page,
    "explanation/source-map.md": source_map_page,
    "rules/README.md": rules_page,
}


def shapes() -> str:
    """The packs that need no validator: each was found right by the schema without plugins."""
    from healthcheck.assembly import BUILTINS
    from healthcheck.extend.host import PluginHost
    from healthcheck.rulelang.loader import load_file
    from healthcheck.rulelang.parsed import seal
    from healthcheck.rulelang.schema import RuleFormat
    from healthcheck.rulelang.sources import shipped_packs
    from healthcheck.rulelang.validation import Validator

    host = PluginHost()
    host.load_builtins(importlib.import_module(name) for name in BUILTINS)
    validator = Validator(RuleFormat(host.registry))
    lines = []
    for path in shipped_packs():
        document = load_file(path)
        problems = [*document.problems, *validator.check(document, anew=True)]
        if problems:
            raise SystemExit(f"{path}: {problems[0]}")
        lines.append(f"{path.name} {seal(document.text, validator.format.mark)}")
    return "\n".join(lines) + "\n"


EXAMPLE = "healthcheck-example"


def files() -> dict[str, str]:
    """All that this writes, by path from the root: the pages, the example, which is what `plugins new` gives, and the seals."""
    from healthcheck.cli.newplugin import plugin_files
    from healthcheck.rulelang.parsed import SHIPPED

    written = {f"docs/{name}": page() for name, page in PAGES.items()}
    written |= {f"docs/{name}": text for name, text in rule_pages().items()}
    written[f"healthcheck/rulelang/{SHIPPED}"] = shapes()
    return written | {f"plugins/{EXAMPLE}/{path}": text for path, text in plugin_files(EXAMPLE).items()}


def differing() -> dict[str, str]:
    """Those of :func:`files` that are not on disk as they should be."""
    written = {name: (text, DOCS.parent / name) for name, text in files().items()}
    return {
        name: text
        for name, (text, path) in written.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    found = differing()
    for name, text in found.items():
        if check:
            print(f"stale: {name}; run `make docs`", file=sys.stderr)
            continue
        path = DOCS.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(name)
    return 1 if check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
