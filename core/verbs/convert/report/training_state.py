"""Leave out the training state that other files than the weights' hold, where it has no place.

===========================  ======================================================
 destination                  optimizer, scheduler, random states … of the source
===========================  ======================================================
 torch                        all entries
 dcp, zarr3,                  all entries of known classes
 deepspeed_universal
 safetensors, hf              none: such directories hold weights, and loaders take
                              any tensor for one
 megatron, torch_dist, zarr,  none: Megatron's optimizer has other entries
 fsdp_dtensor
===========================  ======================================================

What is left out is listed as not carried. ``Job.optim`` set to ``carry`` keeps all entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped, dropped_together
from core.engine.catalog.facets import TrainingState
from core.engine.changes.select import keep_entries
from core.formats.format import Format
from core.formats.torch.nested_names import uses_in
from core.pickle.names import judge
from core.values import dataclass
from core.verbs.convert.job import Job
from core.verbs.convert.options import has_model_form

_NOT_HERE = "training state, which {} cannot store; to keep it, use --to dcp or --to torch"
_UNKNOWN = "an object of a class that {} cannot store; to keep it, use --to torch"


@dataclass(frozen=True, slots=True)
class WithoutState:
    """A catalog without some of its training state.

    Args:
        catalog: the remaining entries.
        dropped: the files whose entries were left out; at most one value.
    """

    catalog: Catalog
    dropped: tuple[Dropped, ...] = ()


def without_training_state(catalog: Catalog, job: Job, format: Format) -> WithoutState:
    """Leave the training state out if the destination has no place for it.

    Args:
        catalog: the source, whose objects need not be loaded.
        job: the conversion.
        format: the format of the destination.
    """
    state = catalog.facet(TrainingState)
    holds_state = not (format.carries_files or has_model_form(job, format))
    if state is None or holds_state or job.optim == "carry":
        return WithoutState(catalog)
    return _without(catalog, state, state.files, _NOT_HERE.format(format.name))


def record_unmerged_state(catalog: Catalog) -> tuple[Dropped, ...]:
    """Return the record of the training state of another source of a merge.

    A result has the training state of the first source, if any, whatever its format can hold.
    """
    state = catalog.facet(TrainingState)
    return dropped_together(state.files.values() if state else (), "training state is not merged")


def without_unknown_classes(catalog: Catalog, format: Format) -> WithoutState:
    """Leave out the entries of training state that are objects of unknown classes.

    Args:
        catalog: a catalog with loaded objects.
        format: the format of the destination, which holds plain values only.
    """
    state = catalog.facet(TrainingState)
    if state is None:
        return WithoutState(catalog)
    unknown = [
        entry
        for entry in state.files
        if (item := catalog.objects.get(entry)) is not None
        and any(judge(use) == "unknown" for use in uses_in(item.value))
    ]
    return _without(catalog, state, unknown, _UNKNOWN.format(format.name))


def _without(
    catalog: Catalog, state: TrainingState, entries: Iterable[str], reason: str
) -> WithoutState:
    """Leave out entries, and what is below them."""
    files = {entry: state.files[entry] for entry in entries}
    if not files:
        return WithoutState(catalog)
    remaining = {entry: file for entry, file in state.files.items() if entry not in files}
    kept = keep_entries(catalog, _outside(files)).catalog
    names = tuple(files.values())
    facet = replace(state, files=remaining, dropped=(*state.dropped, *names))
    # A note about a file begins with its name.
    notes = tuple(note for note in kept.notes if note.partition(" ")[0] not in names)
    dropped = dropped_together(names, reason)
    return WithoutState(replace(kept, notes=notes).with_facet(facet), dropped)


def _outside(entries: Iterable[str]) -> Callable[[str], bool]:
    """Return the predicate for keys that are none of some entries, nor below them."""
    exact = frozenset(entries)
    return lambda key: key.partition(".")[0] not in exact
