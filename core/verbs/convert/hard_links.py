"""Prepare a checkpoint directory whose data files are hard links to the source's.

Megatron's torch_dist and DCP store global tensors, which any layout loads. Where no data has to
change, another layout (or another choice or naming of DCP's entries) needs new metadata at most.
This project never changes files in place, so links are safe; whoever deletes the source keeps the
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import UNREAD, dropped_together
from core.engine.catalog.facets import DcpFacts
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.tensor import without_fragments
from core.engine.changes.select import without_optimizer
from core.engine.plan.plan import make_plan
from core.errors import NoEffect, UnsupportedError, UsageError, refuse_without_effect
from core.formats.dcp.lightning_meta import META, meta_keys
from core.formats.dcp.metadata_image import linked_metadata
from core.formats.dcp.reading.data_files import METADATA
from core.formats.dcp.reading.stored_metadata import metadata_files
from core.formats.format import Format
from core.formats.mcore.common_state import COMMON_FILE
from core.megatron.optimizer.form import TITLES, optim_format_of
from core.opening.locate import RELEASE
from core.opening.objects import apply_object_policy, loaded
from core.opening.open import Checkpoint
from core.opening.source_files import unread_files
from core.values import dataclass
from core.verbs.convert.account import check_account
from core.verbs.convert.apply_changes import apply_changes
from core.verbs.convert.destination import choose_dst, in_training_root, iteration_path
from core.verbs.convert.global_form.build import global_form
from core.verbs.convert.global_form.steps import record_optimizer
from core.verbs.convert.job import Job
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.report.load_line import WrittenResult, load_line
from core.verbs.convert.sizes import check_source_sizes, written_topology
from core.verbs.convert.target_form import cut_form, describe_unsafe_files

_BOUND_OPTIMIZERS = ("dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter")
"""Forms of optimizer state that load only at the sizes they were saved with."""
_ANY = frozenset(
    """
    src dst to iteration is_reshard metadata_only memory_bytes beside_bytes threads device
    resume force optim no_crc no_digest no_fsync fingerprint
    """.split()
)
"""Options of a job that do not change the content of the files."""


@dataclass(frozen=True, slots=True)
class LinkedCheckpoint:
    """A checkpoint directory whose data files are hard links.

    Args:
        catalog: the entries of the directory.
        files: names of the source's files to link.
        images: the new metadata files to write.
        notes: notes for the user.
    """

    catalog: Catalog
    files: tuple[str, ...]
    images: tuple[FileImage, ...]
    notes: tuple[str, ...]


def prepare_links(job: Job, source: Checkpoint, format: Format) -> Prepared:
    """Prepare a destination whose data files are hard links to the source's.

    Raises:
        CheckpointingException: data would have to change, the model cannot be cut to the requested
            sizes, or an object is unsafe.
    """
    linked = link_data_files(job, source)
    check_account(source.catalog, linked.catalog, linked.catalog, linked.catalog.dropped)

    # The model must load at the requested sizes: plan the layout, without writing it.
    if job.topology is not None:
        check_source_sizes(job, source.catalog)
        if job.topology.is_change:
            planned = replace(job, metadata_only=False)
            cut_form(planned, global_form(planned, source, format).catalog, format)
    apply_object_policy(
        loaded(linked.catalog, source.store), keeps_unknown=True, drop_unknown=False
    )

    # Name the links and the new metadata as in the source, in a training root if it has one.
    images = linked.images
    candidates = dict.fromkeys((*linked.files, *source.catalog.files))
    # The objects of these two files are those of the catalog, which are judged above.
    beside = [path for path in candidates if path not in (COMMON_FILE, META)]
    unsafe = describe_unsafe_files(source, beside)
    refused = {name for entry in unsafe for name in entry.names}
    linked_files = [path for path in candidates if path not in refused]
    paths = {name: name for name in linked_files}
    if format.has_common_state:
        iteration = RELEASE if source.is_release else source.iteration
        images = in_training_root(images, iteration)
        paths = {name: iteration_path(name, iteration) for name in linked_files}
    links = tuple((path, name, source.store.size(name)) for name, path in paths.items())

    # The plan has no tensors: it only writes the new metadata.
    dst = choose_dst(job, source, format)
    target = linked.catalog.as_target(format.name, lambda _, tensor: without_fragments(tensor))
    empty = replace(linked.catalog, tensors={}, hidden={}, files={}, objects={})
    unread = unread_files(source, linked=linked.files)
    return Prepared(
        job=job,
        source=source,
        target_format=format,
        dst=dst,
        images=images,
        plan=make_plan(
            empty,
            empty.as_target(empty.format, lambda _, tensor: without_fragments(tensor)),
            images,
            threads=job.threads,
            memory_bytes=job.memory_bytes,
        ),
        renamed=(),
        notes=(
            *source.notes,
            *linked.notes,
            (
                "one file is hard-linked"
                if len(links) == 1
                else f"{len(links)} files are hard-linked"
            )
            + " to the source; no data was copied",
        ),
        dropped_entries=(
            *dropped_together(unread, UNREAD),
            *(entry for entry in linked.catalog.dropped if entry.is_listed),
            *unsafe,
        ),
        form=linked.catalog,
        load_line=load_line(
            WrittenResult(
                dst=dst,
                format=format,
                target=target,
                images=images,
                topology=written_topology(job, linked.catalog, format),
                config=None,
            )
        ),
        n_tensors=len(linked.catalog.tensors),
        links=links,
    )


def link_data_files(job: Job, source: Checkpoint) -> LinkedCheckpoint:
    """Choose the source's files that become hard links, and lay out the new metadata.

    Raises:
        UsageError: an option would change data, or has no effect.
        UnsupportedError: the format's data cannot be shared, or its optimizer state loads only at
            the old sizes.
    """
    # Only these two formats store global tensors separately from the metadata that locates them.
    format = source.format.name
    if format not in ("dcp", "torch_dist") or job.to not in (None, format):
        raise UnsupportedError(
            "--metadata-only requires SRC and DST to have the same format, dcp or torch_dist, but "
            + (f"SRC is {format}" + (f" and DST is {job.to}" if job.to else "")),
            hint="omit --metadata-only, because the data has to be rewritten",
        )
    catalog = source.catalog
    if format == "dcp" and metadata_files(source.store) != [METADATA]:
        raise UnsupportedError(
            "--metadata-only: the model and the optimizer are in separate directories, "
            "each with its own .metadata",
            hint="pass one of the directories, or omit --metadata-only",
        )
    _check_options(job, format)
    # The data files are those that the entries lie in, in whatever folder; the files beside
    # ``.metadata`` come with them. The manifest is not linked: the destination gets its own.
    beside = [name for name in source.store.files() if not name.endswith("ckpt-manifest.json")]
    link = _link_torch_dist if format == "torch_dist" else _link_dcp
    return link(job, catalog, beside)


def _link_dcp(job: Job, catalog: Catalog, beside: Sequence[str]) -> LinkedCheckpoint:
    """Link the data files that the changed catalog still refers to, with new metadata.

    Args:
        beside: files next to ``.metadata``, data files among them.

    Raises:
        UsageError: the changes would also change a file that is linked.
    """
    remaining = catalog
    if job.optim == "drop":
        weights = without_optimizer(catalog)
        record = (record_optimizer(weights.excluded),) if weights.excluded else ()
        remaining = replace(weights.catalog, dropped=(*weights.catalog.dropped, *record))
    result = apply_changes(remaining, job)
    if meta_keys(result.catalog) != meta_keys(catalog):
        raise UsageError(
            f"--metadata-only links {META} unchanged, but the options drop or rename entries in it",
            hint="omit --metadata-only, or the options that drop or rename entries",
        )
    names = {name for name in beside if not name.endswith((METADATA, ".distcp"))} | {
        fragment.array.extent.file
        for fragment in result.catalog.all_fragments()
        if fragment.array is not None
    }
    return LinkedCheckpoint(
        result.catalog, tuple(sorted(names)), (linked_metadata(result.catalog),), result.notes
    )


def _link_torch_dist(job: Job, catalog: Catalog, beside: Sequence[str]) -> LinkedCheckpoint:
    """Link all files of a torch_dist checkpoint, whose metadata holds for any parallel sizes.

    Args:
        beside: files next to ``.metadata``, data files among them.

    Raises:
        UnsupportedError: the optimizer state loads only at the sizes that it was saved with, and
            the job requests others.
    """
    form = optim_format_of(catalog.tensors, catalog.objects)
    if form in _BOUND_OPTIMIZERS and job.topology is not None and job.topology.sizes:
        raise UnsupportedError(
            f"this optimizer state ({TITLES.get(form, form)}) loads only at the sizes "
            "it was saved with, so it has to be rewritten",
            hint="omit --metadata-only",
        )
    note = "torch_dist loads at any parallel sizes, so the source's metadata and arguments are kept"
    facts = catalog.facet(DcpFacts) or DcpFacts()
    return LinkedCheckpoint(catalog, tuple(sorted({*beside, *facts.item_files})), (), (note,))


def _check_options(job: Job, format: str) -> None:
    """Raise if the job has options that would change data.

    Raises:
        UsageError: the job has such options.
    """
    # DCP can drop and rename entries by new metadata; torch_dist loads at any sizes as it is.
    if format == "dcp":
        allowed = _ANY | {"no_optim", "include", "exclude", "strip_prefix", "add_prefix", "rename"}
    else:
        allowed = _ANY
        if job.topology is not None:
            allowed |= {*job.topology.options, *job.topology.source}
            if job.topology.is_change:
                allowed |= {"rules", "unknown"}  # the layout is planned
        if job.rng == "keep":
            allowed |= {"rng"}
    given = job.given_options
    others = [name for name in given if name not in allowed]
    reason = f"--metadata-only does not write {format} data"
    refuse_without_effect(
        given, [NoEffect(others, True, reason, "omit it, or omit --metadata-only")]
    )
