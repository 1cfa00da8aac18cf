"""The request of ``ckpt merge``: a computation and its checkpoints, as a plain value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from core.errors import NoEffectError, UsageError
from core.values import dataclass

AVERAGE, WEIGHTS, EMA, SLERP, DELTA, ADD_DELTA, LORA, REPLACE = METHODS = (
    "average",
    "weights",
    "ema",
    "slerp",
    "delta",
    "add-delta",
    "lora",
    "replace",
)
"""Ways to compute the result; the names are those of the options."""
_TOLERANCE = 1e-6
"""How far from 1 the sum of weights may be, which people write with few digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A computation on the tensors of several checkpoints, of which ``Job.src`` is the first.

    Args:
        method: one of ``METHODS``.
        others: paths of the other checkpoints, in order; of ``lora``, the adapter's directory.
        weights: of ``weights``, the factor of each checkpoint, the first included.
        amount: of ``ema`` the decay, of ``slerp`` the position between the two, of ``add-delta``
            the factor of the delta; None for the others.
        keeps_first: integers, booleans and objects that differ are those of the first checkpoint,
            instead of an error.

    Raises:
        UsageError: the number of checkpoints, weights or an amount does not suit the method.
    """

    method: str
    others: tuple[Path, ...]
    weights: tuple[float, ...] = ()
    amount: float | None = None
    keeps_first: bool = False

    def __post_init__(self) -> None:
        option, n_sources = f"--{self.method}", 1 + len(self.others)
        if self.method not in METHODS:
            raise UsageError(
                f"unknown merge method {self.method!r} (expected one of: {', '.join(METHODS)})"
            )
        if self.method in (SLERP, DELTA, REPLACE) and n_sources != 2:
            raise UsageError(
                f"{option} requires two checkpoints, but {n_sources} were specified",
                hint={
                    DELTA: "pass the tuned checkpoint, then its base",
                    REPLACE: "pass the complete checkpoint, then the one with the new tensors",
                }.get(
                    self.method,
                    "to interpolate more than two, merge the result with the next checkpoint",
                ),
            )
        if n_sources < 2:
            raise UsageError(
                f"{option} requires at least two checkpoints, but only one was specified",
                hint="list all of them: ckpt merge A B -o DST " + option,
            )
        if self.method == LORA and n_sources != 2:
            raise UsageError(
                "--lora accepts only one adapter", hint="fold in several adapters one at a time"
            )
        if self.method == WEIGHTS:
            self._check_weights(n_sources)
        is_fraction = self.amount is not None and 0 <= self.amount <= 1
        if self.method in (EMA, SLERP) and not is_fraction:
            raise UsageError(f"{option}: {self.amount} is not a number between 0 and 1")
        if self.amount is not None and not math.isfinite(self.amount):
            raise UsageError(f"--scale: {self.amount} is not a finite number")

    def _check_weights(self, n_sources: int) -> None:
        """Raise unless there is a finite weight for each checkpoint, and they sum to 1."""
        if len(self.weights) != n_sources:
            raise UsageError(
                f"--weights has {len(self.weights)} numbers for {n_sources} checkpoints",
                hint="pass one number for each checkpoint, in the same order",
            )
        total = math.fsum(self.weights)
        if not math.isfinite(total):
            raise UsageError("--weights: a weight is not a finite number")
        if abs(total - 1) > _TOLERANCE:
            scaled = ",".join(f"{weight / total:.6g}" for weight in self.weights) if total else None
            raise UsageError(
                f"--weights sum to {total:.6g} instead of 1, so the merged weights would be "
                "scaled by that factor",
                hint=None
                if scaled is None
                else f"to normalize the weights, pass --weights {scaled}",
            )

    def describe(self, paths: Sequence[str]) -> str:
        """Describe the computation for people.

        Args:
            paths: the paths of all sources, the first one included.
        """
        first, *others = paths
        listed = ", ".join(paths)
        if self.method == AVERAGE:
            return f"average of {listed}"
        if self.method == EMA:
            return f"exponential moving average of {listed}, decay {self.amount:g}"
        if self.method == SLERP:
            return f"spherical interpolation from {first} to {others[0]} at {self.amount:g}"
        if self.method == DELTA:
            return f"{first} minus {others[0]}"
        factors = (
            self.weights if self.method == WEIGHTS else (1.0, *(self.amount or 0.0,) * len(others))
        )
        terms = zip(factors, paths, strict=True)
        return " + ".join(path if n == 1 else f"{n:g} × {path}" for n, path in terms)


def build_merge(
    sources: Sequence[Path],
    *,
    average: bool = False,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    slerp: float | None = None,
    delta: bool = False,
    add_delta: Sequence[Path] = (),
    scale: float | None = None,
    lora: Path | None = None,
    replace: bool = False,
    keep_first: bool = False,
) -> Merge:
    """Build the request from the options of ``ckpt merge``, of which exactly one is a method.

    Args:
        sources: the checkpoints, at least one.
        average, weights, ema, slerp, delta, add_delta, lora, replace: the methods.
        scale: factor of ``add_delta``; None for 1.
        keep_first: as ``Merge.keeps_first``.

    Raises:
        UsageError: the options describe no method or several, or do not suit the sources.
    """
    # Exactly one of the methods must be given.
    given = {
        AVERAGE: average,
        WEIGHTS: weights is not None,
        EMA: ema is not None,
        SLERP: slerp is not None,
        DELTA: delta,
        ADD_DELTA: bool(add_delta),
        LORA: lora is not None,
        REPLACE: replace,
    }
    methods = [method for method, is_given in given.items() if is_given]
    if not methods:
        hint = "choose one of: " + ", ".join(f"--{method}" for method in given)
        if len(sources) == 1:
            hint += "; to join the shards of one checkpoint: ckpt reshard SRC DST --tp-new 1"
        else:
            hint += "; to fold in a LoRA adapter: ckpt merge BASE -o DST --lora ADAPTER"
        raise UsageError("no merge method was chosen", hint=hint)
    if len(methods) > 1:
        names = " and ".join(f"--{method}" for method in methods)
        raise UsageError(f"{names} cannot be combined", hint="use only one")
    (method,) = methods
    if scale is not None and method != ADD_DELTA:
        raise NoEffectError(("scale",), "it applies only to --add-delta")

    # Deltas and adapters are sources as well, which are added to the only other one.
    others = tuple(sources[1:])
    added = tuple(add_delta) if lora is None else (lora,)
    if added and others:
        raise UsageError(
            f"--{method} accepts only one SRC, but {len(sources)} were specified",
            hint="pass each additional delta with --add-delta"
            if method == ADD_DELTA
            else "merge the checkpoints first",
        )
    amounts = {EMA: ema, SLERP: slerp, ADD_DELTA: 1.0 if scale is None else scale}
    return Merge(
        method=method,
        others=others or added,
        weights=tuple(weights or ()),
        amount=amounts.get(method),
        keeps_first=keep_first,
    )
