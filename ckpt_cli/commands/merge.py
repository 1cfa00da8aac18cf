"""``ckpt merge``: compute one checkpoint from several of the same model.

The objects of ``--json`` are those of ``convert`` (``ckpt_cli.commands.transfer``); ``src`` is the
first source, and the first of ``notes`` describes the computation with all sources.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.commands.transfer import build_job, transfer
from ckpt_cli.options.merge import parse_numbers
from core.errors import UsageError
from core.verbs.convert.job_options import implied_format
from core.verbs.merge.request import build_merge

if TYPE_CHECKING:
    from ckpt_cli.options.merge import MergeOptions
    from ckpt_cli.options.transfer import TransferOptions


def merge(options: TransferOptions, merge_options: MergeOptions) -> int:
    """Run ``ckpt merge`` and return the exit code.

    Args:
        options: the options that convert has as well.
        merge_options: the sources, and what to compute.

    Raises:
        UsageError: there is no destination, or not exactly one computation is requested.
        CheckpointingException: a checkpoint cannot be read, merged or written.
    """
    request = build_merge(
        merge_options.paths,
        average=merge_options.average,
        weights=None if merge_options.weights is None else parse_numbers(merge_options.weights),
        ema=merge_options.ema,
        slerp=merge_options.slerp,
        delta=merge_options.delta,
        add_delta=merge_options.add_delta or (),
        scale=merge_options.scale,
        lora=merge_options.lora,
        replace=merge_options.replace,
        keep_first=merge_options.keep_first,
    )
    if options.output is None:
        raise UsageError("the destination is missing", hint="pass -o DST")
    to = options.to or implied_format(options.output, options.names)
    # Without a target format the result has the first source's, with its parallel sizes.
    options = replace(options, src=merge_options.paths[0], to=to)
    job = build_job(options)
    return transfer(replace(job, merge=request), options)
