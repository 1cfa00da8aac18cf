"""The error for a path that is not a distributed checkpoint, with a hint to what can be loaded."""

from __future__ import annotations

from pathlib import Path

from core.dist_checkpointing._directory.sums import STAGE
from core.dist_checkpointing.core import CONFIG_FNAME
from core.errors import CheckpointingException, MissingShardError, UnsupportedError, UsageError
from core.formats.mcore.common_state import COMMON_FILE
from core.opening.open import open_checkpoint

_OLDER = "use an older checkpoint"


def refusal_of(checkpoint_dir: Path) -> CheckpointingException:
    """Build the error for a path without a ``metadata.json``; the error is not raised.

    Returns:
        UsageError: the path does not exist, is a file, or is a directory that contains a
            checkpoint.
        MissingShardError: a save into the directory did not finish.
        UnsupportedError: the directory is a checkpoint of another format, or not a checkpoint.
    """
    path = str(checkpoint_dir)
    if not checkpoint_dir.exists():
        return UsageError(
            f"the checkpoint directory {path} does not exist", hint="check the spelling of the path"
        )
    if not checkpoint_dir.is_dir():
        hint = f"pass its directory, {checkpoint_dir.parent}, if that is a checkpoint"
        return UsageError(
            f"{path} is a file, not the directory of a distributed checkpoint", hint=hint
        )
    # A save that did not finish: with its staging directory, or by Megatron, which has none.
    if (checkpoint_dir / STAGE).is_dir():
        return MissingShardError(
            f"the save into this directory did not finish: it contains {STAGE}, "
            f"but no {CONFIG_FNAME}",
            file=path,
            hint=f"wait if the save is still running, otherwise {_OLDER}",
        )
    if (checkpoint_dir / COMMON_FILE).is_file():
        return MissingShardError(
            f"{CONFIG_FNAME} is missing; it is written last, so the save did not finish",
            file=path,
            hint=_OLDER,
        )
    return _refusal_of_other_format(checkpoint_dir)


def _refusal_of_other_format(checkpoint_dir: Path) -> CheckpointingException:
    """Build the error for a directory that may be, or contain, a checkpoint of another format."""
    # Opening also finds a checkpoint below the directory, as in a training root.
    path = str(checkpoint_dir)
    try:
        source = open_checkpoint(checkpoint_dir, samples=True)
    except CheckpointingException as err:
        return UnsupportedError(
            f"{path} is not a distributed checkpoint: {CONFIG_FNAME} is missing; {err.message}",
            hint=err.hint,
        )
    source.store.close()
    if source.path.resolve() != checkpoint_dir.resolve():
        return UsageError(
            f"{path} is not a distributed checkpoint, but contains one, {source.path.name}",
            hint=f"load {source.path}",
        )
    return UnsupportedError(
        f"{path} is a checkpoint in the format {source.format.name}, not a distributed checkpoint",
        hint=f"convert it: ckpt convert {checkpoint_dir} --to torch_dist",
    )
