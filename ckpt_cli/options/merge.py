"""The options of merge, beside those that it shares with convert and reshard."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.options.declaration import CONTENT, MERGE, OUTPUT, argument
from core.errors import UsageError
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
            hint="separate the numbers with commas: 0.5,0.3,0.2",
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

    paths: list[Path] = argument("SRC…", "Checkpoints of the same model, in any format and layout.")
    output: Path | None = OUTPUT.option("-o, --output DST", "Destination. [required]")
    average: bool = MERGE.flag("--average", "Mean of all sources.")
    weights: str | None = MERGE.option(
        "--weights W,W,…", "Weighted sum: one number per source, adding up to 1."
    )
    ema: float | None = MERGE.option(
        "--ema DECAY",
        "Exponential moving average; list the oldest source first.",
        parser=parse_number,
    )
    slerp: float | None = MERGE.option(
        "--slerp T", "Spherical interpolation of two sources; 0 is the first.", parser=parse_number
    )
    delta: bool = MERGE.flag("--delta", "Task vector: a tuned model minus its base.")
    add_delta: list[Path] | None = MERGE.option(
        "--add-delta DELTA", "Add a task vector to SRC; repeatable."
    )
    scale: float | None = MERGE.option(
        "--scale S", "Factor for --add-delta. [1]", parser=parse_number
    )
    lora: Path | None = MERGE.option(
        "--lora ADAPTER", "Fold a PEFT or Megatron-Bridge LoRA adapter into its base."
    )
    replace: bool = MERGE.flag(
        "--replace", "Use the second source's tensors, and take the rest from the first."
    )
    keep_first: bool = CONTENT.flag(
        "--keep-first",
        "If integers or objects differ, keep the first source's values instead of failing.",
    )
