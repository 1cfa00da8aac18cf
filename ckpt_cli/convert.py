"""``ckpt convert``: a checkpoint in another format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.transfer import job_of, transfer
from core.errors import UsageError
from core.formats import formats

if TYPE_CHECKING:
    from ckpt_cli.options import TransferOptions


def convert(options: TransferOptions) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: no ``--to``.
    """
    if options.to is None:
        writable = [format.name for format in formats() if format.lay_out is not None]
        raise UsageError("which format? --to is missing", hint=f"choose one of: {', '.join(writable)}")
    return transfer(job_of(options, keeps_layout=False), options)
