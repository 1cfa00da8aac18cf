"""Prepare a conversion: decide what is written, and prove it, before a byte moves."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from core.catalog.catalog import Catalog
from core.catalog.facets import MegatronModel
from core.catalog.file_image import FileImage, literal_file
from core.catalog.files_beside import carried_of
from core.catalog.key_patterns import folded
from core.changes.tie import find_recorded_ties, keep_recordable_ties
from core.convert.apply_changes import config_beside
from core.convert.explain import LayoutLine, explain_layout
from core.convert.global_form import global_form, is_model_form
from core.convert.hard_links import link_data_files
from core.convert.job import Job as Job
from core.convert.job import Progress as Progress
from core.convert.job import Report as Report
from core.convert.job import TopologyChange as TopologyChange
from core.convert.nesting_notes import (
    attribute_tensors_left_out,
    flattening_notes,
    n_leaves,
    nesting_notes,
    recorded_notes,
    root_notes,
    sharing_notes,
)
from core.convert.options import is_cut
from core.convert.sizes import check_source_sizes, target_topology
from core.convert.target_form import cut_form, safe_form, with_objects_loaded
from core.convert.verify import check_memory
from core.errors import UnsupportedError, UsageError
from core.files.url import refuse_url
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG, config_of
from core.formats.registry import format_called, formats
from core.formats.torch.format import load_object
from core.megatron.extras.common_state import OPTIMIZER
from core.megatron.reshard.reshard import load_rules
from core.opening.objects import check_safety, loaded, state_dict
from core.opening.open import RELEASE, TRACKER, Checkpoint, open_checkpoint
from core.opening.source_files import listed_files, unread_files
from core.opening.target import keeps_nesting, tensors_only
from core.pickle.reader import gc_paused
from core.plan.plan import Plan, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job ready to run: everything is decided and proven, and no data has moved.

    Args:
        job: the conversion, as asked for.
        source: the opened source.
        target_format: the format of the destination.
        dst: where the result goes.
        images: the output files.
        plan: the proven work.
        renamed: (old key, new key) of each entry that ``rename`` changed.
        notes: what the user should know.
        dropped: entries of the source that the destination will not hold, with the reason.
        form: the source's global tensors under their final names, before they are cut for the
        destination.
        n_tensors: tensors of the destination, without those that it records by name only.
        links: (path, file of the source, bytes) of each hard link, with ``metadata_only``.
    """

    job: Job
    source: Checkpoint
    target_format: Format
    dst: Path
    images: tuple[FileImage, ...]
    plan: Plan
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    dropped: tuple[str, ...]
    form: Catalog
    n_tensors: int
    links: tuple[tuple[str, str, int], ...] = ()

    @property
    def is_file(self) -> bool:
        """Return whether the destination is one file."""
        return is_file_of(self.target_format, self.dst)

    @property
    def files(self) -> list[tuple[str, int]]:
        """Return the output files and their sizes in bytes."""
        return [
            *((path, size) for path, _, size in self.links),
            *((image.path, image.size) for image in self.images),
        ]

    def files_for_rank(self, rank: int) -> list[str]:
        """Return the source files that one rank of the destination needs.

        Args:
            rank: index of the rank among the destination's rank directories in their order; in a
                format without them, index of a file among those with tensors.

        Raises:
            UsageError: the destination has no such rank.
        """
        is_ranks = self.target_format.partition == "ranks"
        # Collect the arrays that each rank's files hold.
        arrays: dict[str, set[str]] = {}
        for image in self.images:
            if image.arrays:
                folder = image.path.rpartition("/")[0] if is_ranks else image.path
                arrays.setdefault(folder, set()).update(
                    placed.array.name for placed in image.arrays
                )
        if not 0 <= rank < len(arrays):
            unit = "rank directories" if is_ranks else "files with tensors"
            raise UsageError(
                f"no rank {rank}: the destination has {len(arrays)} {unit}",
                hint=f"ranks are numbered from 0 to {len(arrays) - 1}",
            )
        # Follow the plan from those arrays back to the source's files.
        wanted = list(arrays.values())[rank]
        files: set[str] = set()
        for key in iter(self.plan.keys()):
            work = self.plan.match(key)
            for n_piece, n_target, _ in work.pairs:
                target, piece = work.targets[n_target].array, work.pieces[n_piece][1].array
                if target is not None and target.name in wanted and piece is not None:
                    files.add(piece.extent.file)
        return sorted(files)

    def explain_layout(self) -> list[LayoutLine]:
        """Return which layout rule each tensor follows.

        Raises:
            UsageError: the destination is not cut by a parallel layout.
        """
        if self.form.facet(MegatronModel) is None or not is_cut(self.target_format):
            raise UsageError(
                f"--explain: this conversion to {self.target_format.name} uses no layout rules",
                hint="use it when writing megatron or torch_dist, for example ckpt reshard SRC --tp-new 4 --explain",
            )
        topology = target_topology(self.job, self.form, self.target_format)
        return explain_layout(
            self.form,
            topology,
            load_rules(self.job.rules, unknown=self.job.unknown),
            vocab_size=self.job.vocab_size,
        )

    def as_dict(self) -> dict[str, object]:
        """Return the plan as a JSON object."""
        return {
            "src": str(self.source.path),
            "source_format": self.source.format.name,
            "dst": str(self.dst),
            "target_format": self.target_format.name,
            "n_tensors": self.n_tensors,
            "read_bytes": self.plan.read_bytes,
            "least_read_bytes": self.plan.least_read_bytes,
            "write_bytes": self.plan.file_bytes,
            "memory_bytes": self.plan.memory_bytes,
            "n_fragments": self.plan.n_fragments,
            "files": [{"path": path, "bytes": size} for path, size in self.files],
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "notes": list(self.notes),
            "dropped": list(self.dropped),
        }


