"""``ckpt reshard``: a Megatron checkpoint for other parallel sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.commands.transfer import SIZES, job_of, pipeline_of, transfer
from core.errors import UsageError

if TYPE_CHECKING:
    from ckpt_cli.options.transfer import TransferOptions


def reshard(options: TransferOptions) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: nothing to change.
    """
    sizes = (options.tp_new, options.pp_new, options.vpp_new, options.ep_new, options.etp_new)
    is_asked = pipeline_of(options) is not None or any(size is not None for size in sizes)
    if options.to is None and options.vocab_size is None and not is_asked:
        raise UsageError("which layout? no target size is given", hint=_example(options))
    return transfer(job_of(options, keeps_layout=True), options)


def _example(options: TransferOptions) -> str:
    """What to say; sizes given without ``-new``, which only assert what SRC has, are repeated with it."""
    said = [(name, size) for name in SIZES if (size := getattr(options, name)) is not None]
    if not said:
        return "say for example: --tp-new 4 --pp-new 2"
    asserted, wanted = (" ".join(f"--{name}{new} {size}" for name, size in said) for new in ("", "-new"))
    return f"{asserted} says what SRC has; for what is to be written say: {wanted}"
