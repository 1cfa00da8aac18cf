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
from core.changes.tie import recordable, recorded
from core.convert.apply_changes import config_beside
from core.convert.explain import Explained, explained
from core.convert.global_form import global_form, is_model_form
from core.convert.hard_links import linked
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
from core.convert.target_form import cut_form, vetted_form, with_objects_loaded
from core.convert.verify import check_memory
from core.errors import UnsupportedError, UsageError
from core.files.url import refuse_url
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG, config_of
from core.formats.registry import format_called, formats
from core.formats.torch.format import load_object
from core.megatron.extras.common_state import OPTIMIZER
from core.megatron.reshard.reshard import load_rules
from core.opening.objects import loaded, state_dict, vetted
from core.opening.open import RELEASE, TRACKER, Checkpoint, open_checkpoint
from core.opening.source_files import listed_files, unread_files
from core.opening.target import keeps_nesting, tensors_only
from core.pickle.reader import gc_paused
from core.plan.plan import Plan, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job ready to run: everything is decided and proven, no data has moved.

    Args:
        job: what was asked for.
        source: the opened source.
        target_format: the format of the destination.
        dst: where the result goes.
        images: the output files.
        plan: the proven work.
        renamed: (old key, new key) of what ``rename`` changed.
        notes: what the user should know.
        dropped: entries of the source that the destination will not hold, with the reason.
        form: the source's global tensors under their final names, before they are cut for the destination.
        n_tensors: tensors of the destination, without those of which it has the names only.
        links: (path, file of the source, bytes) of what is a hard link, with ``metadata_only``.
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
        """Whether the destination is one file."""
        return is_file_of(self.target_format, self.dst)

    @property
    def files(self) -> list[tuple[str, int]]:
        """Output files and their sizes in bytes."""
        return [*((path, size) for path, _, size in self.links), *((image.path, image.size) for image in self.images)]

    def files_for_rank(self, rank: int) -> list[str]:
        """Source files that one rank of the destination needs.

        Args:
            rank: its index among the rank directories of the destination in their order; where there are none, a
                file's among those with tensors.

        Raises:
            UsageError: there is no such rank.
        """
        is_ranks = self.target_format.partition == "ranks"
        arrays: dict[str, set[str]] = {}
        for image in self.images:
            if image.arrays:
                place = image.path.rpartition("/")[0] if is_ranks else image.path
                arrays.setdefault(place, set()).update(placed.array.name for placed in image.arrays)
        if not 0 <= rank < len(arrays):
            what = "rank directories" if is_ranks else "files with tensors"
            raise UsageError(
                f"there is no rank {rank}: the destination has {len(arrays)} {what}",
                hint=f"they count from 0 to {len(arrays) - 1}",
            )
        wanted = list(arrays.values())[rank]
        found: set[str] = set()
        for key in iter(self.plan.keys()):
            work = self.plan.match(key)
            for n_piece, n_target, _ in work.pairs:
                target, piece = work.targets[n_target].array, work.pieces[n_piece][1].array
                if target is not None and target.name in wanted and piece is not None:
                    found.add(piece.extent.file)
        return sorted(found)

    def explained(self) -> list[Explained]:
        """Which rule each tensor follows.

        Raises:
            UsageError: the destination is not cut by a parallel layout.
        """
        if self.form.facet(MegatronModel) is None or not is_cut(self.target_format):
            raise UsageError(
                f"--explain: no layout rules are used: {self.target_format.name} is not cut by a layout here",
                hint="ask it of a conversion to megatron or torch_dist, such as ckpt reshard SRC --tp-new 4 --explain",
            )
        topology = target_topology(self.job, self.form, self.target_format)
        return explained(
            self.form, topology, load_rules(self.job.rules, unknown=self.job.unknown), vocab_size=self.job.vocab_size
        )

    def as_dict(self) -> dict[str, object]:
        """The plan as a JSON object."""
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
    """Opens the source, decides and proves everything; the source is closed at the end of the block.

    Raises:
        CheckpointingException: any kind; nothing has been written.
    """
    for path in (job.src, job.dst, job.config, job.rules):
        if path is not None:
            refuse_url(path)
    source = open_checkpoint(job.src, iteration=job.iteration, missing_chunks=job.missing_chunks)
    try:
        with gc_paused():
            with _naming_file(source):
                prepared = _prepared(job, source)
            gc.freeze()  # or the collector looks at all of it as soon as the copy makes objects
        yield prepared
    finally:
        gc.unfreeze()
        source.store.close()


