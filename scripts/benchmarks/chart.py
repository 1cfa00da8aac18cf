"""Draw published results (``results.json``) as bars: docs/pictures/speed.svg.

Of the rows those are drawn that compare ``ckpt`` with a copy of the same bytes (``× copy``), or
another tool with ``ckpt`` (``× ours``), with fsync. ``scripts/make_reference`` writes the picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from scripts.benchmarks.results import NO_FSYNC, read_rows

_ROW, _BAR, _WIDTH, _NAMES, _END, _MARGIN = 26, 16, 940, 400, 90, 20
_STYLE = """
text { font-family: system-ui, sans-serif; font-size: 14px; fill: #1f2328; }
.card { fill: #ffffff; stroke: #d8dfe7; } .row { fill: #f2f5f8; }
.quiet { fill: #57606a; font-size: 12px; }
.value { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
.bar { fill: #2f6fab; } .other { fill: #b0602c; } .one { stroke: #57606a; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .card { fill: #0d1117; stroke: #303b47; } .row { fill: #171e26; }
  .value { stroke: #0d1117; }
  .quiet { fill: #9198a1; } .one { stroke: #9198a1; }
  .bar { fill: #6cb0f0; } .other { fill: #e0a070; }
}
"""
_MEMORY = ": memory"
"""End of the names of rows that compare memory."""
GROUPS = {
    ("× copy", False): ("bar", "ckpt: time relative to cp of the same bytes", "cp"),
    ("× ours", False): ("other", "Other tools: time relative to ckpt for the same work", "ckpt"),
    ("× ours", True): ("other", "Other tools: memory relative to ckpt for the same work", "ckpt"),
}
"""Unit and whether it is of memory → class of the bars, the heading above, and what 1 is."""

_DRAWN = re.compile("^reshard|^convert (dcp-4|dcp-1|megatron-tp8) |torch, (dcp-1|dcp-4)|save")
"""Names of the rows that are drawn: the picture would be too long with all of them."""


def read_drawn_rows() -> list[dict[str, Any]]:
    """Return the published rows that are drawn."""
    return [
        row
        for row in read_rows("conversions")
        if group_of(row) in GROUPS and NO_FSYNC not in row["name"] and _DRAWN.search(row["name"])
    ]


def describe_picture() -> str:
    """Return the alternative text: the range of each group."""
    texts = []
    for group, (_, heading, _unit) in GROUPS.items():
        results = [row["result"] for row in read_drawn_rows() if group_of(row) == group]
        texts += [f"{heading}: {min(results):.2g} to {max(results):.3g}"] if results else []
    return "; ".join(texts)


def group_of(case: Any) -> tuple[str, bool]:
    """Return the group of a row."""
    return case["unit"], case["name"].endswith(_MEMORY)


def chart_of(cases: Sequence[Any]) -> str:
    """Return the chart as SVG; every group has a heading, and a scale of its own."""
    svg = ElementTree.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-labelledby": "title"}
    )
    ElementTree.SubElement(svg, "title", {"id": "title"}).text = "; ".join(
        f"{case['name']}: {case['result']:.3g} {case['unit']}" for case in cases
    )
    ElementTree.SubElement(svg, "style").text = _STYLE
    card = ElementTree.SubElement(svg, "rect", {"class": "card", "x": "0.5", "y": "0.5", "rx": "8"})
    y = _MARGIN // 2
    for group, (kind, heading, unit) in GROUPS.items():
        rows = [case for case in cases if group_of(case) == group]
        if not rows:
            continue
        y += _ROW
        _text(svg, _MARGIN, y, heading, anchor="start", weight="bold")
        scale = (_WIDTH - _NAMES - _END) / max(1.0, *(case["result"] for case in rows))
        # A line at 1, the thing compared with.
        one = _NAMES + scale
        y += _ROW
        _text(svg, one, y, f"1 × = {unit}", anchor="middle", kind="quiet")
        top, labels = y, []
        for number, case in enumerate(rows):
            y += _ROW
            if number % 2 == 0:
                _rect(svg, "row", _MARGIN // 2, y - 18, _WIDTH - _MARGIN, _ROW)
            _text(svg, _NAMES - 10, y, case["name"].removesuffix(_MEMORY), anchor="end")
            width = case["result"] * scale
            _rect(svg, kind, _NAMES, y - 13, width, _BAR)
            labels.append((_NAMES + width + 8, y, f"{case['result']:.3g} ×"))
        x, y1, y2 = f"{one:.1f}", f"{top + 5}", f"{y + 8}"
        ElementTree.SubElement(svg, "line", {"class": "one", "x1": x, "x2": x, "y1": y1, "y2": y2})
        # Above the line, with an outline that interrupts it.
        for label in labels:
            _text(svg, *label, anchor="start", kind="value")
        y += _ROW // 2
    card.attrib |= {"width": f"{_WIDTH - 1}", "height": f"{y + 7}"}
    svg.set("viewBox", f"0 0 {_WIDTH} {y + 8}")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _rect(
    svg: ElementTree.Element, kind: str, x: float, y: float, width: float, height: float
) -> None:
    box = {"x": f"{x}", "y": f"{y}", "width": f"{width:.1f}", "height": f"{height}", "rx": "3"}
    ElementTree.SubElement(svg, "rect", {"class": kind, **box})


def _text(
    svg: ElementTree.Element,
    x: float,
    y: float,
    text: str,
    *,
    anchor: str,
    weight: str = "normal",
    kind: str = "",
) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y}", "text-anchor": anchor, "font-weight": weight}
    place |= {"class": kind} if kind else {}
    ElementTree.SubElement(svg, "text", place).text = text
