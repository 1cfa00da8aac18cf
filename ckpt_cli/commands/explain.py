"""``ckpt explain``: what a code or an error message means, or what stands in a checkpoint's way.

The exit code is 0, also for a damaged checkpoint, and 1 if nothing is known about a text.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.pages.explain_page import code_blocks, message_blocks
from ckpt_cli.screen.blocks import Block, Cell, Facts, dim_cell, draw_text
from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import escaped, screen_of
from core.errors import UsageError
from core.files.remote_path import is_remote, location_of
from core.verbs.checks.finding import codes
from core.verbs.explain.messages import match_messages, read_messages

if TYPE_CHECKING:
    from ckpt_cli.options.explain import ExplainOptions

_CODE = re.compile(r"\bCK\d{3}\b", re.IGNORECASE)
_MOST_SHOWN = 3
"""Maximum number of messages that are shown for a text."""
_MOST_WORDS = 40
"""Maximum number of words of a question."""
_PLACES = 3
"""Maximum number of places that are shown for a code."""


def explain(options: ExplainOptions) -> int:
    """Run ``ckpt explain`` and return the exit code.

    Raises:
        UsageError: there is no such code or path.
        CheckpointingException: nothing of a checkpoint can be looked at.
    """
    words = options.subject
    is_path = len(words) == 1 and (is_remote(words[0]) or os.path.lexists(words[0]))
    blocks: list[Block] = []
    if is_path:
        blocks = list(_checkpoint_blocks(location_of(words[0])))
    else:
        text = sys.stdin.read() if words == ["-"] else " ".join(map(str, words))
        blocks = list(_text_blocks(text))
        # A path that was misspelt is answered with the nearest one.
        if not blocks and len(text.split()) == 1 and os.sep in text:
            blocks = list(_checkpoint_blocks(location_of(text)))
    # A log without a known message is no question to the pages.
    if not blocks and not is_path and len(text.split()) <= _MOST_WORDS:
        from ckpt_cli.commands.help import answer_blocks

        blocks = list(answer_blocks(text))
        blocks[:0] = ["this text matches no known message, but these pages may help:", ""] * bool(
            blocks
        )
    exit_code = 0
    if not blocks:
        blocks = list(_unknown_blocks())
        exit_code = 1
    pager = None if options.no_pager else pager_of(sys.stdout)
    print_page(draw_text(screen_of(sys.stdout), blocks), pager)
    return exit_code


def _text_blocks(text: str) -> Iterator[Block]:
    """Yield the codes and messages that a text names; nothing if none is known.

    Raises:
        UsageError: the text is a code that does not exist.
    """
    names = list(dict.fromkeys(name.upper() for name in _CODE.findall(text)))
    unknown = [name for name in names if name not in codes()]
    if unknown:
        raise UsageError(
            f"there is no code {unknown[0]}", hint="list all codes: ckpt validate --list-checks"
        )
    for number, name in enumerate(names):
        yield from [""] if number else []
        yield from code_blocks(codes()[name])
    if names:
        return
    entry = read_messages().get(text.strip())
    matches = [entry] if entry else match_messages(text)
    for number, message in enumerate(matches[:_MOST_SHOWN]):
        yield from [""] if number else []
        yield from message_blocks(message)
    names = [message.name for message in matches[_MOST_SHOWN:]]
    if names:
        yield ""
        yield dim_cell(f"less likely: {', '.join(f'ckpt explain {name}' for name in names)}")


def _unknown_blocks() -> Iterator[Block]:
    """Yield what to do about a text of which nothing is known."""
    yield "this text matches no known message"
    yield Facts(
        [
            ("do", "paste the line that names the error, or a few words from it"),
            ("", "or examine the checkpoint itself"),
            ("run", Cell("ckpt explain PATH", ("cyan",))),
            ("", Cell("ckpt inspect PATH", ("cyan",))),
            ("", Cell("ckpt validate PATH", ("cyan",))),
            ("more", Cell("ckpt help troubleshooting", ("cyan",))),
        ],
        indent=2,
    )


def _checkpoint_blocks(path: Path) -> Iterator[Block]:
    """Yield the findings of a checkpoint's metadata, their explanations, and what can be done.

    Raises:
        UsageError: there is no such path.
        CheckpointingException: nothing of the checkpoint can be looked at.
    """
    from ckpt_cli.findings.text import text_lines
    from ckpt_cli.findings.verdict import Verdict
    from ckpt_cli.workers.current_team import default_memory
    from ckpt_cli.workers.progress import show_progress
    from core.opening.iterations import ITERATION_DIR
    from core.verbs.checks.finding import Severity
    from core.verbs.validate.accepted import Acceptance
    from core.verbs.validate.run import validate

    with show_progress(progress_form(None, is_quiet=False)) as progress:
        validation = validate(path, memory_bytes=default_memory(), progress=progress)
    verdict = Verdict(validation, Acceptance().judge(validation.findings))
    if validation.contains_checkpoints:
        from ckpt_cli.pages.inspect_listing import listing_lines
        from core.opening.listing import list_checkpoints

        listing = list_checkpoints(path)
        yield lambda screen: listing_lines(screen, path, listing, limit=0, command="ckpt explain")
        return
    yield lambda screen: text_lines(screen, [verdict], limit=_PLACES, is_quiet=False)
    folder, name = os.path.split(validation.path.rstrip("/"))
    root = None if str(path) == validation.path else str(path)
    if ITERATION_DIR.match(name):
        root = folder or os.curdir
    # A note needs no explanation of its own.
    counted = [item for item in verdict.judgement.counted if item.severity != Severity.NOTE]
    for name in dict.fromkeys(finding.code for finding in counted):
        yield ""
        yield from code_blocks(codes()[name], path=validation.path, root=root)
    yield ""
    if not verdict.judgement.is_valid:
        yield escaped(f"to see what can be read: ckpt inspect {shlex.quote(str(path))}")
        return
    yield from _capability_blocks(path)


def _capability_blocks(path: Path) -> Iterator[Block]:
    """Yield what can be done with a checkpoint that opens.

    Raises:
        CheckpointingException: it does not open.
    """
    from ckpt_cli.pages.inspect_page import capability_facts
    from core.opening.open import open_checkpoint
    from core.verbs.inspect.summary import summarize

    checkpoint = open_checkpoint(path, samples=True)
    try:
        summary = summarize(checkpoint)
    finally:
        checkpoint.store.close()
    command = f"ckpt validate {shlex.quote(str(path))} --deep"
    yield escaped(f"the checkpoint opens; to read every byte: {command}")
    yield Facts(list(capability_facts(summary)), indent=2)
