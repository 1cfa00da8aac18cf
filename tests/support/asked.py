"""What another process answers: scripts that import megatron-core run in a process of their own."""

from __future__ import annotations

import json
from typing import Any

from tests.support import forked


def told(*arguments: object, question: object, timeout: int = 300) -> str:
    """What a script prints that gets a question as JSON on its stdin, and succeeds.

    Args:
        arguments: of this Python: a file, or ``-c`` and a text.
        question: what ``json`` can write.
        timeout: seconds.
    """
    done = forked.run(arguments, input=json.dumps(question), timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def asked(*arguments: object, question: object) -> Any:
    """What a script answers to a question; both are JSON."""
    return json.loads(told(*arguments, question=question))
