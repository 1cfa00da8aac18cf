"""Make a checkpoint directory whose data files are hard links to the source's.

Megatron's torch_dist and DCP store global tensors, which any layout loads. Where no data has to
change, another layout (or another choice or naming of DCP's entries) needs new metadata at most.
This project never changes files in place, so links are safe; whoever deletes the source keeps the
data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from core.catalog.catalog import Catalog
from core.catalog.file_image import FileImage
from core.changes.select import without_optimizer
from core.convert.apply_changes import apply_changes
from core.convert.job import Job
from core.errors import UnsupportedError, UsageError
from core.formats.dcp.format import METADATA, linked_metadata, metadata_files
from core.formats.dcp.lightning_meta import META, meta_keys
from core.megatron.optimizer.form import TITLES, optim_format_of
from core.opening.open import Checkpoint

_OPTIONS = {
    "topology": "parallel sizes or pipeline options",
    "optim": "--no-optim",
    "replicas": "--on-replica-mismatch",
    "max_file_bytes": "--max-shard-size",
    "vocab_divisor": "--make-vocab-size-divisible-by",
}
"""Option names of the job's fields, where they differ."""
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
        catalog: what the directory holds.
        files: names of the source's files that it has as links.
        images: the files that are written anew.
        notes: what the user should know.
    """

    catalog: Catalog
    files: tuple[str, ...]
    images: tuple[FileImage, ...]
    notes: tuple[str, ...]


def link_data_files(job: Job, source: Checkpoint) -> LinkedCheckpoint:
    """Choose the source's files that become hard links, and make the destination's new metadata.

    Raises:
        UsageError: an option asks for something that changes data, or has no effect.
        UnsupportedError: the format's data cannot be shared, or its optimizer state loads only at
        the old sizes.
    """
    format = source.format.name
    if format not in ("dcp", "torch_dist") or job.to not in (None, format):
        raise UnsupportedError(
            f"--metadata-only needs dcp or torch_dist on both sides; this is {format}"
            + (f" to {job.to}" if job.to else ""),
            hint="leave --metadata-only out: the data has to be written",
        )
    catalog = source.catalog
    if format == "dcp" and metadata_files(source.store) != [METADATA]:
        raise UnsupportedError(
            "--metadata-only: model and optimizer are in separate directories, each with its own .metadata",
            hint="point at one of the directories, or leave --metadata-only out",
        )
    _check_options(job, format)
    if format == "torch_dist":
        _check_optimizer(job, catalog)
        note = (
            "torch_dist loads at any parallel sizes, so the metadata and arguments are the source's"
        )
        return LinkedCheckpoint(catalog, tuple(_files(source)), (), (note,))
    dropped = without_optimizer(catalog).catalog if job.optim == "drop" else catalog
    result = apply_changes(dropped, job)
    if meta_keys(result.catalog) != meta_keys(catalog):
        raise UsageError(
            f"--metadata-only links {META} unchanged, but the options drop or rename entries in it",
            hint="leave --metadata-only out, or choose other entries",
        )
    used = {
        piece.array.extent.file
        for piece in result.catalog.all_fragments()
        if piece.array is not None
    }
    names = [
        name for name in _files(source) if name in used or not name.endswith((METADATA, ".distcp"))
    ]
    return LinkedCheckpoint(
        result.catalog, tuple(names), (linked_metadata(result.catalog),), result.notes
    )


def _files(source: Checkpoint) -> Iterator[str]:
    """Yield the checkpoint's own files, without the manifest that this project wrote."""
    return (name for name in source.store.files() if not name.endswith("ckpt-manifest.json"))


def _check_options(job: Job, format: str) -> None:
    """Raise if the job has options that would change data.

    Raises:
        UsageError: it has such options.
    """
    allowed = _ANY | frozenset(_OF_KEYS if format == "dcp" else ("topology",))
    if format == "torch_dist" and job.topology is not None and job.topology.is_change:
        allowed |= {"rules", "unknown"}  # the layout is planned
    if job.rng == "keep" and format == "torch_dist":
        allowed |= {"rng"}
    plain = Job(src=job.src)
    asked = [
        field.name
        for field in fields(Job)
        if field.name not in allowed and getattr(job, field.name) != getattr(plain, field.name)
    ]
    if format == "torch_dist" and job.optim != plain.optim:
        asked.append("optim")
    if asked:
        names = ", ".join(_OPTIONS.get(name, "--" + name.replace("_", "-")) for name in asked)
        raise UsageError(
            f"--metadata-only writes no data, so it cannot be combined with {names} for {format}",
            hint="leave one of them out",
        )


def _check_optimizer(job: Job, catalog: Catalog) -> None:
    """Raise if the job asks for a new layout of optimizer state that loads only at the old sizes.

    Raises:
        UnsupportedError: the optimizer state has such a form.
    """
    form = optim_format_of(catalog.tensors, catalog.objects)
    if form in _BOUND_OPTIMIZERS and job.topology is not None and job.topology.sizes:
        raise UnsupportedError(
            f"this optimizer state ({TITLES.get(form, form)}) loads only at the sizes it was saved with, so it has to "
            "be rewritten",
            hint="leave --metadata-only out",
        )
