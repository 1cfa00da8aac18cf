"""Parsers for the values of options.

``one_of`` and ``whole_number`` return parsers for typer, the functions ``check_…`` are parsers: a
wrong value is refused before the command runs. ``core.verbs.convert.job_options`` has the parsers
of what a job needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from core.errors import UsageError, did_you_mean


def parse_size(text: str) -> int:
    """Parse a size such as ``512MiB`` into bytes; raise UsageError if it is none."""
    from core.verbs.convert.job_options import parse_size

    return parse_size(text)


def parse_memory(text: str) -> int:
    """Parse a memory limit such as ``8GiB`` into bytes; raise UsageError if it is none."""
    from core.verbs.convert.job_options import parse_memory

    return parse_memory(text)


def check_format(text: str) -> str:
    """Return the text if it is the name of a format; whether it can be written is decided later.

    Raises:
        UsageError: no format has that name.
    """
    # Imported here, as the help pages do without the formats.
    from core.formats.registry import format_called

    format_called(text)
    return text


def check_dtype(text: str) -> str:
    """Return the text if it is the name of an element type; raise UsageError if not."""
    from core.arrays.dtypes import dtype_called

    dtype_called(text)
    return text


def check_dtype_option(text: str) -> str:
    """Return a value of ``--dtype`` if its element type exists; raise UsageError if not."""
    from core.verbs.convert.job_options import parse_casts

    for _, dtype in parse_casts([text]):
        check_dtype(dtype)
    return text


def check_quantization(text: str) -> str:
    """Return a value of ``--quantize`` if its kind exists; raise UsageError if not."""
    from core.engine.changes.quantize import KINDS
    from core.verbs.convert.job_options import parse_quantizations

    parse_kind = one_of(*KINDS)
    for _, kind in parse_quantizations([text]):
        parse_kind(kind)
    return text


def check_names(text: str) -> str:
    """Return the value of ``--names`` if it is valid.

    Raises:
        UsageError: the value is not ``hf``, ``hf:MODEL_TYPE`` or ``megatron``.
    """
    if not re.fullmatch(r"hf(:[A-Za-z0-9_.-]+)?|megatron", text):
        raise UsageError(
            f"{text!r} is not one of: hf, hf:MODEL_TYPE, megatron",
            hint=did_you_mean(text, ("hf", "megatron")) or "for example: hf:qwen3_moe",
        )
    return text


def check_file(path: Path | None, *, option: str) -> None:
    """Raise unless the file that an option names exists or the option is not given.

    Raises:
        UsageError: the path is not a file; the message names ``option``.
    """
    if path is not None:
        from core.verbs.convert.job_options import parse_file

        parse_file(path, option=option)


class OneOf:
    """A typer parser that accepts only some words; shell completion offers them."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def __call__(self, text: str) -> str:
        """Return the text if it is one of the words.

        Raises:
            UsageError: it is another one; the hint names the nearest word.
        """
        if text not in self.words:
            raise UsageError(
                f"{text!r} is not one of: {', '.join(self.words)}",
                hint=did_you_mean(text, self.words),
            )
        return text


def one_of(*words: str) -> OneOf:
    """Return a typer parser that accepts only the given words."""
    return OneOf(words)


def whole_number(low: int, high: int = 2**31 - 1) -> Callable[[str | int], int]:
    """Return a typer parser for whole numbers from ``low`` to ``high``.

    typer also passes defaults through the parser, as numbers.
    """

    def parse(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1  # refused below, with the same message
        if not low <= number <= high:
            limits = f"from {low} to {high}" if high < 2**31 - 1 else f"≥ {low}"
            raise UsageError(f"{text!r} is not a whole number {limits}")
        return number

    return parse
