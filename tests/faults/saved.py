"""A save of a running job, disturbed like a command: the same questions as of a ``Target``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from core.dist_checkpointing._directory.sums import STAGE
from core.dist_checkpointing.core import CONFIG_FNAME
from tests.faults.disturb import nothing
from tests.faults.operations import Disturb
from tests.faults.process import Ended, run
from tests.faults.target import Kind, Tree, tree

SAVE = Kind("dist_checkpointing.save", "", ())


def state_dict(value: int) -> dict[str, Any]:
    """A small model with an object, both sharded, and common state."""
    import torch

    from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    def make_sharded(key: str, data: torch.Tensor) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data)

    return {
        "weight": make_sharded(
            "weight", torch.arange(value, value + 6000, dtype=torch.float32).reshape(60, 100)
        ),
        "bias": make_sharded("bias", torch.full((100,), value, dtype=torch.bfloat16)),
        "rng": ShardedObject("rng", {"seed": value}, (1,), (0,)),
        "iteration": value,
    }


def preload_saving(folder: Path) -> None:
    """Imports what a save needs, by doing one."""
    import torch

    from core.dist_checkpointing import save

    torch.set_num_threads(1)  # forks have no other threads
    folder.mkdir(parents=True)
    save(state_dict(0), folder)


@dataclass
class SavedTarget:
    """A directory that is saved into.

    Args:
        work_dir: an existing, empty directory.
        force: a checkpoint stands there, and is to be replaced.
    """

    work_dir: Path
    force: bool = False

    def __post_init__(self) -> None:
        self.kind = SAVE
        self.root = self.work_dir / "watched"
        self.place = self.root / "place"
        self.dst = self.place
        self.stage_dir = self.place / STAGE
        self._notes_dir = self.work_dir / "notes"
        self._old_dir = self.work_dir / "old"
        self._notes_dir.mkdir()
        self.place.mkdir(parents=True)
        (self.place / "neighbour").write_text("precious")
        if self.force:
            assert run(self._saving(1), root=self.root, notes_dir=self._notes_dir).code == 0
            shutil.copytree(self.place, self._old_dir)
        self.begin_anew()
        ended = self.run()
        assert ended.code == 0, ended.output
        self.new = self._content()

    def _saving(self, value: int) -> Callable[[], int]:
        def work() -> int:
            import torch

            from core.dist_checkpointing import save
            from core.errors import CheckpointingException

            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            try:
                save(state_dict(value), self.place, overwrite=self.force or value == 1)
            except CheckpointingException as err:
                print(err, file=sys.stderr)  # noqa: T201
                return err.exit_code
            except KeyboardInterrupt:
                return 128 + signal.SIGINT
            return 0

        return work

    def work(self, *more: str) -> Callable[[], int]:
        """The save, to be done."""
        return self._saving(2)

    def run(self, *more: str, disturb: Disturb = nothing) -> Ended:
        """Saves in a process of its own."""
        return run(self.work(), root=self.root, notes_dir=self._notes_dir, disturb=disturb)

    def begin_anew(self) -> None:
        """As it was in the beginning."""
        shutil.rmtree(self.place)
        if self.force:
            shutil.copytree(self._old_dir, self.place)
        else:
            self.place.mkdir()

    @cached_property
    def old(self) -> Tree:
        """The old checkpoint."""
        return tree(self._old_dir) if self.force else {}

    def state(self) -> str:
        """What the directory is: no checkpoint (``none``), ``old``, ``new``, or what is wrong with
        it.
        """
        content = self._content()
        if content == self.new:
            return "new"
        if self.force and content == self.old:
            return "old"
        return "none" if CONFIG_FNAME not in content else f"torn: {sorted(content)[:10]}"

    def is_complete(self) -> bool:
        """Whether the new checkpoint is there."""
        return self.state() == "new"

    def is_clean(self) -> bool:
        """Whether nothing lies about."""
        return not os.path.lexists(self.stage_dir) and self.state() in (
            "new",
            "old" if self.force else "none",
        )

    def is_untouched_beside(self) -> bool:
        """Whether somebody else's file in the directory is as it was."""
        return not self.force or (self.place / "neighbour").read_text() == "precious"

    def is_aside(self) -> bool:
        """Whether the next save can put the old checkpoint back: every file of it is there or in
        the stage.
        """
        aside = tree(self.stage_dir / "old")
        current = self._content()
        return all(
            aside.get(path, current.get(path)) == content for path, content in self.old.items()
        )

    def _content(self) -> Tree:
        return {path: data for path, data in tree(self.place).items() if not path.startswith(STAGE)}