@contextmanager
def _naming_file(source: Checkpoint) -> Iterator[None]:
    """Name the file in errors about an entry of a source that is one file."""
    try:
        yield
    except UnsupportedError as err:
        if err.key is not None and source.store.entry is not None:
            err.file = err.file or source.store.label
        raise


def _prepared(job: Job, source: Checkpoint) -> Prepared:
    format = source.format if job.to is None else format_called(job.to)
    opened = source
    if format.lay_out is None:
        raise UnsupportedError(
            f"format {format.name} can be read, but not written",
            hint=f"say --to with one of: {', '.join(known.name for known in formats() if known.lay_out is not None)}",
        )
    source = with_objects_loaded(source, exclude=job.exclude)
    if job.metadata_only:
        return _linked(job, opened, format)
    if job.replicas != "error" and job.tie:
        raise UsageError(
            "--tie proves that two tensors are equal, which --on-replica-mismatch first does not do", hint="give one"
        )
    form = vetted_form(job, source, format)
    notes, dropped = [*source.notes, *form.notes], [*form.dropped]
    catalog = form.catalog
    dst = job.dst or _proposed_dst(job, source, format)
    is_file = is_file_of(format, dst)
    notes += _nesting_lost(catalog, format, is_file=is_file)
    dropped += _left_behind(catalog, format, is_file=is_file)
    if format.records_ties and catalog.aliases:
        stated = config_of(source.store) if CONFIG in carried_of(catalog) else None
        has_config = format.carries_files and not is_file
        catalog = recordable(catalog, config_beside(catalog, stated) if has_config else None)
    catalog, target = cut_form(job, catalog, format)
    notes += [note for note in target.notes if note not in notes]
    notes += [] if format.notes_of is None else format.notes_of(target)
    dropped += [text for text in target.dropped if text not in dropped]
    if is_file and not format.nests:
        target = tensors_only(target)
    write = replace(target.write, max_file_bytes=job.max_file_bytes, is_file=is_file, is_release=source.is_release)
    target = replace(target, write=write)
    images = tuple(format.lay_out(target))
    if format.is_mcore:
        images = _as_root(images, RELEASE if source.is_release else target.iteration)
    if is_file:
        images = (replace(images[0], path=dst.name),)
    ties = recorded(target, images) if format.records_ties else {}
    notes += recorded_notes(ties)
    compares = job.replicas == "error"
    plan = make_plan(
        catalog,
        target,
        images,
        threads=job.threads,
        memory_bytes=job.memory_bytes,
        beside_bytes=job.beside_bytes,
        compares=compares,
    )
    if plan.n_ignored:
        notes.append(f"{plan.n_ignored:,} copies of tensors on other ranks are not compared: the first is taken")
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


def _linked(job: Job, source: Checkpoint, format: Format) -> Prepared:
    """A destination whose data files are the source's."""
    made = linked(job, source)
    if job.topology is not None:
        _check_loads_at(job, source, format)
    vetted(loaded(made.catalog, source.store, load_object), keeps_unknown=True, drop_unknown=False)
    images = made.images
    paths = {name: name for name in made.files}
    if format.is_mcore:
        iteration = RELEASE if source.is_release else source.iteration
        images = _as_root(images, iteration)
        paths = {name: _in_root(name, iteration) for name in made.files}
    links = tuple((path, name, source.store.size(name)) for name, path in paths.items())
    nothing = replace(made.catalog, tensors={}, hidden={}, objects={})
    unread = unread_files(source, linked=made.files)
    return Prepared(
        job=job,
        source=source,
        target_format=format,
        dst=job.dst or _proposed_dst(job, source, format),
        images=images,
        plan=make_plan(
            nothing,
            nothing.as_target(format=nothing.format, fragments_of=lambda key: ()),
            images,
            threads=job.threads,
            memory_bytes=job.memory_bytes,
        ),
        renamed=(),
        notes=(*source.notes, *made.notes, f"{len(links)} files are hard links to the source's; no byte was copied"),
        dropped=(listed_files(unread),) if unread else (),
        form=made.catalog,
        n_tensors=len(made.catalog.tensors),
        links=links,
    )


