from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UsageError
from core.verbs.prune.decision import IterationState, KeepRules, PruneDecision, decide


def states(*numbers: int, **changes: object) -> list[IterationState]:
    """Valid iterations, with the same changes to each."""
    return [IterationState(**{"number": n, "is_valid": True, **changes}) for n in numbers]


def removed(decisions: tuple[PruneDecision, ...]) -> list[int]:
    return [decision.number for decision in decisions if decision.is_removed]


def test_the_rules_are_joined() -> None:
    decisions = decide(states(0, 10, 20, 30, 40, 50), KeepRules(keep_last=2, keep_every=20))
    assert removed(decisions) == [30, 10]
    reasons = {decision.number: decision.reasons for decision in decisions}
    assert reasons[50] == ("the newest valid iteration", "one of the last 2")
    assert reasons[40] == ("one of the last 2", "a multiple of 20")
    assert reasons[0] == ("a multiple of 20",)


def test_keep_every_alone_keeps_the_newest_valid_one_too() -> None:
    assert removed(decide(states(10, 20, 33), KeepRules(keep_every=20))) == [10]


def test_what_is_left_alone_is_not_one_of_the_last() -> None:
    decisions = decide(
        [*states(10, 20), *states(30, left_alone="a link"), *states(40, is_valid=False)],
        KeepRules(keep_last=1),
    )
    assert removed(decisions) == [40, 10]


def test_what_a_tracker_names_stays_whatever_its_state() -> None:
    decisions = decide(
        [*states(20), *states(10, is_valid=False, needed_by=("latest",))], KeepRules(keep_last=1)
    )
    assert removed(decisions) == []
    assert decisions[1].reasons == ("named by latest",)


def test_without_a_valid_iteration_nothing_is_removed() -> None:
    assert removed(decide(states(10, 20, is_valid=False), KeepRules(keep_last=1))) == []


@pytest.mark.parametrize("rules", [{}, {"keep_last": 0}, {"keep_every": -5}])
def test_rules_that_keep_nothing_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        KeepRules(**rules)


STATE = st.builds(
    IterationState,
    number=st.integers(0, 60),
    left_alone=st.none() | st.just("link"),
    needed_by=st.sampled_from([(), ("latest",)]),
    is_valid=st.booleans(),
)


@given(
    st.lists(STATE, unique_by=lambda state: state.number),
    st.none() | st.integers(1, 5),
    st.integers(1, 30),
)
def test_nothing_that_must_stay_is_removed(
    given_states: list[IterationState], keep_last: int | None, keep_every: int
) -> None:
    decisions = decide(given_states, KeepRules(keep_last=keep_last, keep_every=keep_every))
    assert [decision.number for decision in decisions] == sorted(
        (state.number for state in given_states), reverse=True
    )
    gone = set(removed(decisions))
    valid = sorted(s.number for s in given_states if s.is_valid and s.left_alone is None)
    must_stay = {s.number for s in given_states if s.left_alone or s.needed_by}
    must_stay |= {s.number for s in given_states if s.number % keep_every == 0}
    must_stay |= set(valid[-(keep_last or 1) :])
    assert gone.isdisjoint(must_stay)
    # Everything else goes, if there is a valid one.
    numbers = {state.number for state in given_states}
    assert gone == (numbers - must_stay if valid else set())
