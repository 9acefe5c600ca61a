"""Reading the series of a rule test: the notation, records, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from healthcheck.rulelang.document import KeyPath
from healthcheck.rulelang.quantities import shorten
from healthcheck.ruletests.fields import TEST_KEYS, Fields, shown
from healthcheck.ruletests.model import Source
from healthcheck.ruletests.notation import NotationError, Piece, parse_series

SERIES_KEYS = ("file", "metric")


class SeriesFields(Fields):
    """The part of a document that says what is played."""

    def inputs(self, where: KeyPath, data: dict[str, Any]) -> dict[int, list[Source]]:
        if "ranks" not in data:
            if "series" not in data:
                if self.lacks(data, "series", TEST_KEYS):
                    self.bad(where, "a test needs `series`", 'write for instance series: {loss: "2.0~0.05 x300"}')
                return {}
            return {0: self.series((*where, "series"), data["series"])}
        shared = self.series((*where, "series"), data["series"]) if "series" in data else []
        given = data["ranks"]
        if not isinstance(given, dict) or not given:
            self.bad((*where, "ranks"), "`ranks` maps rank numbers to series", "write `ranks: {0: {...}, 1: {...}}`")
            return {}
        found = {}
        for rank, entry in given.items():
            at = (*where, "ranks", rank)
            if not rank.isdigit():
                self.bad(at, f'"{shorten(rank)}" is not a rank; ranks count from 0', key=True)
                continue
            own = self.series(at, entry)
            names = {source.series for source in own}
            found[int(rank)] = [*(s for s in shared if s.series not in names), *own]
        return dict(sorted(found.items()))

    def series(self, where: KeyPath, data: Any) -> list[Source]:
        """A map of series, or a whole record (`runs/7`, `{file: runs/7}`)."""
        if isinstance(data, str):
            return [Source("", where, record=self.recorded(where, data))]
        if not isinstance(data, dict) or not data:
            self.bad(where, 'series are a mapping such as {loss: "2.0 x300"}, or the path of a record', key=True)
            return []
        if "file" in data and set(data) <= set(SERIES_KEYS):
            return [self.from_record("", where, data)]
        found = []
        for name, value in data.items():
            at = (*where, name)
            if isinstance(value, dict):
                self.known_keys(at, value, SERIES_KEYS)
                found.append(self.from_record(name, at, value))
            else:
                found.append(Source(name, at, tuple(self.pieces(at, value))))
        return found

    def from_record(self, name: str, where: KeyPath, data: dict[str, Any]) -> Source:
        file = data.get("file")
        if not isinstance(file, str):
            self.bad(where, "a recorded series needs `file`", "write {file: run.jsonl, metric: loss}")
            return Source(name, where)
        metric = self.value(where, data, "metric", str, "the name of a series in the record", name)
        return Source(name or str(metric), where, record=self.recorded((*where, "file"), file), metric=str(metric))

    def recorded(self, where: KeyPath, name: str) -> Path:
        path = self.path.parent / name
        if not path.exists():
            what = (
                "is no record beside this file" if "," not in name and " " not in name else "is not a mapping of series"
            )
            self.bad(where, f'"{shorten(name)}" {what}', slug="no-such-file")
        return path

    def pieces(self, where: KeyPath, value: Any) -> list[Piece]:
        if isinstance(value, list):
            return [piece for i, item in enumerate(value) for piece in self.pieces((*where, i), item)]
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            self.bad(where, f'a series is text such as "2.0~0.05 x300, nan", found {shown(value)}', slug="series")
            return []
        text = value if isinstance(value, str) else repr(value)
        try:
            return parse_series(text)
        except NotationError as error:
            self.problems.append(
                self.document.problem(
                    where, "series", str(error), offset=error.start, width=error.width, suggestion=error.suggestion
                )
            )
            return []
