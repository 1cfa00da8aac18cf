"""The options of ``ckpt manifest``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.option_values import whole
from ckpt_cli.options import ENGINE, LAYOUT, OUTPUT, TALK, Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """``ckpt manifest``."""

    path: Annotated[
        Path, Argument(metavar="PATH", help="A checkpoint directory, one of its files, or a training root.")
    ] = Path()
    fingerprints: Annotated[
        bool,
        Flag("--fingerprints/--no-fingerprints", rich_help_panel=OUTPUT, help="Fingerprints of the tensors. [yes]"),
    ] = True
    output: Annotated[
        Path | None,
        Option("-o", "--output", metavar="FILE", rich_help_panel=OUTPUT, help="Write it there, not beside the data."),
    ] = None
    force: Annotated[bool, Flag("--force", "-f", rich_help_panel=OUTPUT, help="Replace one that is there.")] = False
    iteration: Annotated[
        int | None,
        Option(
            "--iteration",
            metavar="N",
            parser=whole(0),
            rich_help_panel=OUTPUT,
            help="Which iteration of a training root.",
        ),
    ] = None
    rules: Annotated[
        Path | None,
        Option("--rules", metavar="FILE.toml", rich_help_panel=LAYOUT, help="More layout rules, tried first."),
    ] = None
    memory: Annotated[
        str | None,
        Option("--memory", metavar="SIZE", rich_help_panel=ENGINE, help="Most memory for decoding. [512MiB]"),
    ] = None
    threads: Annotated[
        int | None,
        Option(
            "--threads",
            "-j",
            metavar="N",
            parser=whole(1, 64),
            rich_help_panel=ENGINE,
            help="Threads that read. [as many as cores]",
        ),
    ] = None
    json: Annotated[bool, Flag("--json", rich_help_panel=TALK, help="Print one JSON object.")] = False
    quiet: Annotated[bool, Flag("-q", "--quiet", rich_help_panel=TALK, help="Print only errors.")] = False
    debug: Annotated[bool, Flag("--debug", rich_help_panel=TALK, help="Print a traceback on errors.")] = False