@contextmanager
def prepare(job: Job) -> Iterator[Prepared]:
    """Open the source, decide and prove everything, and close the source after the block.

    Raises:
        CheckpointingException: the job cannot be done; nothing has been written.
    """
    for path in (job.src, job.dst, job.config, job.rules):
        if path is not None:
            refuse_url(path)
    source = open_checkpoint(job.src, iteration=job.iteration, missing_chunks=job.missing_chunks)
    try:
        with gc_paused():
            with _naming_file(source):
                prepared = _prepare(job, source)
            gc.freeze()  # or the collector traverses all of it as soon as the copy makes objects
        yield prepared
    finally:
        gc.unfreeze()
        source.store.close()


@contextmanager
def _naming_file(source: Checkpoint) -> Iterator[None]:
    """Add the file's name to errors about an entry of a source that is one file."""
    try:
        yield
    except UnsupportedError as err:
        if err.key is not None and source.store.entry is not None:
            err.file = err.file or source.store.label
        raise


def _prepare(job: Job, source: Checkpoint) -> Prepared:
    """Decide what is written, lay out the files, and make the plan that proves it.

    Raises:
        CheckpointingException: the job cannot be done.
    """
    opened = source
    format = _writable_format(job, source)
    assert format.lay_out is not None
    source = with_objects_loaded(source, exclude=job.exclude)
    if job.metadata_only:
        return _prepare_links(job, opened, format)
    if job.replicas != "error" and job.tie:
        raise UsageError(
            "--tie needs all copies compared, and --on-replica-mismatch first does not compare them",
            hint="use only one of them",
        )

    # Bring the source under its final names, and cut it for the destination.
    form = safe_form(job, source, format)
    dst = job.dst or _proposed_dst(job, source, format)
    is_file = is_file_of(format, dst)
    catalog, target = cut_form(
        job, _with_recordable_ties(form.catalog, source, format, is_file=is_file), format
    )
    lost = _nesting_lost(form.catalog, format, is_file=is_file)
    notes = [*source.notes, *form.notes, *lost]
    notes += [note for note in target.notes if note not in notes]
    notes += [] if format.notes_of is None else format.notes_of(target)
    dropped = [*form.dropped, *_dropped_entries(form.catalog, format, is_file=is_file)]
    dropped += [text for text in target.dropped if text not in dropped]

    # Lay out the output files.
    if is_file and not format.nests:
        target = tensors_only(target)
    write = replace(
        target.write,
        max_file_bytes=job.max_file_bytes,
        is_file=is_file,
        is_release=source.is_release,
    )
    target = replace(target, write=write)
    images = tuple(format.lay_out(target))
    if format.is_mcore:
        images = _in_training_root(images, RELEASE if source.is_release else target.iteration)
    if is_file:
        images = (replace(images[0], path=dst.name),)
    ties = find_recorded_ties(target, images) if format.records_ties else {}
    notes += recorded_notes(ties)

    # Prove that every byte of the files has a source.
    plan = make_plan(
        catalog,
        target,
        images,
        threads=job.threads,
        memory_bytes=job.memory_bytes,
        beside_bytes=job.beside_bytes,
        compares=job.replicas == "error",
    )
    if plan.n_ignored:
        notes.append(
            f"{plan.n_ignored:,} copies of tensors on other ranks are not compared: the first copy is used"
        )
    if job.verify:
        check_memory(plan, job.memory_bytes)
    return Prepared(
        job=job,
        source=source,
        target_format=format,
        dst=dst,
        images=images,
        plan=plan,
        renamed=form.renamed,
        notes=tuple(folded(notes, end=": ")),
        dropped=tuple(folded(dropped, end=" (")),
        form=form.catalog,
        n_tensors=(n_leaves(target.skeleton) if format.nests else len(target.tensors)) - len(ties),
    )


