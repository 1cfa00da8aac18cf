from __future__ import annotations

from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.removal import drop_entries, remove_entries
from core.engine.catalog.stored import Extent, StoredArray
from core.pickle.inert import ObjectLeaf, TensorLeaf


def make_catalog() -> Catalog:
    """Return a catalog of three tied tensors, and two objects that share a hidden tensor."""
    arrays = {
        key: StoredArray(key, "float32", (2,), Extent("file", number * 8))
        for number, key in enumerate(("a", "b", "c", "shared", "own", "unreferenced"))
    }
    tensors = catalog_of_arrays(format="torch", arrays=dict.fromkeys("abc", arrays["a"]))
    skeleton = {key: TensorLeaf(key) for key in "abc"} | {key: ObjectLeaf(key) for key in "xy"}
    return Catalog(
        format="torch",
        version=None,
        tensors=tensors.tensors,
        objects={
            "x": StoredObject("x", value=[TensorLeaf("shared"), TensorLeaf("own")]),
            "y": StoredObject("y", value=TensorLeaf("shared")),
        },
        skeleton=skeleton,
    ).with_hidden({key: arrays[key] for key in ("shared", "own", "unreferenced")})


def test_entries_leave_with_what_only_they_use_and_are_recorded() -> None:
    catalog = drop_entries(make_catalog(), {"x": "no place", "a": "not wanted"})
    assert catalog.tensors.keys() == {"b", "c"} and catalog.objects.keys() == {"y"}
    assert catalog.hidden.keys() == {"shared", "unreferenced"}
    assert catalog.skeleton == {"b": TensorLeaf("b"), "c": TensorLeaf("c"), "y": ObjectLeaf("y")}
    assert catalog.ties == {"c": "b"}
    listed = [str(entry) for entry in catalog.dropped if entry.is_listed]
    assert listed == ["x (no place)", "a (not wanted)"]
    assert [entry.names for entry in catalog.dropped if entry.tensors] == [("a", "own")]


def test_removed_entries_are_not_recorded() -> None:
    catalog = remove_entries(make_catalog(), {"x", "y"})
    assert catalog.hidden.keys() == {"unreferenced"} and catalog.dropped == ()
