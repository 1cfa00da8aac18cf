"""Rules that say which requests are answered with which fault."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field

FAULTS = (
    "error",  # answer with ``status`` and ``code``; the request has no effect
    "cut",  # close the connection without an answer; the request has no effect
    "lost",  # do what was asked, and close the connection without an answer
    "truncate",  # send half of the body (or the first word, where there is no body), and close
    "length",  # state half of the length of the body, and send as much
    "flip",  # flip one bit in the middle of the body
    "slow",  # receive and send ``bytes_per_s``
    "hang",  # never answer; the request has no effect
    "kill",  # SIGKILL to ``pid``; the request has no effect
    "kill after",  # do what was asked, SIGKILL to ``pid``, no answer
    "whole",  # ignore that a range was asked for
)


@dataclass(frozen=True)
class Rule:
    """A fault, and the requests that it concerns.

    Args:
        fault: one of ``FAULTS``.
        operation, key, query: regular expressions; the operation (in S3's words, such as
            ``GetObject|HeadObject``) must match completely, key and query somewhere.
        first: number of the first of these requests that the fault hits, counted from 1.
        times: how many of them it hits; None for all from the first on.
        status, code, headers: answer of ``error``.
        bytes_per_s: rate of ``slow``.
        pid: process that ``kill`` kills.
    """

    fault: str = "error"
    operation: str = ".*"
    key: str = ""
    query: str = ""
    first: int = 1
    times: int | None = 1
    status: int = 500
    code: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)
    bytes_per_s: int = 1 << 20
    pid: int = 0

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"no such fault: {self.fault}")

    def concerns(self, operation: str, key: str, query: str) -> bool:
        """Return whether a request is one of those that are counted."""
        return (
            re.fullmatch(self.operation, operation) is not None
            and re.search(self.key, key) is not None
            and re.search(self.query, query) is not None
        )


SLOW_DOWN = Rule(status=503, code="SlowDown")
RETRY_AFTER = Rule(status=503, code="SlowDown", headers={"Retry-After": "1"})
EXPIRED = Rule(status=403, code="ExpiredToken")


class Rules:
    """The rules in force, each with the number of requests that it has seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._counts: list[int] = []

    def replace(self, rules: list[Rule]) -> None:
        """Begin anew with other rules."""
        with self._lock:
            self._rules, self._counts = rules, [0] * len(rules)

    def find(self, operation: str, key: str, query: str) -> Rule | None:
        """Count a request, and return the first rule that hits it."""
        match = None
        with self._lock:
            for number, rule in enumerate(self._rules):
                if rule.concerns(operation, key, query):
                    self._counts[number] += 1
                    n_after = self._counts[number] - rule.first
                    is_hit = n_after >= 0 and (rule.times is None or n_after < rule.times)
                    match = match or (rule if is_hit else None)
        return match
