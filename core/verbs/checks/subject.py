"""The checkpoint under examination, which may be damaged and is opened as far as possible."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.team.protocol import ALONE, Team
from core.errors import CheckpointingException
from core.files.source_store import SourceStore
from core.files.syscalls import allowed_cores, default_memory_bytes
from core.files.walk import FileEnds, Tree, read_ends, sparse_files
from core.formats.format import Format
from core.formats.torch.stream import SUFFIXES
from core.opening.open import FILL
from core.pickle.noted import ReadPickle, ReadPickles, keeping_pickles, noting_uses
from core.pickle.uses import Use
from core.progress import OnProgress, Phase, report_bytes
from core.values import dataclass
from core.verbs.checks.check import Finding, Level, Severity

if TYPE_CHECKING:
    from core.engine.device.device import Device
    from core.engine.fingerprint.definition import Fingerprint
    from core.files.stated.checksum import StatedChecksums
    from core.formats.torch.other_pickles import PickledContent
    from core.megatron.rules.rules import Rules
    from core.opening.canonical import Canonical
    from core.publish.manifest.lookup import RecordedManifest
    from core.verbs.checks.comparison import ReferenceFingerprints
    from core.verbs.checks.model_view import ModelView
    from core.verbs.checks.plan_request import PlanRequest
    from core.verbs.checks.tensor_names import TensorNames
    from core.verbs.checks.watch import ByteScan


DATA = re.compile(
    r"\.(pt|pth|bin|ckpt|pkl|safetensors|distcp|npy|json)$"
    r"|(^|/)(\.metadata|\.zarray|\.zgroup|manifest\.ocdbt)$"
)
"""Names of files that have a header or an end record, and are never empty."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """The readable part of the metadata.

    Args:
        catalog: the readable part; None if nothing can be read.
        problems: errors about the omitted entries.
    """

    catalog: Catalog | None
    problems: tuple[CheckpointingException, ...] = ()


@dataclass(kw_only=True)
class Subject:
    """A checkpoint under examination.

    Args:
        path: directory or file of the checkpoint: ``root``, or a checkpoint below it.
        root: the path that the user gave.
        passed: directories between ``root`` and ``path``, ``root`` included; () if they are the
            same.
        store: files of the checkpoint.
        format: the detected format; None if no format recognises the checkpoint.
        level: amount of data to read.
        own_rules: layout rules with the user's additions; None for those of the table alone.
        iteration: the iteration that ``core.opening.open`` chose.
        findings: findings so far; later checks consult them to avoid repetitions.
        threads, memory_bytes, team: for reading data, as in ``core.engine.scan.run.scan``.
        progress: called with the phase and its amounts on this rank.
        plan_for: sizes and format to plan for; None if not requested.
        against: fingerprints to compare with; None if not requested.
        n_compared: number of tensors compared with ``against``.
        device: accelerator for per-byte work; None for the CPU.
        below: relative paths of nested checkpoints that are not part of this one and are skipped.
        notes: notes on the choice of the checkpoint, and on skipped files and checkpoints near it.
        has_folders: subfolders of the directory belong to the checkpoint.
        missing_chunks: treatment of absent zarr chunks: ``fill`` or ``error``.
        shared: fingerprints that a team of ranks computed before the checks run.

    If reading the metadata fails, ``catalog`` is None and ``failure`` holds the error.
    """

    path: Path
    root: Path
    store: SourceStore
    format: Format | None
    level: Level
    own_rules: Rules | None = None
    iteration: int | None = None
    passed: tuple[Path, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    failure: CheckpointingException | None = None
    threads: int | None = None
    memory_bytes: int = field(default_factory=default_memory_bytes)
    progress: OnProgress | None = None
    plan_for: PlanRequest | None = None
    against: ReferenceFingerprints | None = None
    n_compared: int = 0
    team: Team = ALONE
    device: Device | None = None
    below: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    has_folders: bool = True
    missing_chunks: str = FILL
    shared: Mapping[str, Fingerprint] = field(default_factory=dict)

    @property
    def format_name(self) -> str | None:
        """Name of the format; None if no format recognises the checkpoint."""
        return None if self.format is None else self.format.name

    @property
    def rules(self) -> Rules:
        """The layout rules; reading their table takes longer than checking a small checkpoint."""
        if self.own_rules is not None:
            return self.own_rules
        from core.megatron.rules.tables import load_rules

        return load_rules(None)

    @cached_property
    def recorded(self) -> RecordedManifest | None:
        """The manifest of the checkpoint, or the error of reading it; None if there is none."""
        from core.publish.manifest.lookup import find_manifest

        return find_manifest(self.store.root, entry=self.store.entry)

    @property
    def has_stated(self) -> bool:
        """True if the files are in an object store, which may state checksums of them."""
        if not self.store.is_remote:
            return False
        from core.files.object_listing import is_listed
        from core.files.remote_store import RemoteStore

        return isinstance(self.store, RemoteStore) and is_listed(self.store.root)

    @cached_property
    def stated(self) -> StatedChecksums:
        """The checksums that an object store states, of the files for which the level needs them.

        At the deepest level, of all files; below, of those that the manifest has CRCs of.
        """
        from core.files.stated.checksum import StatedChecksums

        if not self.store.is_remote:
            return StatedChecksums()
        from core.files.remote_store import RemoteStore
        from core.files.stated.lookup import look_up_checksums

        if not isinstance(self.store, RemoteStore):
            return StatedChecksums()
        if self.level == Level.DEEP:
            return look_up_checksums(self.store, self.files)
        manifest = None if self.recorded is None else self.recorded.manifest
        recorded = () if manifest is None else manifest.files
        names = [file.path for file in recorded if file.crc and file.path in self.files]
        return look_up_checksums(self.store, names, needed="CRC-32")

    _uses: set[Use] = field(default_factory=set)
    _read: ReadPickles = field(default_factory=lambda: ReadPickles(()))

    @property
    def byte_scan(self) -> ByteScan:
        """The result of reading every byte, for checks of the deepest level.

        Raises:
            CheckpointingException: the scan failed; it is not run again.
        """
        if isinstance(self._byte_scan, CheckpointingException):
            raise self._byte_scan
        return self._byte_scan

    @cached_property
    def _byte_scan(self) -> ByteScan | CheckpointingException:
        try:
            return run_byte_scan(self)
        except CheckpointingException as err:
            return err

    @cached_property
    def tree(self) -> Tree:
        """Files and folders of the checkpoint.

        Nested checkpoints are excluded unless the manifest lists them. A directory that is not a
        checkpoint may be a complete file system, so only its first level is walked.
        """
        from core.opening.source_files import list_files

        manifest = None if self.recorded is None else self.recorded.manifest
        recorded_paths = [] if manifest is None else [f"{file.path}/" for file in manifest.files]
        nested = {
            path
            for path in self.below
            if not any(name.startswith(f"{path}/") for name in recorded_paths)
        }
        depth = 0 if not self.has_folders else 1 if self.format is None else None
        return list_files(self.store, self.format, below=nested, depth=depth)

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Sizes in bytes of all regular files of the checkpoint, by relative path."""
        return self.tree.files

    @cached_property
    def ends(self) -> FileEnds:
        """Both ends of every file; in an object store, of the files whose names say what they are.

        There, each takes a request, and of the other files only the lengths count.
        """
        is_partial = self.format is None or self.store.is_remote
        names = {name: size for name, size in self.files.items() if DATA.search(name)}
        return read_ends(self.store, names if is_partial else self.files)

    @cached_property
    def other_pickles(self) -> Mapping[tuple[str, str | None], PickledContent]:
        """Pickles outside the checkpoint format, by (file, tensor of bytes or None)."""
        from core.formats.torch.other_pickles import is_checkpoint_file, look_into
        from core.opening.pickled_tensors import pickled_tensors

        pickles: dict[tuple[str, str | None], PickledContent] = {
            (name, None): look_into(self.store, name, size)
            for name, size in self.files.items()
            if size and not is_checkpoint_file(name) and name not in self.hollow
        }
        if self.catalog is not None:
            pickles |= {
                (file, key): tensor
                for file, key, tensor in pickled_tensors(self.catalog, self.store)
            }
        return {place: item for place, item in pickles.items() if item.uses or item.unread}

    @cached_property
    def hollow(self) -> Set[str]:
        """Names of large sparse files, which are skipped: reading their zeros would take hours."""
        return sparse_files(self.store, self.files)

    @cached_property
    def catalog(self) -> Catalog | None:
        """The metadata; None if it cannot be read, and ``failure`` holds the error.

        At the lowest level, formats that can do so read only a sample of the files.
        """
        from core.opening.config_beside import with_description

        if self.format is None:
            return None
        is_sample = self.level == Level.METADATA and self.format.sample is not None
        with noting_uses() as uses, keeping_pickles(self._torch_files) as pickles:
            try:
                read = self.format.sample if is_sample and self.format.sample else self.format.read
                catalog = with_description(read(self.store), self.path, iteration=self.iteration)
                self._read = pickles
                return catalog
            except CheckpointingException as err:
                self.failure = self.failure or err
                return None
            finally:
                self._uses |= uses

    @property
    def n_unopened(self) -> int:
        """Number of ranks whose files were assumed to have the content of other ranks' files."""
        ranks = None if self.catalog is None else self.catalog.facet(RankFacts)
        return 0 if ranks is None else ranks.n_unopened

    @property
    def uses(self) -> Set[Use]:
        """Uses of imported names in the pickles of the metadata."""
        _ = self.catalog  # reading it collects the uses
        return self._uses

    @property
    def _torch_files(self) -> Set[str]:
        """Names of the files that ``torch.save`` may have written."""
        return {
            name
            for name in self.files
            if name == self.store.entry or name.endswith((*SUFFIXES, ".pkl"))
        }

    def read_pickles(self, file: str) -> Sequence[ReadPickle]:
        """Return the pickles of a file that were kept when the metadata was read.

        Returns:
            () if none were kept, so that the file has to be read.
        """
        return () if self.catalog is None else self._read.of(file)

    def has_read_only(self, files: Set[str]) -> bool:
        """Return whether the metadata was read from the pickles of these files only.

        Always false for a directory: there, objects may also come from files that are not pickles,
        or from one file that represents similar ones.
        """
        return (
            self.store.entry is not None
            and self.catalog is not None
            and self._read.are_all_of(files)
        )

    @cached_property
    def salvaged(self) -> Salvaged:
        """The metadata, or its usable part if it cannot be read completely."""
        if self.catalog is not None or self.format is None or self.format.salvage is None:
            return Salvaged(self.catalog)
        problems: list[CheckpointingException] = []
        catalog: Catalog | None = None
        with noting_uses() as uses, suppress(CheckpointingException):
            catalog = self.format.salvage(self.store, problems.append)
        self._uses |= uses
        return Salvaged(catalog, tuple(problems))

    @cached_property
    def model(self) -> ModelView:
        """The Megatron model; empty if the tensors do not have Megatron's names."""
        from core.verbs.checks.model_view import model_view

        return model_view(
            self.salvaged.catalog,
            self.store,
            self.own_rules,
            is_quick=self.level == Level.METADATA,
        )

    @cached_property
    def tensor_names(self) -> TensorNames:
        """Index from byte ranges of the files to tensor names."""
        from core.verbs.checks.tensor_names import TensorNames

        return TensorNames(self.salvaged.catalog, self.store, self.rules)

    def is_covered_by_finding(self, file: str | None, span: tuple[int, int] | None = None) -> bool:
        """Return whether an earlier error finding is about a file or a part of it.

        Args:
            span: byte range (start, stop); None for the complete file.
        """
        spans = [
            finding.span
            for finding in self.findings
            if finding.severity == Severity.ERROR and finding.file == file
        ]
        if span is None:
            return bool(spans)
        # A finding without a span is about the complete file.
        return any(other is None or (other[0] < span[1] and span[0] < other[1]) for other in spans)

    @cached_property
    def canonical(self) -> Canonical | None:
        """The canonical form: global per-layer names if the layout is known.

        None if the metadata cannot be read.
        """
        from core.opening.canonical import canonical
        from core.opening.open import Checkpoint

        catalog = self.catalog
        if catalog is None or self.format is None:
            return None
        opened = Checkpoint(self.path, self.store, self.format, catalog, self.iteration)
        return canonical(opened, rules=self.own_rules)


