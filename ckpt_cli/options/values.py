"""The values of options: what their texts mean.

``one_of`` and ``whole`` are parsers for typer; the others are called when the options are put together to a job.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from typer import BadParameter

from core.errors import UsageError

AUTO = "auto"
"""What ``--unstack-layers`` takes for the usual names."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def size_in_bytes(text: str) -> int:
    """Bytes of ``512MiB``, ``1GB``, ``1.5g``, ``65536``; ``k m g t`` are powers of ten, ``Ki Mi Gi Ti`` of two.

    Raises:
        UsageError: not a size, or zero.
    """
    found = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else 0
    if n_bytes <= 0:
        raise UsageError(f"{text!r} is not a size", hint="write 512MiB, 1GB or a number of bytes")
    return n_bytes


def casts_of(texts: list[str] | None) -> tuple[tuple[str | None, str], ...]:
    """``(glob or None, dtype)`` of each ``--dtype``: ``bf16`` or ``GLOB=bf16``."""
    return _of_globs(texts, option="--dtype", what="DTYPE", hint="for example '*.bias=fp32'")


def quantizations_of(texts: list[str] | None) -> tuple[tuple[str | None, str], ...]:
    """``(glob or None, kind)`` of each ``--quantize``: ``block`` or ``GLOB=block``."""
    return _of_globs(texts, option="--quantize", what="KIND", hint="KIND is block, tensor or none")


def _of_globs(texts: list[str] | None, *, option: str, what: str, hint: str) -> tuple[tuple[str | None, str], ...]:
    """(glob or None, word) of each ``WORD`` or ``GLOB=WORD``.

    Raises:
        UsageError: one is neither.
    """
    pairs = []
    for text in texts or ():
        glob, equals, word = text.rpartition("=")
        if not word or (equals and not glob):
            raise UsageError(f"{option}: {text!r} is neither {what} nor GLOB={what}", hint=hint)
        pairs.append((glob if equals else None, word))
    return tuple(pairs)


def renames_of(texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    """``(regex, replacement)`` of each ``--rename OLD=NEW``; a ``=`` inside OLD is written ``\\=``."""
    pairs = []
    for text in texts or ():
        found = re.fullmatch(r"((?:[^=\\]|\\.)+)=(.*)", text, re.DOTALL)
        if found is None:
            raise UsageError(f"--rename: {text!r} is not OLD=NEW", hint="OLD is a regular expression: '^module\\.='")
        pairs.append((found[1], found[2]))
    return tuple(pairs)


def pairs_of(texts: list[str] | None, *, option: str) -> tuple[tuple[str, str], ...]:
    """(first key, second key) of each ``A=B``."""
    pairs = []
    for text in texts or ():
        first, equals, second = text.partition("=")
        if not (first and equals and second) or "=" in second:
            raise UsageError(
                f"{option}: {text!r} is not KEY=KEY", hint=f"such as {option} lm_head.weight=model.embed_tokens.weight"
            )
        pairs.append((first, second))
    return tuple(pairs)


def stacks_of(texts: list[str] | None) -> tuple[str, ...] | None:
    """The globs of ``--unstack-layers``: () for ``auto``, None without the option."""
    if not texts:
        return None
    if AUTO in texts and len(texts) > 1:
        raise UsageError(f"--unstack-layers: {AUTO} and globs contradict each other", hint="give the globs alone")
    return () if texts == [AUTO] else tuple(texts)


def names_of(text: str | None) -> str | None:
    """``hf``, ``hf:MODEL_TYPE`` or ``megatron``."""
    if text is not None and not re.fullmatch(r"hf(:[A-Za-z0-9_.-]+)?|megatron", text):
        raise UsageError(f"--names: {text!r} is none of: hf, hf:MODEL_TYPE, megatron", hint="for example hf:qwen3_moe")
    return text


def check_rules(path: Path | None) -> None:
    """Refuses a file of ``--rules`` that is not there.

    Raises:
        UsageError: see there.
    """
    if path is not None and not path.is_file():
        raise UsageError("--rules: there is no such file", file=str(path), hint="check the spelling of the path")


def one_of(*words: str) -> Callable[[str], str]:
    """A parser for one of some words."""

    def parse(text: str) -> str:
        if text not in words:
            raise BadParameter(f"{text!r} is none of: {', '.join(words)}")
        return text

    return parse


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str | int], int]:
    """A parser for whole numbers from ``low`` to ``high``; defaults come as numbers."""

    def parse(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            limits = f"from {low} to {high}" if high < 2**31 - 1 else f"of at least {low}"
            raise BadParameter(f"{text!r} is not a whole number {limits}")
        return number

    return parse
