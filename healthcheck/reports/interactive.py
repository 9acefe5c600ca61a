"""Charts that zoom together, with one pointer for all: the extra ``page`` (Bokeh).

The drawings of :mod:`healthcheck.reports.charts` stay in the page: they are what is seen without a script, and where the library
does not run. Bokeh was chosen by weight: its script adds 1.3 MB to a page, that of Plotly 4.8 MB (``docs/explanation/pages.md``).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from typing import Any

from healthcheck.core.text import number, step
from healthcheck.reports.charts import SMOOTH_FROM, Picture, Scale, medians, scale_of, thinned

MOST = 14
"""Charts of a page that become interactive; each takes the browser some 50 ms, and the others have their values as well."""
POINTS = 1000
"""Points of a line: more than in a drawing, because one may look closer."""

LIGHT = {
    "c0": "#2563b8", "c1": "#c2570c", "c2": "#15803d", "c3": "#9333a8", "c4": "#0e7490", "c5": "#a16207",
    "other": "#8b95a1", "normal": "#5b6570", "ink": "#16191d", "edge": "#dde1e6", "grid": "#e6e9ed",
    "error": "#b42318", "warning": "#8f5a00", "info": "#3d5a80",
}  # fmt: skip
DARK = {
    "c0": "#79aef5", "c1": "#f59e5b", "c2": "#6fd08c", "c3": "#d69be6", "c4": "#67c7dd", "c5": "#d9b64e",
    "other": "#78828e", "normal": "#9aa5b1", "ink": "#e7eaee", "edge": "#313843", "grid": "#272d35",
    "error": "#ff8a7a", "warning": "#e6b450", "info": "#8fb3dc",
}  # fmt: skip
"""The colours of the page (:mod:`healthcheck.reports.pagestyle`) in both of its looks."""

EMBED = """
(() => {
  const night = matchMedia("(prefers-color-scheme: dark)");
  let text = DOCS;
  if (night.matches) for (const [day, dark] of Object.entries(DARKER)) text = text.replaceAll(day, dark);
  const ids = IDS, items = [{docid: Object.keys(JSON.parse(text))[0], roots: ids, root_ids: Object.keys(ids)}];
  const live = (on) => { for (const id of Object.values(ids)) document.getElementById(id).parentNode.classList.toggle("live", on); };
  live(true);
  Promise.resolve(Bokeh.embed.embed_items(JSON.parse(text), items)).then(
    () => document.documentElement.classList.add("charts-ready"), (error) => { live(false); console.error(error); });
  night.addEventListener("change", () => location.reload());
})();
"""


def installed() -> bool:
    """Whether the library is there; it is not imported for the question."""
    return importlib.util.find_spec("bokeh") is not None


def chosen(drawn: Sequence[tuple[str, Picture]]) -> list[tuple[str, Picture]]:
    """The charts that are worth it: the large ones first, in the order of the page."""
    return sorted(drawn, key=lambda pair: not pair[1].tall)[:MOST]


def scripts(drawn: Sequence[tuple[str, Picture]]) -> list[str]:
    """The library, and what puts its charts into the places ``KEY-live`` of the page."""
    from bokeh.document import Document
    from bokeh.embed.util import standalone_docs_json_and_render_items
    from bokeh.models import CrosshairTool, Range1d, Span
    from bokeh.resources import Resources

    shown = chosen(drawn)
    whole = [picture for _, picture in shown if not picture.part] or [shown[0][1]]
    first = min(picture.range[0] for picture in whole)
    last = max(picture.range[1] for picture in whole)
    steps = Range1d(first, max(last, first + 1), bounds=(first, max(last, first + 1)))
    pointer = CrosshairTool(
        overlay=Span(dimension="height", line_color=LIGHT["normal"], line_width=1), dimensions="height"
    )
    document = Document()
    figures = {key: _figure(picture, steps, pointer) for key, picture in shown}
    for figure in figures.values():
        document.add_root(figure)
    docs, _ = standalone_docs_json_and_render_items(list(figures.values()))
    text = json.dumps(json.dumps(docs, separators=(",", ":"))).replace("</", "<\\/")
    embed = (
        EMBED.replace("DARKER", json.dumps({LIGHT[name]: DARK[name] for name in LIGHT}))
        .replace("IDS", json.dumps({figure.id: f"{key}-live" for key, figure in figures.items()}))
        .replace("DOCS", text)
    )
    library = [
        script.replace("</script", "<\\/script") for script in Resources(mode="inline", components=["bokeh"]).js_raw
    ]
    return ["\n".join(library), embed]


def _figure(picture: Picture, steps: Any, pointer: Any) -> Any:
    from bokeh.models import BoxZoomTool, HoverTool, PanTool, Range1d, ResetTool, WheelZoomTool
    from bokeh.plotting import figure

    scale = scale_of(picture)
    low, high = (10**scale.low, 10**scale.high) if scale.log else (scale.low, scale.high)
    made = figure(
        height=260 if picture.tall else 170,
        sizing_mode="stretch_width",
        x_range=Range1d(*picture.range, bounds=picture.range) if picture.part else steps,
        y_range=Range1d(low, high),
        y_axis_type="log" if scale.log else "linear",
        tools=[],
        toolbar_location="right",
    )
    box = BoxZoomTool(dimensions="width")
    made.add_tools(box, PanTool(dimensions="width"), WheelZoomTool(dimensions="width"), ResetTool(), pointer)
    made.toolbar.active_drag = box
    made.toolbar.logo = None
    made.toolbar.autohide = True
    _style(made, picture.unit)
    _behind(made, picture, low, high)
    usual = {at: v for c in picture.curves if c.style == "normal" for at, v in zip(c.steps, c.values, strict=True)}
    sides = iter(("right", "left", *["vertical"] * len(picture.curves)))
    for curve in sorted(picture.curves, key=lambda curve: curve.style != "other"):
        color = LIGHT.get(curve.style, LIGHT["c0"])
        finite = [i for i, value in enumerate(curve.values) if math.isfinite(value)]
        xs, ys = [curve.steps[i] for i in finite], [curve.values[i] for i in finite]
        at, values = _with_gaps(curve.steps, curve.values, [finite[i] for i in thinned(xs, ys, POINTS)])
        source = {"x": at, "y": values, "said": [number(value, picture.unit) for value in values]}
        tips = [("step", "@x{0,0}"), (curve.label, "@said")]
        if usual and curve is picture.curves[0]:
            source["usual"] = [number(usual.get(step), picture.unit) for step in at]
            tips.append(("normal", "@usual"))
        line = made.line("x", "y", source=source, line_color=color, line_width=1.4)
        if curve.style == "normal":
            line.glyph.line_dash = "dashed"
            continue  # its values stand beside those that are compared with it
        if curve.smooth and len(finite) >= SMOOTH_FROM:
            line.glyph.line_alpha, line.glyph.line_width = 0.35, 1
            broken = [at for at, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
            made.line(*_between_gaps(*medians(xs, ys, 120), broken), line_color=color, line_width=1.7)
        side = next(sides)
        made.add_tools(HoverTool(renderers=[line], mode="vline", tooltips=tips, attachment=side, visible=False))
    _broken(made, picture, scale, low, high)
    return made


def _with_gaps(steps: Sequence[int], values: Sequence[float], kept: Sequence[int]) -> tuple[list[int], list[float]]:
    """The points to draw, with a break wherever a value between two of them is not finite."""
    broken = [i for i, value in enumerate(values) if not math.isfinite(value)]
    xs: list[int] = []
    ys: list[float] = []
    place = 0
    for before, i in zip([None, *kept], kept, strict=False):
        while place < len(broken) and broken[place] < i:
            place += 1
        if before is not None and place and broken[place - 1] > before:
            xs.append(steps[broken[place - 1]])
            ys.append(math.nan)
        xs.append(steps[i])
        ys.append(values[i])
    return xs, ys


def _between_gaps(xs: Sequence[float], ys: Sequence[float], broken: Sequence[int]) -> tuple[list[float], list[float]]:
    """The same for points that are none of the values: a break wherever a broken step is between two of them."""
    at, values, place = list[float](), list[float](), 0
    for before, x, y in zip([math.inf, *xs], xs, ys, strict=False):
        while place < len(broken) and broken[place] < x:
            place += 1
        if place and broken[place - 1] > before:
            at.append(broken[place - 1])
            values.append(math.nan)
        at.append(x)
        values.append(y)
    return at, values


def _style(made: Any, unit: str) -> None:
    from bokeh.models import NumeralTickFormatter

    made.background_fill_color = made.border_fill_color = None
    made.outline_line_color = None
    made.min_border_left, made.min_border_top = 62, 4
    made.xgrid.grid_line_color = made.ygrid.grid_line_color = LIGHT["grid"]
    made.axis.axis_line_color = made.axis.major_tick_line_color = LIGHT["edge"]
    made.axis.minor_tick_line_color = None
    made.axis.major_label_text_color = LIGHT["normal"]
    made.axis.major_label_text_font_size = "11px"
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    if unit == "bytes":
        made.yaxis.formatter = NumeralTickFormatter(format="0.0 ib")
    elif unit == "fraction":
        made.yaxis.formatter = NumeralTickFormatter(format="0[.]0%")
    elif unit:
        made.yaxis.axis_label = {"1/s": "per second"}.get(unit, unit)
        made.yaxis.axis_label_text_color = LIGHT["normal"]
        made.yaxis.axis_label_text_font_size = "11px"
        made.yaxis.axis_label_text_font_style = "normal"


def _behind(made: Any, picture: Picture, low: float, high: float) -> None:
    """Limits and alerts."""
    from bokeh.models import BoxAnnotation, Label, Span

    for mark in picture.marks:
        color = LIGHT.get(mark.severity, LIGHT["info"])
        made.add_layout(
            BoxAnnotation(left=mark.first, right=mark.last, fill_color=color, fill_alpha=0.08, line_color=None)
        )
        made.add_layout(Span(location=mark.first, dimension="height", line_color=color, line_width=1.3))
        if len(picture.marks) == 1:
            made.add_layout(
                Label(x=mark.first, y=high, text=f" fired at step {step(mark.first)}", text_baseline="top",
                      text_color=LIGHT["ink"], text_font_size="11px")
            )  # fmt: skip
    for limit in picture.limits:
        if limit.value is not None:
            beyond = {"bottom": limit.value} if limit.side > 0 else {"top": limit.value}
            made.add_layout(BoxAnnotation(fill_color=LIGHT["error"], fill_alpha=0.06, line_color=None, **beyond))
            made.add_layout(
                Span(location=limit.value, dimension="width", line_color=LIGHT["error"], line_dash="dotted")
            )
            if low <= limit.value <= high:
                text = f"{limit.label} {number(limit.value, picture.unit)}"
                made.add_layout(
                    Label(x=picture.range[1], y=limit.value, text=text, text_align="right", text_baseline="bottom",
                          text_color=LIGHT["error"], text_font_size="11px")
                )  # fmt: skip
        else:
            kept = thinned(limit.steps, limit.values, POINTS)
            made.line(
                [limit.steps[i] for i in kept],
                [limit.values[i] for i in kept],
                line_color=LIGHT["error"],
                line_dash="dotted",
                line_width=1.3,
            )


def _broken(made: Any, picture: Picture, scale: Scale, low: float, high: float) -> None:
    """A mark below each value that is not finite; what would be drawn on one another is one mark."""
    from bokeh.models import HoverTool, Label

    places: dict[int, tuple[int, float]] = {}
    for curve in picture.curves:
        for at, value in zip(curve.steps, curve.values, strict=True):
            if not math.isfinite(value):
                places.setdefault(int(scale.x(at)), (at, value))
    if not places:
        return
    top = 10 ** (scale.low + 0.08 * (scale.high - scale.low)) if scale.log else low + 0.08 * (high - low)
    found = [places[place] for place in sorted(places)]
    marks = made.segment(
        "x",
        low,
        "x",
        top,
        source={"x": [at for at, _ in found], "said": [number(value) for _, value in found]},
        line_color=LIGHT["error"],
        line_width=2,
    )
    kinds = ", ".join(sorted({number(value) for _, value in found}))
    look = {
        "text_color": LIGHT["error"],
        "text_font_size": "11px",
        "text_font_style": "bold",
        "text_baseline": "bottom",
    }
    made.add_layout(Label(x=found[0][0], y=top, text=f" {kinds}", **look))
    tips = [("step", "@x{0,0}"), ("not finite", "@said")]
    made.add_tools(HoverTool(renderers=[marks], mode="vline", tooltips=tips, visible=False))
