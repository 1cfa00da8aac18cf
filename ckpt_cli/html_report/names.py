"""Names from checkpoints, made fit for a page: visible, bounded in length, folded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ckpt_cli.screen.terminal import escaped
from core.engine.catalog.key_patterns import fold_keys, runs_of, split_numbers
from core.values import dataclass

MAX_NAME = 200
"""Most characters of a name that are shown; a longer one is cut, and its length stated."""
_TAIL = 40
"""Characters at the end of a cut name."""


def shown_name(text: object, limit: int = MAX_NAME) -> str:
    r"""Return a text with control characters spelled as ``\x1b``, cut if it is long.

    The text of a cut name ends with its length: ``aaa…aaa (10,000 characters)``.
    """
    name = str(text)
    if len(name) > limit:
        tail = min(_TAIL, limit // 4)
        kept = f"{escaped(name[: limit - tail])}…{escaped(name[-tail:])}"
        return f"{kept} ({len(name):,} characters)"
    return escaped(name)


@dataclass(frozen=True, slots=True)
class FoldedName:
    """Keys that differ only in numbers.

    Args:
        parts: texts and, at odd positions, the numbers between them: a list of ``[first, last]``
            runs; the keys are the product of the numbers, the last one fastest.
        keys: the keys, in that order.
    """

    parts: tuple[object, ...]
    keys: tuple[str, ...]


def fold_names(kinds: Mapping[str, Hashable]) -> list[FoldedName]:
    """Fold keys that differ only in the numbers of layers and experts.

    Args:
        kinds: key → what folded keys have in common, such as dtype and shape.
    """
    return [_folded_name(keys) for _, keys in fold_keys(kinds)]


def _folded_name(keys: list[str]) -> FoldedName:
    """Return the texts and numbers of some keys that ``fold_keys`` put together."""
    if len(keys) == 1:
        return FoldedName((shown_name(keys[0]),), tuple(keys))
    # Keys that fold have the same texts between their numbers, and are the product of the numbers.
    rows = sorted(((_numbers_in(key), key) for key in keys), key=lambda row: row[0])
    texts = split_numbers(keys[0])[::2]
    parts: list[object] = []
    text = texts[0]
    for column, after in zip(
        zip(*(numbers for numbers, _ in rows), strict=True), texts[1:], strict=True
    ):
        if len(set(column)) == 1:
            text += f"{column[0]}{after}"
        else:
            parts += [shown_name(text), runs_of(sorted(set(column)))]
            text = after
    return FoldedName((*parts, shown_name(text)), tuple(key for _, key in rows))


def _numbers_in(key: str) -> list[int]:
    """Return the numbers of a key that are complete components."""
    return [int(number) for number in split_numbers(key)[1::2]]
