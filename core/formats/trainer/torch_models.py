"""Second and further models of accelerate in torch files, as entries of the same checkpoint.

On disk, as ``Accelerator.save_state(safe_serialization=False)`` writes it::

    state/
    ├── pytorch_model.bin       the first model, whose tensors keep their names
    ├── pytorch_model_1.bin     the second model: entry model_1, tensors model_1.<name>
    ├── optimizer.bin  optimizer_1.bin
    └── random_states_0.pkl     always there; without it, the files are not taken for one state

The names are those that the same state gets from safetensors (``model_1.safetensors``).

Not supported: shards of a second model, which accelerate does not write.

Source: accelerate 1.15.0 ``checkpointing.py``; its states of two models, made in the tests.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import WeightFileFacts
from core.errors import CorruptError, UnsupportedError
from core.formats.torch.tree import parse
from core.formats.trainer.state import keyed_entries, taken_entries, with_entries
from core.pickle.inert import as_mapping

if TYPE_CHECKING:
    from core.files.store import ReadStore

_FURTHER_MODEL = re.compile(r"pytorch_(model_([1-9]\d{0,3}))\.bin")
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")


def torch_models(store: ReadStore) -> dict[str, str]:
    """Return entry → file of the second and further models of a state, in their order."""
    names = store.files()
    if "pytorch_model.bin" not in names or not any(map(_RANDOM_STATES.fullmatch, names)):
        return {}
    matches = [match for match in map(_FURTHER_MODEL.fullmatch, names) if match is not None]
    return {match[1]: match[0] for match in sorted(matches, key=lambda match: int(match[2]))}


def with_torch_models(catalog: Catalog, store: ReadStore) -> Catalog:
    """Add the further models of a state to the catalog of the first one.

    Raises:
        CorruptError, TruncatedError: a file is damaged, or the first model has an entry with the
            name of another model.
        UnsafeError: a pickle is hostile.
        UnsupportedError: a file is not a dict of tensors.
    """
    files = torch_models(store)
    taken = taken_entries(catalog, catalog.skeleton, files)
    for entry, file in taken.items():
        raise CorruptError(
            "the first model already has an entry with this name", file=file, key=entry
        )
    parts = []
    for entry, file in files.items():
        tree = parse(store, file, prefix=f"{entry}.")
        if as_mapping(tree.value) is None:
            raise UnsupportedError("the file is not a dict of tensors", file=file)
        parts.append(keyed_entries(entry, tree.value, tree, notes=tree.notes))
    if not parts:
        return catalog
    facts = catalog.facet(WeightFileFacts) or WeightFileFacts()
    joined = with_entries(catalog, catalog.skeleton, parts)
    return joined.with_facet(replace(facts, further_models=tuple(files)))
