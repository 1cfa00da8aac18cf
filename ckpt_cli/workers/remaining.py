"""What an interrupted command that writes a checkpoint has left on the disk."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote

from ckpt_cli.screen.blocks import bytes_text
from core.files.remote_path import is_remote
from core.publish.stage.folder_lock import stage_dir_of
from core.publish.stage.journal import recorded_bytes
from core.values import dataclass


@dataclass(slots=True)
class InterruptedOutput:
    """The output of a command that writes, as an interruption leaves it.

    Args:
        path: the path that was given; None if the command chooses one.
        keeps_partial: the staging directory is kept if the command is interrupted, however little
            is done.
        command: the command line, which continues if it is run again; None if it must not be shown.
        inode: inode that the destination gets when it is published, 0 in an object store; None
            before that.
    """

    path: Path | None
    keeps_partial: bool
    command: str | None = None
    inode: int | None = None

    def remaining(self) -> str:
        """Return what remains, and how to continue."""
        path = self.path
        if is_remote(path):
            if self.inode is not None:
                return f"{path} was already complete"
            if self.keeps_partial:
                return f"what was sent to {path} is kept (rerun the same command to continue)"
            return (
                f"rerun the same command: if {path} was just being replaced, this finishes it; "
                "otherwise it starts over (--resume keeps what is sent)"
            )
        # The disk decides: a signal may arrive right before or after the rename.
        if path is not None and self.inode is not None and _inode_of(path) == self.inode:
            return f"{path} was already complete"
        stage_dir = None if path is None else stage_dir_of(Path(os.path.abspath(path)))
        has_stage = stage_dir is not None and os.path.lexists(stage_dir)
        # Without --force there was no destination, or the command would have refused it.
        unchanged = f", {path} is unchanged" if path and os.path.lexists(path) else ""
        if stage_dir is not None and has_stage:
            n_bytes = recorded_bytes(stage_dir)
            if n_bytes or self.keeps_partial:
                done = f"{bytes_text(n_bytes)} of" if n_bytes else "the beginning of"
                again = f": {self.command}" if self.command else " with the same command"
                return (
                    f"{done} the output is kept in {stage_dir}{unchanged}; continue{again} "
                    f"(or remove it: rm -r {quote(str(stage_dir))})"
                )
        if self.keeps_partial:
            is_known = path is not None
            kept = "nothing was written" if is_known else "partial output, if any, is kept"
            return f"{kept}{unchanged} (rerun the same command{'' if is_known else ' to continue'})"
        if has_stage:
            return f"{stage_dir} could not be removed{unchanged} (the next run removes it)"
        return (
            f"nothing was written{unchanged} (rerun with --resume to keep partial work next time)"
        )


def _inode_of(path: Path) -> int | None:
    """Return the inode at a path; None if there is none."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None
