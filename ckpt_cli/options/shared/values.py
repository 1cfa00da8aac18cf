"""Parsers for the values of options.

``one_of`` and ``whole_number`` return parsers for typer, ``parse_size`` and the functions
``check_…`` are parsers: a wrong value is refused before the command runs. The other functions are
called when a command builds its job from the options.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from core.errors import UsageError, did_you_mean

AUTO = "auto"
"""Value of ``--unstack-layers`` that selects the stacked tensors by their usual names."""

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size such as ``512MiB``, ``1GB``, ``1.5g`` or ``65536`` into bytes.

    ``k m g t`` are powers of ten, ``Ki Mi Gi Ti`` powers of two.

    Raises:
        UsageError: the text is not a size, or the size is zero.
    """
    match = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if n_bytes <= 0:
        raise UsageError(f"{text!r} is not a size", hint="write 512MiB, 1GB or a number of bytes")
    return n_bytes


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
    for _, dtype in parse_casts([text]):
        check_dtype(dtype)
    return text


def check_quantization(text: str) -> str:
    """Return a value of ``--quantize`` if its kind exists; raise UsageError if not."""
    from core.engine.changes.quantize import KINDS

    parse_kind = one_of(*KINDS)
    for _, kind in parse_quantizations([text]):
        parse_kind(kind)
    return text


def parse_casts(texts: list[str] | None) -> tuple[tuple[str | None, str], ...]:
    """Parse each ``--dtype`` (``bf16`` or ``GLOB=bf16``) into ``(glob or None, dtype)``."""
    return _parse_glob_pairs(
        texts, option="--dtype", value="DTYPE", hint="for example '*.bias=fp32'"
    )


def parse_quantizations(texts: list[str] | None) -> tuple[tuple[str | None, str], ...]:
    """Parse each ``--quantize`` (``block`` or ``GLOB=block``) into ``(glob or None, kind)``."""
    return _parse_glob_pairs(
        texts, option="--quantize", value="KIND", hint="KIND is block, tensor or none"
    )


def _parse_glob_pairs(
    texts: list[str] | None, *, option: str, value: str, hint: str
) -> tuple[tuple[str | None, str], ...]:
    """Parse each ``WORD`` or ``GLOB=WORD`` into ``(glob or None, word)``.

    Raises:
        UsageError: a text has neither form; the message names ``option``, ``value`` and ``hint``.
    """
    pairs = []
    for text in texts or ():
        # Split at the last "=", as a glob may contain one.
        glob, equals, word = text.rpartition("=")
        if not word or (equals and not glob):
            raise UsageError(f"{option}: {text!r} is neither {value} nor GLOB={value}", hint=hint)
        pairs.append((glob if equals else None, word))
    return tuple(pairs)


def parse_renames(texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    """Parse each ``--rename OLD=NEW`` into ``(regex, replacement)``.

    A ``=`` inside OLD is written ``\\=``.

    Raises:
        UsageError: a text is not ``OLD=NEW``.
    """
    pairs = []
    for text in texts or ():
        # OLD ends at the first "=" without a backslash; re reads the "\=" that remain as "=".
        match = re.fullmatch(r"((?:[^=\\]|\\.)+)=(.*)", text, re.DOTALL)
        if match is None:
            raise UsageError(
                f"--rename: {text!r} is not OLD=NEW",
                hint="OLD is a regular expression: '^module\\.='",
            )
        pairs.append((match[1], match[2]))
    return tuple(pairs)


def parse_key_pairs(texts: list[str] | None, *, option: str) -> tuple[tuple[str, str], ...]:
    """Parse each ``A=B`` into ``(first key, second key)``.

    Raises:
        UsageError: a text is not two keys; the message names ``option``.
    """
    pairs = []
    for text in texts or ():
        first, equals, second = text.partition("=")
        if not (first and equals and second) or "=" in second:
            raise UsageError(
                f"{option}: {text!r} is not KEY=KEY",
                hint=f"for example {option} lm_head.weight=model.embed_tokens.weight",
            )
        pairs.append((first, second))
    return tuple(pairs)


def parse_unstack_globs(texts: list[str] | None) -> tuple[str, ...] | None:
    """Return the globs of ``--unstack-layers``: () for ``auto``, None without the option.

    Raises:
        UsageError: ``auto`` is given together with a glob.
    """
    if not texts:
        return None
    if AUTO in texts and len(texts) > 1:
        raise UsageError(
            f"--unstack-layers: {AUTO} and globs cannot be combined", hint="give only the globs"
        )
    return () if texts == [AUTO] else tuple(texts)


def check_names(text: str) -> str:
    """Return the value of ``--names`` if it is valid.

    Raises:
        UsageError: the value is not ``hf``, ``hf:MODEL_TYPE`` or ``megatron``.
    """
    if not re.fullmatch(r"hf(:[A-Za-z0-9_.-]+)?|megatron", text):
        raise UsageError(
            f"{text!r} is not one of: hf, hf:MODEL_TYPE, megatron",
            hint=did_you_mean(text, ("hf", "megatron")) or "for example hf:qwen3_moe",
        )
    return text


def check_file(path: Path | None, *, option: str) -> None:
    """Raise unless the file that an option names exists or the option is not given.

    Raises:
        UsageError: the path is not a file; the message names ``option``.
    """
    if path is not None and not path.is_file():
        raise UsageError(
            f"{option}: file not found", file=str(path), hint="check the spelling of the path"
        )


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
            limits = f"from {low} to {high}" if high < 2**31 - 1 else f"of at least {low}"
            raise UsageError(f"{text!r} is not a whole number {limits}")
        return number

    return parse
