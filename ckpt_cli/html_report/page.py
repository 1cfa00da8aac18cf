"""Render a report as one HTML file that loads nothing and runs only its own script.

The Content-Security-Policy of the file forbids everything except the style sheet and the script
inside it, which it names by their hashes. Nothing in the file has a ``style`` or ``on…`` attribute.
Every text goes through jinja2's escaping, names from checkpoints through ``shown_name`` as well.
What the script shows on demand is JSON in a data block, in which no tag can end.
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.html_report.names import shown_name
from ckpt_cli.screen.blocks import bytes_text, make_cell, n_text
from ckpt_cli.screen.output_file import check_report_path, write_output
from ckpt_cli.screen.terminal import escaped
from core.errors import UsageError
from core.values import dataclass
from core.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

SUFFIXES = (".html", ".htm")
START = "<!doctype html>\n<!-- report of ckpt"
"""The first characters of every report, by which ``output_file`` recognises one."""


def check_html_path(path: Path) -> None:
    """Raise unless a report can be written to the path; called before the work begins.

    Raises:
        UsageError: the suffix is not that of HTML, or ``check_report_path`` refuses the path.
        StorageError: the file cannot be read.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"--report writes HTML, but the name {path.name!r} does not end in .html",
            hint=f"for example: --report {path.stem or 'report'}.html",
        )
    check_report_path(path)


def write_report(path: Path, html: str, *, is_quiet: bool = False) -> None:
    """Write a report completely or not at all, and print its name to stderr.

    Args:
        is_quiet: do not print it, or leave it to ``announce_report``.

    Raises:
        UsageError: the path cannot be replaced.
        CapacityError: the disk is full.
        StorageError: permission denied, or an I/O error.
    """
    write_output(path, [html.rstrip("\n")])
    if not is_quiet:
        announce_report(path)


def announce_report(path: Path) -> None:
    """Print the name of a report and its size to stderr."""
    size = bytes_text(path.stat().st_size)
    print(f"report: {escaped(str(path))} ({size})", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A part of a report.

    Args:
        id: its name in links.
        blocks: those of the terminal's pages without drawings, a ``Grid``, a ``SizeDrawings`` or a
            ``TensorList``; a section without any is left out.
    """

    id: str
    title: str
    blocks: Sequence[object]


@dataclass(frozen=True, slots=True)
class TensorList:
    """The place of the table of ``tensor_table``, which the script fills.

    Args:
        note: sentences above it.
    """

    note: str


def render(
    title: str,
    subject: str,
    headline: str,
    sections: Sequence[ReportSection],
    *,
    style: str = "",
    template: str = "base.html.j2",
    data: Mapping[str, object] | None = None,
    **context: object,
) -> str:
    """Return the complete file of a report.

    Args:
        headline: the result in a sentence.
        style: the class of the headline: ``good``, ``warning`` or ``error``.
        template: name of a file in ``templates``, for which ``context`` has further values.
        data: values for the script, which end up in the data block.
    """
    environment = _environment()
    sheet, script = _source("report.css"), _source("report.js")
    return environment.get_template(template).render(
        context,
        title=title,
        subject=subject,
        headline=headline,
        headline_style=style,
        sections=sections,
        start=_markup(START),
        version=__version__,
        policy=_policy(sheet, script),
        style=_markup(sheet),
        script=_markup(script),
        data=_markup(json_block(data or {})),
    )


def json_block(data: object) -> str:
    r"""Return JSON that can stand in a ``<script>`` element: no ``<``, ``>``, ``&`` or U+2028.

    They only occur inside JSON strings, where ``\u003c`` stands for the same character.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows this style sheet and this script only."""
    style_hash, script_hash = (
        b64encode(sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _source(name: str) -> str:
    """Return the text of a file in ``templates``."""
    return (Path(__file__).parent / "templates" / name).read_text("utf-8")


def _markup(text: str) -> str:
    """Mark a text of this package, or JSON of ``json_block``, as needing no escaping."""
    from markupsafe import Markup

    return Markup(text)


@cache
def _environment() -> Environment:
    """Return jinja2's environment, with escaping in every template."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "name": shown_name,
        "bytes": bytes_text,
        "n": n_text,
        "cell": make_cell,
        "style": lambda value: " ".join(make_cell(value).styles),
        "kind": lambda block: type(block).__name__,
    }
    return environment
