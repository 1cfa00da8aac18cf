"""Notes on a source before it is converted: copies that are not carried, and empty parameters."""

from __future__ import annotations

from dataclasses import replace

from core.engine.catalog.facets import WeightCopies
from core.engine.catalog.key_patterns import matcher
from core.errors import CheckpointingException, CorruptError
from core.formats.format import Format
from core.opening.open import Checkpoint
from core.verbs.convert.job import Job
from core.verbs.convert.options import HF_ALIASES


def compare_copies(source: Checkpoint) -> Checkpoint:
    """Return a source with a note on copies of its weights: not carried, and equal or not."""
    copies = source.catalog.facet(WeightCopies)
    if copies is None:
        return source
    from core.megatron.optimizer.proof import find_different_copies

    copy_kind, verdict = "16-bit copies", ""
    try:
        pairs = copies.pairs()
        if pairs and all(copy.dtype == "float32" for _, _, copy in pairs):
            copy_kind = "copies"
        different = find_different_copies(source.store, pairs)
    except CheckpointingException as err:
        verdict = f"the weights could not be compared with their master weights ({err.message})"
    else:
        n = len({key for key, _, _ in pairs})
        if different:
            key, copy = different[0]
            verdict = (
                f"{len(different):,} of {n:,} differ from the rounded master weights, which are "
                f"written instead; one is {key} in {copy.extent.file} (ckpt validate --headers "
                "lists all)"
            )
        elif n:
            verdict = "a sample of each matches the rounded master weights"
    if not verdict:
        return source
    note = f"the {copy_kind} of the weights in the model files are not carried over; {verdict}"
    return replace(source, notes=(*source.notes, note))


def check_empty_parameters(job: Job, checkpoint: Checkpoint, format: Format) -> list[str]:
    """Return a note on parameters without elements, unless the result would be a broken model.

    Raises:
        CorruptError: the job merges, or writes a model of Hugging Face or Megatron's rank files.
    """
    from core.engine.catalog.emptied import EMPTIED_HINT, find_emptied_parameters

    include = [matcher(glob) for glob in job.include]
    exclude = [matcher(glob) for glob in job.exclude]
    emptied = [
        key
        for key in find_emptied_parameters(checkpoint.catalog)
        if (not include or any(matches(key) for matches in include))
        and not any(matches(key) for matches in exclude)
    ]
    if not emptied:
        return []
    message = (
        f"{len(emptied):,} parameters, such as {emptied[0]}, are empty (shape [0]), because they "
        "were saved while ZeRO-3 had partitioned them across ranks"
    )
    is_hf = job.names is not None and job.names.startswith("hf")
    is_model = is_hf or (job.to or "").lower() in HF_ALIASES or format.is_rank_local
    if job.merge is None and not is_model:
        return [f"{message}; {EMPTIED_HINT}"]
    raise CorruptError(message, file=checkpoint.store.label, key=emptied[0], hint=EMPTIED_HINT)