_WATCHERS: tuple[str, ...] = (
    "content.values",
    "content.replicas",
    "metadata.hf_model",
    "content.manifests",
    "content.store_checksums",
    "content.integrity_json",
    "content.fingerprints",
)
"""Modules of ``core.verbs.checks`` that need the scan, each with a function
``watch(subject) -> Watch``.
"""


def run_byte_scan(subject: Subject) -> ByteScan:
    """Read every byte of a checkpoint once, for all check modules that take part in the scan.

    The ranks of a team share the work; the lead gets the results.

    Raises:
        CheckpointingException: a module cannot determine its needs.
        WorkerError: a rank of the team failed, or the ranks see different data.
    """
    from core.engine.device.device import FINGERPRINT, VALUES
    from core.engine.scan.run import scan
    from core.engine.scan.sums import WantedSums
    from core.engine.team.agreement import require_agreement
    from core.formats.zarr.fill import fill_of
    from core.publish.manifest.stated_crcs import StatedCrcReader
    from core.verbs.checks.watch import ByteScan, combine_watches

    team = subject.team
    subject.store.on_open = None  # from here on bytes are counted, not files
    # Measure for which kinds of work the device is faster than the CPU.
    if subject.device is not None:
        from core.engine.calibration.choice import choose_device

        subject.device = choose_device(
            subject.device,
            (VALUES,) if subject.against is None else (VALUES, FINGERPRINT),
            threads=subject.threads or len(allowed_cores()),
        )
    # Every rank collects the needs of the modules itself; ranks that see other data are an error.
    watches = require_agreement(
        team,
        lambda: {
            name: import_module(f"core.verbs.checks.{name}").watch(subject) for name in _WATCHERS
        },
        lambda watch_of: ([*watch_of], subject.stated.by_name),
        subject=str(subject.path),
    )
    needs = combine_watches(watches.values())
    # Read the arrays of the catalog and those that modules add. Sparse files are skipped; chunks
    # that are not stored (``fill_of``) have no bytes.
    catalog = subject.salvaged.catalog
    stored = () if catalog is None else (fragment.array for fragment in catalog.all_fragments())
    scanned = scan(
        catalog,
        subject.store,
        needs.observers,
        files={name: size for name, size in subject.files.items() if name not in subject.hollow},
        file_observers=needs.file_observers,
        wanted=WantedSums(
            array_digests=needs.digests, file_digests=needs.digests, digests_of=needs.digests_of
        ),
        stated_in=StatedCrcReader(subject.store, subject.format_name),
        arrays=(
            array
            for array in chain(stored, needs.arrays)
            if array is not None
            and array.extent.file not in subject.hollow
            and fill_of(array) is None
        ),
        threads=subject.threads,
        memory_bytes=subject.memory_bytes,
        progress=report_bytes(subject.progress, Phase.CHECKING),
        team=team,
        device=subject.device,
    )
    return ByteScan(scanned, watches)
