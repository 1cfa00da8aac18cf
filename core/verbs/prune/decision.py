"""Choose which iterations of a training root stay. Pure: nothing is read or removed here."""

from __future__ import annotations

from collections.abc import Iterable

from core.errors import UsageError
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """Which iterations the user wants to keep: those that at least one rule names.

    Args:
        keep_last: number of the newest valid iterations that stay; None for no such rule.
        keep_every: iterations divisible by this number stay; None for no such rule.

    Raises:
        UsageError: there is no rule, or a number is not positive.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        rules = {"--keep-last": self.keep_last, "--keep-every": self.keep_every}
        if all(number is None for number in rules.values()):
            raise UsageError(
                "no option says which iterations to keep",
                hint="pass --keep-last N, --keep-every N, or both",
            )
        for option, number in rules.items():
            if number is not None and number < 1:
                raise UsageError(f"{option}: {number} is not a number ≥ 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationState:
    """The state of an iteration before the decision.

    Args:
        number: the iteration.
        left_alone: why it must not be touched, such as a save that may still be running; None if
            nothing forbids its removal.
        needed_by: files that name it as the iteration to load, such as a tracker.
        is_valid: it has been validated, and has no errors.
    """

    number: int
    left_alone: str | None = None
    needed_by: tuple[str, ...] = ()
    is_valid: bool = False


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """The decision on an iteration.

    Args:
        number: the iteration.
        reasons: why it stays; () if it is to be removed.
    """

    number: int
    reasons: tuple[str, ...]

    @property
    def is_removed(self) -> bool:
        """The iteration is to be removed."""
        return not self.reasons


def decide(states: Iterable[IterationState], rules: KeepRules) -> tuple[PruneDecision, ...]:
    """Decide which iterations stay, the newest first.

    The newest valid iteration always stays, and without one, nothing is removed. What must be left
    alone does not count as one of the last.

    Args:
        states: the iterations; enough of the newest have been validated for ``keep_last``.
        rules: what the user wants to keep.
    """
    states = sorted(states, key=lambda state: -state.number)
    valid = [state.number for state in states if state.is_valid and state.left_alone is None]
    last = valid[: rules.keep_last or 0]
    decisions = []
    for state in states:
        reasons = [] if state.left_alone is None else [state.left_alone]
        reasons += [f"named by {name}" for name in state.needed_by]
        if state.number in valid[:1]:
            reasons.append("the newest valid iteration")
        if state.number in last and len(last) > 1:
            reasons.append(f"one of the last {rules.keep_last:,}")
        if rules.keep_every is not None and state.number % rules.keep_every == 0:
            reasons.append(f"a multiple of {rules.keep_every:,}")
        if not valid and not reasons:
            reasons.append("no iteration is known to be valid")
        decisions.append(PruneDecision(state.number, tuple(reasons)))
    return tuple(decisions)
