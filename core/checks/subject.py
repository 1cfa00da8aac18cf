"""What checks look at: a checkpoint that may be damaged, opened as far as it opens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from core.calibration.choice import settled
from core.catalog.catalog import Catalog
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.model_view import ModelView, model_view
from core.checks.tensor_names import TensorNames
from core.checks.watch import Deep, Watch
from core.device.device import FINGERPRINT, VALUES, Device
from core.errors import CheckpointingException
from core.files.store import LocalStore
from core.files.walk import Tree, hollow_files, walked
from core.formats.format import Format
from core.formats.torch.format import SUFFIXES
from core.formats.torch.other_pickles import PickledContent, is_checkpoint_file, look_into
from core.formats.zarr.fill import fill_of
from core.manifest.lookup import Recorded, recorded
from core.manifest.stated_crcs import StatedSums
from core.megatron.rules.rules import Rules
from core.opening.canonical import Canonical, canonical
from core.opening.open import FILL, Checkpoint
from core.opening.pickled_tensors import pickled_tensors
from core.pickle.reader import ReadPickle, ReadPickles, keeping_pickles, noting_uses
from core.pickle.uses import Use
from core.scan.run import DEFAULT_MEMORY_BYTES, Progress, scan
from core.scan.sums import Wanted
from core.team.agreement import agreed
from core.team.protocol import ALONE, Team

if TYPE_CHECKING:
    from core.checks.comparison import Against
    from core.checks.plan_request import Request
    from core.fingerprint.definition import Fingerprint


@dataclass(frozen=True, slots=True)
class Salvaged:
    """Metadata as far as it can be read.

    Args:
        catalog: all of it, or what makes sense; None if nothing does.
        problems: what is wrong with what was left out.
    """

    catalog: Catalog | None
    problems: tuple[CheckpointingException, ...] = ()


@dataclass(kw_only=True)
class Subject:
    """A checkpoint under examination.

    Args:
        path: the directory or file, after descending from a root.
        root: what the user pointed at.
        passed: directories that were descended through, from ``root`` on; () if ``root`` is the checkpoint.
        store: its files.
        format: the format it looks like, None if no format recognises it.
        level: how much is to be read.
        rules: the layout's table.
        iteration: as ``core.opening.open`` found it.
        findings: what has been found so far; checks that come later may look at it.
        threads, memory_bytes, progress, team: for reading data, see ``core.scan.run.scan``.
        plan_for: sizes to plan for, or None.
        against: fingerprints to compare with, or None.
        n_compared: tensors that were compared with them.
        device: on which per-byte work may be done; None for the CPU path.
        below: paths of checkpoints below that are no part of it; they are not looked at.
        notes: which checkpoint was taken, and what lies near it and is not looked at.
        has_folders: whether what lies in folders of its directory belongs to it.
        missing_chunks: what zarr chunks are that are not stored: ``fill`` or ``error``.
        shared: fingerprints that the ranks of a team have made together, before the checks run.

    Reading its metadata may fail: ``catalog`` is then None, and ``failure`` says why.
    """

    path: Path
    root: Path
    store: LocalStore
    format: Format | None
    level: Level
    rules: Rules
    iteration: int | None = None
    passed: tuple[Path, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    failure: CheckpointingException | None = None
    threads: int | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    progress: Progress | None = None
    plan_for: Request | None = None
    against: Against | None = None
    n_compared: int = 0
    team: Team = ALONE
    device: Device | None = None
    below: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    has_folders: bool = True
    missing_chunks: str = FILL
    shared: Mapping[str, Fingerprint] = field(default_factory=dict)

    @cached_property
    def recorded(self) -> Recorded | None:
        """What its manifest says; None if there is none."""
        return recorded(self.store.root, entry=self.store.entry)

    _uses: set[Use] = field(default_factory=set)
    _read: ReadPickles = field(default_factory=lambda: ReadPickles(()))

    @property
    def deep(self) -> Deep:
        """What reading every byte gave; at the deepest level only.

        Raises:
            CheckpointingException: see ``core.checks.subject.examined``; it is not tried again.
        """
        if isinstance(self._deep, CheckpointingException):
            raise self._deep
        return self._deep

    @cached_property
    def _deep(self) -> Deep | CheckpointingException:
        try:
            return examined(self)
        except CheckpointingException as err:
            return err

    @cached_property
    def tree(self) -> Tree:
        """What lies in the directory; of one file, only that.

        What is no checkpoint may be a whole file system, of which only the first levels are looked at. Checkpoints
        below are left out, save for those that the manifest lists.
        """
        manifest = None if self.recorded is None else self.recorded.manifest
        recorded_paths = [] if manifest is None else [f"{one.path}/" for one in manifest.files]
        others = {path for path in self.below if not any(name.startswith(f"{path}/") for name in recorded_paths)}
        depth = 0 if not self.has_folders else 1 if self.format is None else None
        return walked(self.store.root, entry=self.store.entry, depth=depth, without=others)

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Every regular file of the checkpoint with its size, by relative path; the one file, if it is one."""
        return self.tree.files

    @cached_property
    def other_pickles(self) -> Mapping[tuple[str, str | None], PickledContent]:
        """What Python would unpickle beside the checkpoint's own pickles, by file and tensor of bytes."""
        looked: dict[tuple[str, str | None], PickledContent] = {
            (name, None): look_into(self.store, name, size)
            for name, size in self.files.items()
            if size and not is_checkpoint_file(name) and name not in self.hollow
        }
        if self.catalog is not None:
            looked |= {(file, key): tensor for file, key, tensor in pickled_tensors(self.catalog, self.store)}
        return {place: item for place, item in looked.items() if item.uses or item.unread}

    @cached_property
    def hollow(self) -> Set[str]:
        """Large files of which the disk holds next to nothing: reading their zeros would take hours."""
        return hollow_files(self.store, self.files)

    @cached_property
    def catalog(self) -> Catalog | None:
        """The metadata: of a sample of the files at the lowest level, of all of them above; None if reading fails."""
        if self.format is None:
            return None
        is_sample = self.level == Level.METADATA and self.format.sample is not None
        with noting_uses() as uses, keeping_pickles(self._torch_files) as pickles:
            try:
                read = self.format.sample if is_sample and self.format.sample else self.format.read
                catalog = read(self.store)
                self._read = pickles
                return catalog
            except CheckpointingException as err:
                self.failure = self.failure or err
                return None
            finally:
                self._uses |= uses

    @property
    def uses(self) -> Set[Use]:
        """What the pickles that were read for the metadata do with names."""
        _ = self.catalog
        return self._uses

    @property
    def _torch_files(self) -> Set[str]:
        """Names of the files that ``torch.save`` may have written."""
        return {name for name in self.files if name == self.store.entry or name.endswith((*SUFFIXES, ".pkl"))}

    def read_pickles(self, file: str) -> Sequence[ReadPickle]:
        """Return the pickles of a file that were read for the metadata; () if they have to be read."""
        return () if self.catalog is None else self._read.of(file)

    def has_read_only(self, files: Set[str]) -> bool:
        """Return whether the checkpoint is one file, and no other pickles than those of these files were read for it.

        In a directory, objects may also be made of what stands in files that are no pickles, or that are like others.
        """
        return self.store.entry is not None and self.catalog is not None and self._read.are_all_of(files)

    @cached_property
    def salvaged(self) -> Salvaged:
        """The metadata, or what of it makes sense where reading it fails."""
        if self.catalog is not None or self.format is None or self.format.salvage is None:
            return Salvaged(self.catalog)
        problems: list[CheckpointingException] = []
        found: Catalog | None = None
        with noting_uses() as uses, suppress(CheckpointingException):
            found = self.format.salvage(self.store, problems.append)
        self._uses |= uses
        return Salvaged(found, tuple(problems))

    @cached_property
    def model(self) -> ModelView:
        """The model, where it has Megatron's names."""
        return model_view(self.salvaged.catalog, self.store, self.rules)

    @cached_property
    def tensor_names(self) -> TensorNames:
        """The names of the tensors at any bytes of its files."""
        return TensorNames(self.salvaged.catalog, self.store, self.rules)

    def is_explained(self, file: str | None, span: tuple[int, int] | None = None) -> bool:
        """Whether an error was found in a file, or in a part of it, so that what follows from it is not said again.

        Args:
            span: bytes; None for the whole file.
        """
        for finding in self.findings:
            if finding.severity == Severity.ERROR and finding.file == file:
                if span is None or finding.span is None or (finding.span[0] < span[1] and span[0] < finding.span[1]):
                    return True
        return False

    @cached_property
    def canonical(self) -> Canonical | None:
        """The tensors under global, per-layer names where the layout is known; None if the metadata cannot be read."""
        catalog = self.catalog
        if catalog is None or self.format is None:
            return None
        opened = Checkpoint(self.path, self.store, self.format, catalog, self.iteration)
        return canonical(opened, rules=self.rules)


