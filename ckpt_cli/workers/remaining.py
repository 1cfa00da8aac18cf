"""What an interrupted command that writes a checkpoint has left on the disk."""

from __future__ import annotations

from pathlib import Path

from core.publish.stage.destination import choose_destination
from core.values import dataclass


@dataclass(slots=True)
class InterruptedOutput:
    """The output of a command that writes, as an interruption leaves it.

    Args:
        path: the path that was given; None if the command chooses one.
        keeps_partial: the staging directory is kept if the command is interrupted, however little
            is done.
        command: the command line, which continues if it is run again; None if it must not be shown.
        has_begun: the command may have written something; set when it copies.
        inode: inode that the destination gets when it is published, 0 in an object store; None
            before that.
    """

    path: Path | None
    keeps_partial: bool
    command: str | None = None
    has_begun: bool = False
    inode: int | None = None

    def remaining(self) -> str:
        """Return what remains, and how to continue."""
        if self.path is not None:
            return choose_destination(self.path).describe_remains(
                has_begun=self.has_begun,
                inode=self.inode,
                keeps_partial=self.keeps_partial,
                command=self.command,
            )
        if not self.has_begun:
            return "nothing was written (rerun the same command)"
        if self.keeps_partial:
            return "partial output, if any, is kept (rerun the same command to continue)"
        return (
            "nothing was published (a long run keeps its partial output so that the same command "
            "can continue; with --resume, every run does)"
        )
