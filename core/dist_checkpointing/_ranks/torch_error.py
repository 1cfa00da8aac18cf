"""Errors that scripts can catch as those of torch's distributed checkpoint, too.

megatron-core's backend torch_dist saves and loads with ``torch.distributed.checkpoint``, which
raises one CheckpointException on all ranks for the failures of all. Scripts that were written for
it catch that class, which is not even an Exception. The errors here are instances of it *and* of
the project's class, with the project's message, fields and exit code::

    MissingShardError   CheckpointException (torch)
             └──────┬──────┘
     MissingShardError of this module, by ``torch_error``
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from core.dist_checkpointing._ranks.comm import Outcome
from core.errors import CheckpointingException, WorkerError

_MAX_PICKLED = 8
"""Failures that a pickle contains: ranks send errors to all others, so their size is bounded."""


class _FailuresByRank(CheckpointException):
    """The part of an error that torch declares: ``failures``, by rank."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        state["_failures"] = dict(islice(self.failures.items(), _MAX_PICKLED))
        return _rebuild, (type(self).__mro__[1], state)


def torch_error(outcome: Outcome) -> CheckpointingException:
    """Return the error of an outcome as one of torch's, too.

    Args:
        outcome: outcome with an error.

    Returns:
        An error of the same class, with the failures by rank. It is a WorkerError for an error of
        this rank that is not one of the project's.
    """
    error = outcome.error
    assert error is not None, "the outcome is a failure"
    if isinstance(error, CheckpointException) and isinstance(error, CheckpointingException):
        return error
    if not isinstance(error, CheckpointingException):
        text = next(failure.text for failure in outcome.failures if failure is not None)
        error = WorkerError(text).with_traceback(error.__traceback__)
        error.__cause__ = outcome.error
    failures = {
        rank: failure.unpack()
        for rank, failure in enumerate(outcome.failures)
        if failure is not None
    }
    rebuilt = _rebuild(type(error), {**error.__dict__, "_failures": failures})
    rebuilt.__cause__, rebuilt.__suppress_context__ = error.__cause__, True
    return rebuilt.with_traceback(error.__traceback__)


@lru_cache
def _class_of(kind: type[CheckpointingException]) -> type[CheckpointingException]:
    """Return the subclass of a class of errors that is one of torch's, too, of the same name."""
    return type(
        kind.__name__, (kind, _FailuresByRank), {"__module__": __name__, "__doc__": kind.__doc__}
    )


def _rebuild(kind: type[CheckpointingException], state: dict[str, Any]) -> CheckpointingException:
    """Return an error from its project's class and its fields."""
    both = _class_of(kind)  # type: ignore[arg-type] # mypy 1 takes no class for Hashable
    error = both.__new__(both, state["message"])
    error.__dict__.update(state)
    return error
