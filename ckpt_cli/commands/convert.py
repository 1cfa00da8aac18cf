"""``ckpt convert``: write a checkpoint in another format.

Without ``--to`` the format follows from ``--names`` or DST's suffix. If neither tells it and the
content is to change, it is the source's format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.commands.transfer import build_job, transfer
from ckpt_cli.options.transfer import CONTENT_OPTIONS, TARGETS
from core.api.verbs import implied_format
from core.errors import UsageError

if TYPE_CHECKING:
    from ckpt_cli.options.transfer import TransferOptions


def convert(options: TransferOptions) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: no option tells which format to write.
    """
    to = options.to or _implied_format(options)
    return transfer(build_job(replace(options, to=to), keeps_layout=to is None), options)


def _implied_format(options: TransferOptions) -> str | None:
    """Return the format that a command line without ``--to`` asks for; None for the source's.

    Raises:
        UsageError: no option tells the format.
    """
    implied = implied_format(options.output or options.dst, options.names)
    if implied is not None:
        return implied
    if any(getattr(options, name) for name in CONTENT_OPTIONS):
        return None
    raise UsageError(
        "no target format: --to is missing", hint=f"choose one of: {', '.join(TARGETS)}"
    )
