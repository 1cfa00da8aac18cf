"""A problem: one way in which the tensors of a checkpoint and a ``config.json`` do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "missing", "unexpected", "shape", "dtype", "layers", "experts", "sisters", "ties", "quantization", "config"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What makes transformers load another model than the one that was saved, or random weights.

    Args:
        kind: what is wrong.
        message: a sentence without the key.
        key: the tensor concerned, as it is stored or should be; None where it is none in particular.
        expected, found: the two values that disagree.
        is_lack: something is absent that the configuration asks for.
    """

    kind: Kind
    message: str
    key: str | None = None
    expected: str | None = None
    found: str | None = None
    is_lack: bool = False


def more_text(problems: tuple[Problem, ...]) -> str:
    """Return how many problems there are besides the first, as the end of a sentence."""
    others = len(problems) - 1
    return f" (and {others:,} more {'difference' if others == 1 else 'differences'})" if others else ""
