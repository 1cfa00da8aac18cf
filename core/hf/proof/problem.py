"""Problems: contradictions between the tensors of a checkpoint and a ``config.json``."""

from __future__ import annotations

from typing import Literal

from core.values import dataclass

Kind = Literal[
    "missing",
    "unexpected",
    "shape",
    "dtype",
    "layers",
    "experts",
    "sisters",
    "ties",
    "quantization",
    "config",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A contradiction that makes transformers load another model than the saved one.

    Args:
        kind: kind of contradiction.
        message: description in one clause, without the tensor's name.
        key: name of the tensor, stored or missing; None if it concerns no particular one.
        expected, found: the two values that disagree.
        is_lack: the configuration requires something that is missing.
    """

    kind: Kind
    message: str
    key: str | None = None
    expected: str | None = None
    found: str | None = None
    is_lack: bool = False


def more_text(problems: tuple[Problem, ...]) -> str:
    """Format the number of further problems as the end of a sentence."""
    n_more = len(problems) - 1
    return (
        f" (and {n_more:,} more {'difference' if n_more == 1 else 'differences'})" if n_more else ""
    )
