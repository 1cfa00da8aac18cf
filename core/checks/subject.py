"""What checks look at: a checkpoint that may be damaged, opened as far as it opens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from core.canonical import Canonical, canonical
from core.catalog import Catalog
from core.checks import Level
from core.checks.tree import Tree, walked
from core.errors import CheckpointingException
from core.finding import Finding
from core.formats import Format
from core.layout_rules import Rules
from core.open import Checkpoint
from core.store import LocalStore


@dataclass(kw_only=True)
class Subject:
    """A checkpoint under examination.

    Args:
        path: the directory or file, after descending from a root.
        root: what the user pointed at.
        store: its files.
        format: the format it looks like, None if no format recognises it.
        level: how much is to be read.
        rules: the layout's table.
        iteration: as ``core.open`` found it.
        findings: what has been found so far; checks that come later may look at it.

    Reading its metadata may fail: ``catalog`` is then None, and ``failure`` says why.
    """

    path: Path
    root: Path
    store: LocalStore
    format: Format | None
    level: Level
    rules: Rules
    iteration: int | None = None
    findings: list[Finding] = field(default_factory=list)
    failure: CheckpointingException | None = None

    @cached_property
    def tree(self) -> Tree:
        """What lies in the directory; of one file, only that."""
        return walked(self.store.root, entry=self.store.entry)

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Every regular file of the checkpoint with its size, by relative path; the one file, if it is one."""
        return self.tree.files

    @cached_property
    def catalog(self) -> Catalog | None:
        """The metadata: of a sample of the files at the lowest level, of all of them above; None if reading fails."""
        if self.format is None:
            return None
        is_sample = self.level == Level.METADATA and self.format.sample is not None
        try:
            return self.format.sample(self.store) if is_sample and self.format.sample else self.format.read(self.store)
        except CheckpointingException as err:
            self.failure = self.failure or err
            return None

    @cached_property
    def canonical(self) -> Canonical | None:
        """The tensors under global, per-layer names where the layout is known; None if the metadata cannot be read."""
        catalog = self.catalog
        if catalog is None or self.format is None:
            return None
        opened = Checkpoint(self.path, self.store, self.format, catalog, self.iteration)
        return canonical(opened, rules=self.rules)
