"""Why a path is no distributed checkpoint that can be loaded, and what would be one."""

from __future__ import annotations

from pathlib import Path

from core.dist_checkpointing._directory.publication import STAGE
from core.dist_checkpointing.core import CONFIG_FNAME
from core.errors import CheckpointingException, MissingShardError, UnsupportedError, UsageError
from core.formats.mcore.common_state import COMMON_FILE
from core.opening.open import open_checkpoint

_OLDER = "use an older checkpoint"


def refusal_of(checkpoint_dir: Path) -> CheckpointingException:
    """The error for a path without a ``metadata.json`` in it.

    Returns:
        UsageError: there is nothing, a file, or a training root whose iterations are checkpoints.
        MissingShardError: a save did not finish.
        UnsupportedError: a checkpoint of another format, or none.
    """
    where = str(checkpoint_dir)
    if not checkpoint_dir.exists():
        return UsageError(f"the checkpoint directory {where} does not exist", hint="check the spelling of the path")
    if not checkpoint_dir.is_dir():
        hint = f"pass the directory that it lies in, {checkpoint_dir.parent}, if that is a checkpoint"
        return UsageError(f"{where} is not a distributed checkpoint, which is a directory, but a file", hint=hint)
    if (checkpoint_dir / STAGE).is_dir():
        return MissingShardError(
            f"the save into this directory is not finished: there is {STAGE} in it and no {CONFIG_FNAME}",
            file=where,
            hint=f"wait for it if it is still going on, else {_OLDER}",
        )
    if (checkpoint_dir / COMMON_FILE).is_file():
        return MissingShardError(
            f"{CONFIG_FNAME} is not there; it is written last, so the save did not finish", file=where, hint=_OLDER
        )
    return _other_format(checkpoint_dir)


def _other_format(checkpoint_dir: Path) -> CheckpointingException:
    where = str(checkpoint_dir)
    try:
        found = open_checkpoint(checkpoint_dir, samples=True)
    except CheckpointingException as err:
        return UnsupportedError(
            f"{where} is not a distributed checkpoint: there is no {CONFIG_FNAME} in it; {err.message}", hint=err.hint
        )
    found.store.close()
    if found.path.resolve() != checkpoint_dir.resolve():
        return UsageError(
            f"{where} is not a distributed checkpoint, but a directory that holds one, {found.path.name}",
            hint=f"load {found.path}",
        )
    return UnsupportedError(
        f"{where} is not a distributed checkpoint, but one of the format {found.format.name}",
        hint=f"ckpt convert {checkpoint_dir} --to torch_dist makes one",
    )
