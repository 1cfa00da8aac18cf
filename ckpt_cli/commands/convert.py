"""``ckpt convert``: a checkpoint in another format.

Without ``--to`` the format is that of DST's suffix, of the names asked for, or, where something of the content is to
change, the source's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.commands.transfer import job_of, transfer
from ckpt_cli.options.transfer import CONTENT_OPTIONS, TARGETS
from core.errors import UsageError

if TYPE_CHECKING:
    from ckpt_cli.options.transfer import TransferOptions

_SUFFIXES = {".pt": "torch", ".pth": "torch", ".safetensors": "safetensors"}


def convert(options: TransferOptions) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: nothing says which format is wanted.
    """
    to = options.to or _implied(options)
    return transfer(job_of(replace(options, to=to), keeps_layout=to is None), options)


def _implied(options: TransferOptions) -> str | None:
    """The format of a command line without ``--to``; None for the source's.

    Raises:
        UsageError: there is nothing that tells it.
    """
    dst = options.output or options.dst
    if options.names is not None and options.names.startswith("hf"):
        return "hf"
    if dst is not None and dst.suffix in _SUFFIXES:
        return _SUFFIXES[dst.suffix]
    if any(getattr(options, name) for name in CONTENT_OPTIONS):
        return None
    raise UsageError("which format? --to is missing", hint=f"choose one of: {', '.join(TARGETS)}")