_WATCHERS: tuple[str, ...] = (
    "content.values",
    "content.replicas",
    "metadata.hf_model",
    "content.manifests",
    "content.integrity_json",
    "content.fingerprints",
)
"""Modules of ``core.checks`` with a function ``watch(subject) -> Watch``."""


def examined(subject: Subject) -> Deep:
    """Scans a checkpoint for every module that watches; the ranks of a team together, and what is found is the lead's.

    Raises:
        CheckpointingException: a module cannot say what it wants to see.
        WorkerError: a rank of the team failed.
    """
    team = subject.team
    if subject.device is not None:
        subject.device = settled(
            subject.device, _device_works(subject), threads=subject.threads or len(os.sched_getaffinity(0))
        )
    watches = agreed(team, lambda: _watches(subject), lambda found: [*found], what=str(subject.path))
    catalog = subject.salvaged.catalog
    stored = () if catalog is None else (fragment.array for fragment in catalog.all_fragments())
    more = chain.from_iterable(watch.arrays for watch in watches.values())
    digests = any(watch.digests for watch in watches.values())
    scanned = scan(
        catalog,
        subject.store,
        [one for watch in watches.values() for one in watch.observers],
        files={name: size for name, size in subject.files.items() if name not in subject.hollow},
        file_observers=[one for watch in watches.values() for one in watch.file_observers],
        wanted=Wanted(
            array_digests=digests,
            file_digests=digests,
            digests_of=frozenset(chain.from_iterable(watch.digests_of for watch in watches.values())),
        ),
        stated_in=StatedSums(subject.store, None if subject.format is None else subject.format.name),
        arrays=(
            array
            for array in chain(stored, more)
            if array is not None and array.extent.file not in subject.hollow and fill_of(array) is None
        ),
        threads=subject.threads,
        memory_bytes=subject.memory_bytes,
        progress=subject.progress,
        team=team,
        device=subject.device,
    )
    return Deep(scanned, watches)


def _device_works(subject: Subject) -> tuple[str, ...]:
    """The kinds of work of the scan that a device may do."""
    return (VALUES,) if subject.against is None else (VALUES, FINGERPRINT)


def _watches(subject: Subject) -> dict[str, Watch]:
    return {name: import_module(f"core.checks.{name}").watch(subject) for name in _WATCHERS}
