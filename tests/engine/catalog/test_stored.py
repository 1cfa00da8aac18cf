from __future__ import annotations

from core.engine.catalog.catalog import catalog_of_arrays
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import whole_tensor


def test_a_planned_array_keeps_all_but_its_place_when_it_is_placed() -> None:
    planned = PlannedArray("w", "bfloat16", (2, 3), (("tp", 1),))
    stored = planned.at(Extent("f", 40))
    assert stored == StoredArray("w", "bfloat16", (2, 3), Extent("f", 40), (("tp", 1),))
    assert stored.n_bytes == planned.n_bytes == 12


def test_a_target_has_the_sources_entries_and_arrays_of_its_own() -> None:
    source = catalog_of_arrays(
        format="x", arrays={"w": StoredArray("w", "int8", (4,), Extent("f", 0))}, version="2"
    )
    array = PlannedArray("new", "int8", (4,))
    target = source.as_target("y", lambda *_: whole_tensor(array))
    assert (target.format, target.version, target.tensors) == ("y", None, source.tensors)
    assert target.stored_arrays() == {"new": array}
