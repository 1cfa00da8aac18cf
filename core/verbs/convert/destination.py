"""Where a conversion writes: the path of the destination, and the places of files in it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.facets import FsdpDtensorFacts
from core.engine.catalog.file_image import FileImage, literal_file
from core.files.remote_path import absolute_location, is_remote
from core.formats.format import Format
from core.formats.huggingface.files import file_images
from core.formats.registry import suffix_of
from core.opening.locate import RELEASE, TRACKER
from core.opening.open import Checkpoint
from core.verbs.convert.job import Job
from core.verbs.convert.options import HF_ALIASES
from core.verbs.convert.sizes import target_topology


def lay_out_files(
    target: TargetCatalog, source: Checkpoint, format: Format, dst: Path
) -> tuple[FileImage, ...]:
    """Lay out the files of the destination under their final paths."""
    assert format.lay_out is not None, "the format is writable"
    images = tuple(format.lay_out(target))
    if not (format.carries_files or target.write.is_file):
        beside = file_images(target)
        if format.is_rank_local:  # the layout of rank files has the training root already
            is_release = target.write.is_release or target.iteration is None
            iteration = RELEASE if is_release else target.iteration
            beside = [
                replace(image, path=iteration_path(image.path, iteration)) for image in beside
            ]
        images = (*images, *beside)
    if format.has_common_state or target.facet(FsdpDtensorFacts) is not None:
        images = in_training_root(images, RELEASE if source.is_release else target.iteration)
    return (replace(images[0], path=dst.name),) if target.write.is_file else images


def in_training_root(images: tuple[FileImage, ...], iteration: object) -> tuple[FileImage, ...]:
    """Move files to the iteration's directory of a training root, and add its tracker file.

    Megatron finds the iteration by the tracker file. Without an iteration nothing changes.
    """
    if type(iteration) is not int and iteration != RELEASE:
        return images
    moved = tuple(replace(image, path=iteration_path(image.path, iteration)) for image in images)
    return (*moved, literal_file(TRACKER, str(iteration).encode("ascii"), is_metadata=True))


def iteration_path(path: str, iteration: object) -> str:
    """Return the path of a file in a training root, the same path without an iteration."""
    if iteration == RELEASE:
        return f"{RELEASE}/{path}"
    return f"iter_{iteration:07d}/{path}" if type(iteration) is int else path


def choose_dst(job: Job, source: Checkpoint, format: Format) -> Path:
    """Return the job's destination, or propose one named after the source, in its directory.

    The proposed name is ``SRC-tp4-pp1`` (followed by ``-ep2`` and the like where given) for another
    layout, ``SRC-hf`` for a Hugging Face model, which is a directory, and else ``SRC.FORMAT``.
    """
    if job.dst is not None:
        return job.dst
    # Beside the source; in the working directory if that is remote.
    src = absolute_location(job.src.name if is_remote(job.src) else job.src)
    stem = src.stem if source.store.entry else src.name
    if job.topology is not None and (job.is_reshard or job.to is None):
        topology = target_topology(job, source.catalog, format)
        name = f"{stem}-tp{topology.tp}-pp{topology.pp}"
        name += "".join(
            f"-{size}{n}"
            for size in ("vpp", "ep", "etp")
            if (n := getattr(job.topology, size)) is not None
        )
        path = src.parent / (name if job.to is None else f"{name}.{format.name}")
    elif job.to is not None and job.to.lower() in HF_ALIASES:
        path = src.parent / f"{stem}-hf"
    else:
        path = src.parent / (stem + suffix_of(format))
    is_beside = job.src.is_absolute() and not is_remote(job.src)
    return path if is_beside else Path(os.path.relpath(path))
