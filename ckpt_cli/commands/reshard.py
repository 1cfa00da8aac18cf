"""``ckpt reshard``: write a Megatron checkpoint with other parallel sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.commands.transfer import build_job, transfer
from ckpt_cli.screen.other_tools import ZERO_HINT
from core.verbs.convert.job import SIZES
from core.verbs.convert.options import check_reshard

if TYPE_CHECKING:
    from ckpt_cli.options.transfer import TransferOptions


def reshard(options: TransferOptions) -> int:
    """Run ``ckpt reshard`` and return the exit code.

    Raises:
        UsageError: no option changes the layout, or the options contradict each other.
        CheckpointingException: the checkpoint cannot be read, resharded or written.
    """
    job = build_job(options, is_reshard=True)
    check_reshard(job, hint=_target_size_hint(options))
    return transfer(job, options)


def _target_size_hint(options: TransferOptions) -> str:
    """Return the hint for a command line without target sizes.

    Sizes given as ``--tp`` describe SRC, although the user probably meant ``--tp-new``: the hint
    repeats them in that form.
    """
    source_sizes = {name: size for name in SIZES if (size := getattr(options, name)) is not None}
    if not source_sizes:
        return f"for example: --tp-new 4 --pp-new 2; {ZERO_HINT}"
    names = ", ".join(f"--{name}" for name in source_sizes)
    verb = "describes" if len(source_sizes) == 1 else "describe"
    target_sizes = ", ".join(f"{name.upper()} {size}" for name, size in source_sizes.items())
    target_options = " ".join(f"--{name}-new {size}" for name, size in source_sizes.items())
    return f"{names} {verb} SRC; to write {target_sizes} use {target_options}"
