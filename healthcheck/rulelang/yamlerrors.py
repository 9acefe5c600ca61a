"""PyYAML's complaints in our words, with the usual way out."""

from __future__ import annotations

from typing import Any

from healthcheck.errors import Problem
from healthcheck.rulelang.document import Document, Mark
from healthcheck.rulelang.yamltree import problem_at


def syntax_problem(document: Document, error: Any) -> Problem:
    """The problem that a ``yaml.YAMLError`` stands for."""
    place = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if place is None:  # ReaderError: a character that YAML forbids
        before = "\n".join(document.lines)[: getattr(error, "position", 0)].split("\n")
        mark = Mark(len(before), len(before[-1]) + 1, 1)
        return problem_at(document, mark, "syntax", "a control character is not allowed here", "delete it")
    problem = str(getattr(error, "problem", "") or "").strip()
    context = str(getattr(error, "context", "") or "").strip()
    opened = getattr(error, "context_mark", None)
    if opened is not None and ("quoted scalar" in context or ("flow" in context and opened.line < place.line)):
        place = opened  # where the quote or brace opens; the parser noticed lines below
    mark = Mark(place.line + 1, place.column + 1, 1)
    line = document.lines[place.line] if place.line < len(document.lines) else ""
    text, hint = _explain(problem, context, line)
    return problem_at(document, mark, "syntax", text, hint)


def _explain(problem: str, context: str, line: str) -> tuple[str, str]:
    if "undefined alias" in problem or "scanning an alias" in context:
        return "a value that starts with `*` is read as a YAML alias", "quote a value that starts with `*`"
    if "scanning an anchor" in context:
        return "a value that starts with `&` is read as a YAML anchor", "quote a value that starts with `&`"
    if "cannot start any token" in problem and "'\\t'" in problem:
        return "a tab cannot indent YAML", "use spaces"
    if "cannot start any token" in problem:
        return f"a value cannot start with {problem.split('character')[-1].split('that')[0].strip()}", "quote the value"
    if "mapping values are not allowed" in problem:
        return "a second `:` in one line", "quote a value that holds `: `, and check the indentation"
    if ("flow mapping" in context or "flow sequence" in context) and "[" in line and "{" in line:
        return "the braces or brackets do not match", 'quote "grad_norm[...]" in braces'
    if "flow mapping" in context or "flow sequence" in context:
        return "the braces or brackets do not match", "each `{` needs a `}`, each `[` a `]`, with commas between"
    if "block mapping" in context or "block collection" in context:
        return "the indentation does not fit the lines above", "keys of one block start in the same column"
    if "quoted scalar" in context:
        return "a quote is never closed", ""
    if "could not find expected ':'" in problem:
        return "a line without `:`", "write `key: value`"
    return f"not valid YAML: {problem or context or 'syntax error'}", ""
