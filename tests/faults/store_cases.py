"""Cases: one fault at one request, and whether anything was lost or left behind by it.

Whatever happens, the destination is complete or no checkpoint, other objects are untouched, and the
same command run again succeeds with the same bytes and leaves nothing behind. In addition, by kind
of fault:

- what passes by itself (an error 500 or 503, a lost connection, a slow one) is not noticed;
- a run that fails leaves nothing in a store that answers;
- a killed run may leave uploads and a record, which the next one removes or continues.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.faults.case import KNOWN_CODES, Case
from tests.faults.store_target import StoreRun, StoreTarget
from tests.support.s3.rules import EXPIRED, RETRY_AFTER, SLOW_DOWN, Rule

_SLOW_BYTES = 200_000
PASSING = {
    "500": Rule(status=500),
    "503 SlowDown": SLOW_DOWN,
    "503 Retry-After": RETRY_AFTER,
    "slow": Rule("slow", bytes_per_s=_SLOW_BYTES),
    "cut": Rule("cut"),
    "lost answer": Rule("lost"),
}
"""Faults that one repetition overcomes."""
DAMAGING = {"truncated": Rule("truncate"), "wrong length": Rule("length")}
"""Faults that may end a run."""
LASTING = {
    "403 from then on": replace(EXPIRED, times=None),
    "503 from then on": replace(SLOW_DOWN, times=None),
}
"""Faults after which the store refuses everything."""


class StoreCases:
    """All faults at all requests of one target."""

    def __init__(self, target: StoreTarget) -> None:
        self.target = target

    def all(self) -> Iterator[Case]:
        """Yield every case."""
        for number, entry in enumerate(self.target.trace, start=1):
            name = f"request {number} of {len(self.target.trace)}, {entry.operation} {entry.key}"
            for fault in ("kill", "kill after"):
                check = self._killed(number, fault)
                yield Case("SIGKILL", f"{fault} {name}", check)
                if self.target.kind.source:
                    check = self._killed(number, fault, "--resume")
                    yield Case("SIGKILL, --resume", f"{fault} {name}", check)
            for fault, rule in PASSING.items():
                yield Case(fault, name, self._passed(replace(rule, first=number)))
            for fault, rule in DAMAGING.items():
                yield Case(fault, name, self._failed(replace(rule, first=number)))
            for fault, rule in LASTING.items():
                check = self._failed(replace(rule, first=number), lasts=True)
                yield Case(fault, name, check)

    def _killed(self, number: int, fault: str, *more: str) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.place.empty()
            ended = self.target.run(*more, rules=lambda pid: [Rule(fault, first=number, pid=pid)])
            if ended.code not in (-signal.SIGKILL, 0):  # 0: it made fewer requests this time
                yield f"not killed: {ended.end}"
            yield from self._whole(ended)
            yield from self._again(*more)

        return check

    def _passed(self, rule: Rule) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.place.empty()
            ended = self.target.run(rules=lambda pid: [rule])
            if ended.code != 0:
                yield f"a fault that passes was not overcome: {ended.end}"
            yield from self._whole(ended)
            yield from self._clean(ended)
            yield from self._again()

        return check

    def _failed(self, rule: Rule, *, lasts: bool = False) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.place.empty()
            ended = self.target.run(rules=lambda pid: [rule])
            if ended.code is None:
                yield "hangs"
            elif ended.code != 0 and ended.code not in KNOWN_CODES:
                yield ended.end
            yield from self._whole(ended)
            if not lasts:
                yield from self._clean(ended)
            yield from self._again()

        return check

    # ------------------------------------------------------------------ how they are judged

    def _whole(self, ended: StoreRun) -> Iterator[str]:
        """Check that the destination is complete, or no checkpoint."""
        state = self.target.state()
        if ended.code == 0 and state != "new":
            yield f"success, and the destination is {state}; {ended.end}"
        if state == "part":
            names = sorted(self.target.place.content())
            if self.target.validate().code == 0:
                yield f"a part of the destination passes validate --deep: {names}; {ended.end}"
        elif state not in ("new", "new but for its last objects", "none"):
            yield f"the destination is {state}; {ended.end}"

    def _clean(self, ended: StoreRun) -> Iterator[str]:
        """Check that nothing is left of a run that ended by itself."""
        strays = self.target.place.strays()
        if strays and "was not deleted" not in ended.output:
            yield f"left behind: {strays[:5]}; {ended.end}"
        if ended.code != 0 and self.target.state() != "none":
            state = self.target.state()
            yield f"it failed, and the destination is {state}; {ended.end}"

    def _again(self, *more: str) -> Iterator[str]:
        """Check the same command, undisturbed."""
        was = self.target.state()
        is_save = not self.target.kind.source
        ended = self.target.run(*more, *(("--force",) if is_save else ()))
        # A destination that is complete exists; a record of it is removed all the same.
        if ended.code != 0 and not (was == "new" and ended.code == 2):
            yield f"run again after {was}: {ended.end}"
        if self.target.state() != "new":
            yield f"run again after {was}, the destination is {self.target.state()}; {ended.end}"
        elif strays := self.target.place.strays():
            yield f"run again after {was}, left behind: {strays[:5]}; {ended.end}"