def _writable_format(job: Job, source: Checkpoint) -> Format:
    """Return the format of the destination.

    Raises:
        UnsupportedError: it cannot be written.
    """
    format = source.format if job.to is None else format_called(job.to)
    if format.lay_out is None:
        names = ", ".join(writable.name for writable in formats() if writable.lay_out is not None)
        raise UnsupportedError(
            f"{format.name} is read-only", hint=f"choose a format to write with --to: {names}"
        )
    return format


def _with_recordable_ties(
    catalog: Catalog, source: Checkpoint, format: Format, *, is_file: bool
) -> Catalog:
    """Return the catalog with only those ties that the destination's format records."""
    if not format.records_ties or not catalog.aliases:
        return catalog
    config = config_of(source.store) if CONFIG in carried_of(catalog) else None
    has_config = format.carries_files and not is_file
    return keep_recordable_ties(catalog, config_beside(catalog, config) if has_config else None)


def _prepare_links(job: Job, source: Checkpoint, format: Format) -> Prepared:
    """Prepare a destination whose data files are hard links to the source's."""
    linked = link_data_files(job, source)
    if job.topology is not None:
        _check_loads_at(job, source, format)
    check_safety(
        loaded(linked.catalog, source.store, load_object), keeps_unknown=True, drop_unknown=False
    )
    images = linked.images
    paths = {name: name for name in linked.files}
    if format.is_mcore:
        iteration = RELEASE if source.is_release else source.iteration
        images = _in_training_root(images, iteration)
        paths = {name: _iteration_path(name, iteration) for name in linked.files}
    links = tuple((path, name, source.store.size(name)) for name, path in paths.items())
    # The plan has no tensors: it only writes the new metadata.
    empty = replace(linked.catalog, tensors={}, hidden={}, objects={})
    unread = unread_files(source, linked=linked.files)
    return Prepared(
        job=job,
        source=source,
        target_format=format,
        dst=job.dst or _proposed_dst(job, source, format),
        images=images,
        plan=make_plan(
            empty,
            empty.as_target(format=empty.format, fragments_of=lambda key: ()),
            images,
            threads=job.threads,
            memory_bytes=job.memory_bytes,
        ),
        renamed=(),
        notes=(
            *source.notes,
            *linked.notes,
            f"{len(links)} files are hard links to the source's; no data was copied",
        ),
        dropped=(listed_files(unread),) if unread else (),
        form=linked.catalog,
        n_tensors=len(linked.catalog.tensors),
        links=links,
    )


