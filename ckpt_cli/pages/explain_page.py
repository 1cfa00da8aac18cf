"""The page of ``ckpt explain``: a message, or a code of ``ckpt validate``, and what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_cli.findings.text import STYLES
from ckpt_cli.findings.verdict import LEVELS
from ckpt_cli.screen.blocks import Block, Cell, Facts, fact_list
from core.verbs.checks.finding import Level
from core.verbs.explain.messages import read_causes

if TYPE_CHECKING:
    from core.verbs.checks.finding import Code
    from core.verbs.explain.messages import Message


def message_blocks(message: Message) -> Iterator[Block]:
    """Yield a message with its meaning, how it comes about and what to do."""
    yield Cell(message.title, ("bold",))
    topics = [f"ckpt help {topic}" for topic in message.topics]
    codes = [f"ckpt explain {' '.join(message.codes)}"] if message.codes else []
    yield Facts(
        [
            ("printed by", message.printed_by),
            ("means", message.meaning),
            *fact_list("causes" if len(message.causes) > 1 else "cause", message.causes),
            *fact_list("do", message.steps),
            *fact_list("run", message.commands, "cyan"),
            *fact_list("more", [*topics, *codes], "cyan"),
            *fact_list("reported", message.reported, "dim"),
        ],
        indent=2,
    )


def code_blocks(code: Code, *, path: str | None = None, root: str | None = None) -> Iterator[Block]:
    """Yield a code of ``ckpt validate`` with its meaning, how it comes about and what to do.

    Args:
        path: the checkpoint with findings of this code, which are shown above with what to do.
        root: the directory of its run; None if it is not an iteration of one.
    """
    cause = read_causes()[code.code]
    level = LEVELS[code.level]
    commands = list(cause.commands)
    if path is not None:
        places = {"PATH": path} | ({} if root is None else {"ROOT": root})
        commands = [
            re.sub(r"\b(PATH|ROOT)\b", lambda match: shlex.quote(places[match[1]]), command)
            for command in commands
            if root is not None or "ROOT" not in command
        ]
    option = "" if code.level == Level.METADATA else f" --{level}"
    yield (Cell(code.code, ("bold", STYLES[code.severity])), "  ", Cell(code.title, ("bold",)))
    yield Facts(
        [
            ("severity", f"{code.severity.label}, reported by ckpt validate{option}"),
            # What a finding above says of its own cause goes before.
            ("cause" if path is None else "usually", cause.text),
            *([("do", code.hint)] if path is None else ()),
            *fact_list("run", commands, "cyan"),
        ],
        indent=2,
    )
