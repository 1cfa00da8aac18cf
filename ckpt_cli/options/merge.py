"""The options of merge, beside those that it shares with convert and reshard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.options.transfer import CONTENT, MERGE, OUTPUT, Flag
from core.errors import UsageError
from core.files.remote_path import location_of
from core.values import dataclass


def parse_numbers(text: str) -> tuple[float, ...]:
    """Parse the value of ``--weights``: ``0.5,0.3,0.2``.

    Raises:
        UsageError: a part is not a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--weights: {text!r} is not a list of numbers",
            hint="separate them by commas: 0.5,0.3,0.2",
        ) from None


def parse_number(text: str) -> float:
    """Parse a number.

    Raises:
        UsageError: the text is not a number.
    """
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """The options of ``ckpt merge`` that name its sources and the computation."""

    paths: Annotated[
        list[Path],
        Argument(
            metavar="SRC…",
            help="Checkpoints of one model, of any format and layout.",
        ),
    ]
    output: Annotated[
        Path | None,
        Option(
            "-o", "--output", metavar="DST", rich_help_panel=OUTPUT, help="Destination. [required]"
        ),
    ] = None
    average: Annotated[
        bool,
        Flag("--average", rich_help_panel=MERGE, help="Mean of all sources."),
    ] = False
    weights: Annotated[
        str | None,
        Option(
            "--weights",
            metavar="W,W,…",
            rich_help_panel=MERGE,
            help="Weighted sum: a number per source, in total 1.",
        ),
    ] = None
    ema: Annotated[
        float | None,
        Option(
            "--ema",
            metavar="DECAY",
            parser=parse_number,
            rich_help_panel=MERGE,
            help="Exponential moving average, the oldest first.",
        ),
    ] = None
    slerp: Annotated[
        float | None,
        Option(
            "--slerp",
            metavar="T",
            parser=parse_number,
            rich_help_panel=MERGE,
            help="Spherical interpolation of two: 0 is the first.",
        ),
    ] = None
    delta: Annotated[
        bool,
        Flag(
            "--delta",
            rich_help_panel=MERGE,
            help="Task vector: a tuned model minus its base.",
        ),
    ] = False
    add_delta: Annotated[
        list[Path] | None,
        Option(
            "--add-delta",
            metavar="DELTA",
            parser=location_of,
            rich_help_panel=MERGE,
            help="Add a task vector to SRC; repeatable.",
        ),
    ] = None
    scale: Annotated[
        float | None,
        Option(
            "--scale",
            metavar="S",
            parser=parse_number,
            rich_help_panel=MERGE,
            help="Factor for --add-delta. [1]",
        ),
    ] = None
    lora: Annotated[
        Path | None,
        Option(
            "--lora",
            metavar="ADAPTER",
            parser=location_of,
            rich_help_panel=MERGE,
            help="Fold a LoRA adapter of peft or Megatron-Bridge into its base.",
        ),
    ] = None
    replace: Annotated[
        bool,
        Flag(
            "--replace",
            rich_help_panel=MERGE,
            help="The second source's tensors, all others of the first.",
        ),
    ] = False
    keep_first: Annotated[
        bool,
        Flag(
            "--keep-first",
            rich_help_panel=CONTENT,
            help="Take integers and objects that differ from the first source, not fail.",
        ),
    ] = False
