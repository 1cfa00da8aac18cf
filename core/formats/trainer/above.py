"""Training state above a directory of DeepSpeed: read as entries of DeepSpeed's checkpoint.

On disk, as transformers' Trainer and accelerate's ``save_state`` write it::

    checkpoint-2/
    ├── latest                         names DeepSpeed's directory
    ├── global_step2/                  weights and optimizer (accelerate: pytorch_model/)
    ├── scheduler.pt                   → scheduler, one object for each of these files
    ├── rng_state_0.pth …              → rng_state_0 …
    ├── training_args.bin              → training_args
    └── trainer_state.json  config.json … are carried, if there is a config.json

accelerate calls them ``scheduler.bin``, ``random_states_0.pkl`` and so on (``files``). A schedule
that DeepSpeed runs itself is in DeepSpeed's files (``lr_scheduler``) and in none of these.

Facet: ``TrainingState``, with the files as the user sees them, ``checkpoint-2/scheduler.pt``.

Not supported, listed as not carried: an optimizer's file, because the optimizer is DeepSpeed's.

Source: transformers 5.23 ``trainer.py`` (``_save_optimizer_and_scheduler``), accelerate 1.15.0
``accelerator.py`` (``save_state``); directories that they wrote with DeepSpeed 0.19.8, pinned in
tests/golden (``trainer/zero2_dp2``, ``accelerate/zero2_dp2``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.catalog.facets import TrainingState
from core.formats.trainer.files import is_optimizer, state_files
from core.formats.trainer.state import object_entry, taken_entries, with_entries

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.files.store import ReadStore


def with_state_above(catalog: Catalog, store: ReadStore, *, prefix: str, folder: str) -> Catalog:
    """Add the training state of the directory above to the catalog of DeepSpeed's directory.

    Args:
        catalog: the weights and the optimizer.
        store: the directory above.
        prefix: what comes before the names of its files in the store from which the catalog is
            read.
        folder: its name.

    Raises:
        StorageError: the directory or a file cannot be read.
    """
    listing = state_files(store)
    files = {entry: file for entry, file in listing.files.items() if not is_optimizer(entry)}
    taken = taken_entries(catalog, catalog.skeleton, files)
    parts = [
        object_entry(entry, f"{prefix}{file}", store.size(file))
        for entry, file in files.items()
        if entry not in taken
    ]
    if not parts:
        return catalog
    notes = [
        f"{folder}/{file} was not read, because DeepSpeed's files have entries that are called "
        f"{entry}"
        for entry, file in taken.items()
    ]
    read = {part.entry: f"{folder}/{files[part.entry]}" for part in parts}
    joined = with_entries(catalog, catalog.skeleton, parts)
    return joined.noted(notes).with_facet(TrainingState(read))