def _check_loads_at(job: Job, source: Checkpoint, format: Format) -> None:
    """Links load at the sizes that are asked for, if the model can be cut so: the layout is planned, and not written.

    Raises:
        CheckpointingException: those of writing it.
    """
    check_source_sizes(job, source.catalog)
    if job.topology is not None and job.topology.is_change:
        planned = replace(job, metadata_only=False)
        cut_form(planned, global_form(planned, source, format).catalog, format)


def is_file_of(format: Format, dst: Path) -> bool:
    """Whether the destination is one file, and no directory."""
    if not format.is_single_file:
        return False
    return dst.suffix in format.suffixes if format.suffixes else dst.suffix != ""


def _nesting_lost(catalog: Catalog, format: Format, *, is_file: bool) -> list[str]:
    """What becomes of containers around tensors, where the destination has them otherwise."""
    if is_model_form(catalog):
        return []
    sharing = sharing_notes(catalog, keeps_ties=format.nests or format.records_ties)
    if format.nests or (not is_file and keeps_nesting(catalog, format)):
        return sharing
    if format.is_mcore or format.has_objects_beside:
        return [*flattening_notes(catalog, has_common=format.is_mcore), *sharing]
    return [*root_notes(catalog), *nesting_notes(state_dict(catalog)), *sharing]


def _left_behind(catalog: Catalog, format: Format, *, is_file: bool) -> list[str]:
    """What the destination has no place for; entries that share their first name share a line."""
    lines = []
    if not is_model_form(catalog) and (is_file or not keeps_nesting(catalog, format)) and not format.nests:
        lines += attribute_tensors_left_out(catalog)
    beside = [*carried_of(catalog), *catalog.documents]
    if beside and (is_file or not format.carries_files):
        lines.append(f"files beside the weights: {', '.join(beside)}")
    if not (format.keeps_objects and (format.nests or not is_file)):
        groups: dict[str, list[str]] = {}
        is_alone = catalog.optimizer is not None
        common = catalog.common or {}
        for key in dict.fromkeys((*catalog.objects, *map(str, common), *([OPTIMIZER] if is_alone else []))):
            groups.setdefault(key.partition(".")[0], []).append(key)
        for name, keys in groups.items():
            what = keys[0] if len(keys) == 1 else f"{name}.… ({len(keys)} entries)"
            lines.append(f"{what}: no tensor, {format.title} has no place for it")
    return lines


def _as_root(images: tuple[FileImage, ...], iteration: object) -> tuple[FileImage, ...]:
    """The images of a training root with its tracker, as Megatron loads it; as they are without an iteration."""
    if type(iteration) is not int and iteration != RELEASE:
        return images
    moved = tuple(replace(image, path=_in_root(image.path, iteration)) for image in images)
    return (*moved, literal_file(TRACKER, str(iteration).encode("ascii"), is_metadata=True))


def _in_root(path: str, iteration: object) -> str:
    """A path in a training root; as it is without an iteration."""
    if iteration == RELEASE:
        return f"{RELEASE}/{path}"
    return f"iter_{iteration:07d}/{path}" if type(iteration) is int else path


_SUFFIXES = {"torch": ".pt"}


def _proposed_dst(job: Job, source: Checkpoint, format: Format) -> Path:
    """A name beside the source: ``SRC-tp4-pp1`` (``-ep2`` … where said) for another layout, else ``SRC.FORMAT``."""
    src = Path(os.path.abspath(job.src))
    stem = src.name.removesuffix(src.suffix) if source.store.entry else src.name
    if job.topology is not None and job.keeps_layout:
        topology = target_topology(job, source.catalog, format)
        name = f"{stem}-tp{topology.tp}-pp{topology.pp}"
        name += "".join(
            f"-{size}{n}" for size in ("vpp", "ep", "etp") if (n := getattr(job.topology, size)) is not None
        )
        made = src.parent / (name if job.to is None else f"{name}.{format.name}")
    else:
        made = src.parent / (stem + _SUFFIXES.get(format.name, f".{format.name}"))
    return made if job.src.is_absolute() else Path(os.path.relpath(made))