def _check_loads_at(job: Job, source: Checkpoint, format: Format) -> None:
    """Raise unless the model can be cut to the sizes that are asked for.

    The layout is planned, but not written.

    Raises:
        CheckpointingException: the layout cannot be planned, for the reasons that writing it would
        give.
    """
    check_source_sizes(job, source.catalog)
    if job.topology is not None and job.topology.is_change:
        planned = replace(job, metadata_only=False)
        cut_form(planned, global_form(planned, source, format).catalog, format)


def is_file_of(format: Format, dst: Path) -> bool:
    """Return whether the destination is one file rather than a directory."""
    if not format.is_single_file:
        return False
    return dst.suffix in format.suffixes if format.suffixes else dst.suffix != ""


def _nesting_lost(catalog: Catalog, format: Format, *, is_file: bool) -> list[str]:
    """Return notes on containers around tensors that the destination does not keep."""
    if is_model_form(catalog):
        return []
    sharing = sharing_notes(catalog, keeps_ties=format.nests or format.records_ties)
    if format.nests or (not is_file and keeps_nesting(catalog, format)):
        return sharing
    if format.is_mcore or format.has_objects_beside:
        return [*flattening_notes(catalog, has_common=format.is_mcore), *sharing]
    return [*root_notes(catalog), *nesting_notes(state_dict(catalog)), *sharing]


def _dropped_entries(catalog: Catalog, format: Format, *, is_file: bool) -> list[str]:
    """Return a line for each entry that the destination cannot store.

    Entries with the same first part of their names share a line.
    """
    lines = []
    has_own_nesting = format.nests or (not is_file and keeps_nesting(catalog, format))
    if not is_model_form(catalog) and not has_own_nesting:
        lines += attribute_tensors_left_out(catalog)
    files = [*carried_of(catalog), *catalog.documents]
    if files and (is_file or not format.carries_files):
        lines.append(f"files beside the weights: {', '.join(files)}")
    if format.keeps_objects and (format.nests or not is_file):
        return lines
    groups: dict[str, list[str]] = {}
    optimizer = [OPTIMIZER] if catalog.optimizer is not None else []
    for key in dict.fromkeys((*catalog.objects, *map(str, catalog.common or {}), *optimizer)):
        groups.setdefault(key.partition(".")[0], []).append(key)
    for name, keys in groups.items():
        label = keys[0] if len(keys) == 1 else f"{name}.… ({len(keys)} entries)"
        lines.append(f"{label}: not a tensor, so {format.title} cannot store it")
    return lines


def _in_training_root(images: tuple[FileImage, ...], iteration: object) -> tuple[FileImage, ...]:
    """Return the images in a training root with its tracker file, as Megatron loads it.

    Without an iteration the images are returned unchanged.
    """
    if type(iteration) is not int and iteration != RELEASE:
        return images
    moved = tuple(replace(image, path=_iteration_path(image.path, iteration)) for image in images)
    return (*moved, literal_file(TRACKER, str(iteration).encode("ascii"), is_metadata=True))


def _iteration_path(path: str, iteration: object) -> str:
    """Return the path of a file in a training root; unchanged without an iteration."""
    if iteration == RELEASE:
        return f"{RELEASE}/{path}"
    return f"iter_{iteration:07d}/{path}" if type(iteration) is int else path


_SUFFIXES = {"torch": ".pt"}


def _proposed_dst(job: Job, source: Checkpoint, format: Format) -> Path:
    """Return a destination named after the source, in the source's directory.

    The name is ``SRC-tp4-pp1`` (with ``-ep2`` and the like where given) for another layout, else
    ``SRC.FORMAT``.
    """
    src = Path(os.path.abspath(job.src))
    stem = src.name.removesuffix(src.suffix) if source.store.entry else src.name
    if job.topology is not None and job.keeps_layout:
        topology = target_topology(job, source.catalog, format)
        name = f"{stem}-tp{topology.tp}-pp{topology.pp}"
        name += "".join(
            f"-{size}{n}"
            for size in ("vpp", "ep", "etp")
            if (n := getattr(job.topology, size)) is not None
        )
        path = src.parent / (name if job.to is None else f"{name}.{format.name}")
    else:
        path = src.parent / (stem + _SUFFIXES.get(format.name, f".{format.name}"))
    return path if job.src.is_absolute() else Path(os.path.relpath(path))
