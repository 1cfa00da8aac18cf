"""``ckpt convert``: write a checkpoint in another format.

Without ``--to`` the format follows from ``--names`` or DST's suffix. If neither determines it and
an option changes the content, the format is the source's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.commands.transfer import build_job, transfer
from ckpt_cli.options.transfer import CONTENT_OPTIONS
from core.errors import UsageError
from core.formats.registry import TARGETS, explain_other_software
from core.verbs.convert.job_options import implied_format

if TYPE_CHECKING:
    from ckpt_cli.options.transfer import TransferOptions


def convert(options: TransferOptions) -> int:
    """Run ``ckpt convert`` and return the exit code.

    Raises:
        UsageError: no option determines the format to write, or the options contradict each other.
        CheckpointingException: the checkpoint cannot be read, converted or written.
    """
    dst = options.output or options.dst
    to = options.to or implied_format(dst, options.names)
    if to is None and not any(getattr(options, name) for name in CONTENT_OPTIONS):
        unknown = (
            f", and the suffix {dst.suffix} does not imply a format" if dst and dst.suffix else ""
        )
        advice = explain_other_software(dst.suffix) if dst else None
        raise UsageError(
            f"no target format was specified{unknown}",
            hint=advice or f"pass --to with one of: {', '.join(TARGETS)}",
        )
    # To change only the content is to keep the source's format, with its parallel sizes.
    return transfer(build_job(replace(options, to=to)), options)
