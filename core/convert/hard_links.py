"""Lay out a checkpoint directory whose data files are hard links to the source's.

Megatron's torch_dist and DCP store global tensors, which any layout loads. Where no data has to
change, another layout (or another choice or naming of DCP's entries) needs new metadata at most.
This project never changes files in place, so links are safe; whoever deletes the source keeps the
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from core.catalog.catalog import Catalog
from core.catalog.facets import DcpFacts
from core.catalog.file_image import FileImage
from core.changes.select import without_optimizer
from core.convert.apply_changes import apply_changes
from core.convert.job import Job
from core.errors import UnsupportedError, UsageError
from core.formats.dcp.lightning_meta import META, meta_keys
from core.formats.dcp.metadata_image import linked_metadata
from core.formats.dcp.reading.data_files import METADATA
from core.formats.dcp.reading.stored_metadata import metadata_files
from core.megatron.optimizer.form import TITLES, optim_format_of
from core.opening.open import Checkpoint
from core.values import dataclass

_OPTIONS = {
    "topology": "parallel sizes or pipeline options",
    "optim": "--no-optim",
    "replicas": "--on-replica-mismatch",
    "max_file_bytes": "--max-shard-size",
    "vocab_divisor": "--make-vocab-size-divisible-by",
}
"""Descriptions of the job's fields whose options have other names."""
_OF_KEYS = ("include", "exclude", "strip_prefix", "add_prefix", "rename")
_BOUND_OPTIMIZERS = ("dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter")
"""Forms of optimizer state that load only at the sizes they were saved with."""
_ANY = frozenset({
    *("src", "dst", "to", "iteration", "keeps_layout", "optim", "metadata_only"),
    *("memory_bytes", "threads", "resume", "force", "crc", "digest", "fsync", "fingerprint"),
})  # fmt: skip
"""Fields of a job that do not change the content of the files."""


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
            f"--metadata-only needs dcp or torch_dist on both sides; this is {format}"
            + (f" to {job.to}" if job.to else ""),
            hint="omit --metadata-only: the data has to be written",
        )
    catalog = source.catalog
    if format == "dcp" and metadata_files(source.store) != [METADATA]:
        raise UnsupportedError(
            "--metadata-only: model and optimizer are in separate directories, "
            "each with its own .metadata",
            hint="give one of the directories, or omit --metadata-only",
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
    remaining = without_optimizer(catalog).catalog if job.optim == "drop" else catalog
    result = apply_changes(remaining, job)
    if meta_keys(result.catalog) != meta_keys(catalog):
        raise UsageError(
            f"--metadata-only links {META} unchanged, but the options drop or rename entries in it",
            hint="omit --metadata-only, or select other entries",
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
    note = "torch_dist loads at any parallel sizes, so the metadata and arguments are the source's"
    facts = catalog.facet(DcpFacts) or DcpFacts()
    return LinkedCheckpoint(catalog, tuple(sorted({*beside, *facts.item_files})), (), (note,))


def _check_options(job: Job, format: str) -> None:
    """Raise if the job has options that would change data.

    Raises:
        UsageError: the job has such options.
    """
    # DCP can drop and rename entries by new metadata; torch_dist loads at any sizes as it is.
    if format == "dcp":
        allowed = _ANY | set(_OF_KEYS)
    else:
        allowed = (_ANY | {"topology"}) - {"optim"}
        if job.topology is not None and job.topology.is_change:
            allowed |= {"rules", "unknown"}  # the layout is planned
        if job.rng == "keep":
            allowed |= {"rng"}

    # Name every other option that differs from its default.
    defaults = Job(src=job.src)
    refused = [
        field.name
        for field in fields(Job)
        if field.name not in allowed and getattr(job, field.name) != getattr(defaults, field.name)
    ]
    if refused:
        names = ", ".join(_OPTIONS.get(name, "--" + name.replace("_", "-")) for name in refused)
        raise UsageError(
            f"--metadata-only writes no data, so it cannot be combined with {names} for {format}",
            hint="omit one of them",
        )
