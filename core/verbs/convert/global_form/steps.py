"""Steps that several paths to the global form share: merge, drop the optimizer, apply changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.optimizer_keys import NOT_IN_HF
from core.engine.changes.select import without_optimizer
from core.errors import MissingShardError, UsageError
from core.files.json_object import parse_json_object
from core.formats.huggingface.files import CONFIG
from core.formats.torch.format import refuse_unsupported
from core.opening.open import Checkpoint
from core.values import dataclass
from core.verbs.convert.apply_changes import ChangedCatalog, apply_changes
from core.verbs.convert.global_form.request import FormRequest
from core.verbs.convert.job import Job


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """A catalog on its way to the global form, with the notes and dropped entries of a step."""

    catalog: Catalog
    notes: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()


def merge_if_requested(request: FormRequest, step: GlobalStep, source: Checkpoint) -> GlobalStep:
    """Compute the tensors from those of all sources, if the job is a merge.

    Args:
        request: the job.
        step: the first source, in the form in which it is merged.
        source: the first source, whose store has the files of all.

    Raises:
        CheckpointingException: another source is damaged, or does not fit the first one.
    """
    job = request.job
    if job.merge is None:
        return step
    from core.verbs.merge.forms import FormOptions
    from core.verbs.merge.sources import merge_others

    options = FormOptions(
        rules=request.rules, vocab_size=job.vocab_size, keep_padded_vocab=job.keep_padded_vocab
    )
    result = merge_others(
        job.merge, step.catalog, source, request.others, config=request.config, options=options
    )
    return replace(step, catalog=result.catalog, notes=(*step.notes, *result.notes))


def drop_optimizer(request: FormRequest, catalog: Catalog) -> GlobalStep:
    """Drop the optimizer of a source that keeps its layout, if the job requests it."""
    if request.job.optim != "drop":
        return GlobalStep(catalog)
    weights = without_optimizer(catalog)
    if not weights.excluded:
        return GlobalStep(weights.catalog)
    # In a Hugging Face directory nobody misses the optimizer, so its entries are not counted.
    if request.writes_hf:
        entries = Dropped(("optimizer",), NOT_IN_HF)
    else:
        entries = record_optimizer(weights.excluded)
    return GlobalStep(weights.catalog, dropped=(entries,))


def record_optimizer(keys: tuple[str, ...]) -> Dropped:
    """Return the record of an optimizer, by the keys of its entries, that the user left out."""
    return Dropped(keys, "optimizer left out as requested", f"optimizer ({len(keys)} entries)")


def apply_checked(
    catalog: Catalog, job: Job, config: Mapping[str, object] | None = None
) -> ChangedCatalog:
    """Apply the user's changes, and raise if they leave an entry that cannot be copied."""
    result = apply_changes(catalog, job, config=config)
    refuse_unsupported(result.catalog)
    return result


@contextmanager
def blaming_options(job: Job, result: ChangedCatalog, family: str) -> Iterator[None]:
    """Turn a missing tensor into a usage error if the user's options dropped or renamed any.

    Args:
        job: the options.
        result: the catalog after the user's changes.
        family: family of the model, ``Megatron`` or ``Hugging Face``.
    """
    try:
        yield
    except MissingShardError as err:
        if not (result.excluded or result.renamed or job.stacking is not None):
            raise
        raise UsageError(
            "--include, --exclude, --stack-layers or the new names leave "
            f"an incomplete {family} model: {err.message}",
            key=err.key,
            hint="to write only part of the model, keep its names and omit --config: "
            "--to safetensors, dcp or torch",
        ) from err


def config_after(catalog: Catalog, config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the ``config.json`` after the user's changes, ``config`` if it is unchanged."""
    document = catalog.documents.get(CONFIG)
    return config if document is None else parse_json_object(document, file=CONFIG)
