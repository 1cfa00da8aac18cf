"""The names of a checkpoint as a tree whose levels are made when they are shown."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckpt_cli.explore.names import MOST_SIBLINGS, Entry, NamedBranch, build_names
from core.engine.catalog.tensor import Tensor
from core.verbs.inspect.tree import components


def root_of(*keys: str) -> Entry:
    tensors = tensors_named(*keys)
    return Entry("module", "", (), (build_names(tensors, split=components),))


def tensors_named(*keys: str) -> dict[str, Tensor]:
    """Return a tensor for each key, which is its attribute, as a tensor does not know its name."""
    return {key: Tensor("float32", (2, 3), attributes={"key": key}) for key in keys}


def names_of(tensors: Iterable[Tensor]) -> list[object]:
    """Return the keys of tensors of ``tensors_named``, sorted."""
    return sorted(str((tensor.attributes or {})["key"]) for tensor in tensors)


def labels(entry: Entry) -> list[str]:
    return [child.label for child in entry.children()]


def test_chains_of_modules_are_one_entry_and_totals_are_those_below() -> None:
    root = root_of("a.b.0.w", "a.b.1.w", "c")
    assert labels(root) == ["a.b", "c"]
    module, tensor = root.children()
    assert (module.kind, module.path, module.n_tensors, module.n_bytes) == (
        "module",
        ("a", "b"),
        2,
        48,
    )
    assert (tensor.kind, tensor.key, tensor.has_children) == ("tensor", "c", False)
    assert labels(module) == ["0.w", "1.w"]
    assert [child.key for child in module.children()] == ["a.b.0.w", "a.b.1.w"]


@pytest.mark.parametrize("keys", [("a", "a.b"), ("a.b", "a")])
def test_a_tensor_can_be_a_module_too(keys: tuple[str, ...]) -> None:
    (entry,) = root_of(*keys).children()
    assert (entry.kind, entry.key, entry.n_tensors, entry.n_bytes) == ("tensor", "a", 2, 48)
    assert [child.key for child in entry.children()] == ["a.b"]


@pytest.mark.parametrize(
    "key", ["", ".", "a..b", "a\\.b", "a\\.b.c", ".".join("abcdefgh" * 20), "\x1b[31m", "x:y.z"]
)
def test_every_key_is_at_its_path(key: str) -> None:
    root = root_of("a.x", key, "a\\", "a.b.c")
    path = tuple(components(key))
    branch = root.branch
    for name in path:
        branch = branch.below[name]
    assert branch.key == key
    assert root.n_tensors == 4


def test_too_many_siblings_are_ranges_that_hold_each_of_them_once() -> None:
    keys = [f"w{number}" for number in range(MOST_SIBLINGS**2 + 1)]
    root = root_of(*keys)

    def leaves(entry: Entry) -> list[str]:
        children = entry.children()
        assert len(children) <= MOST_SIBLINGS
        if entry.kind == "tensor":
            return [entry.key or ""]
        return [key for child in children for key in leaves(child)]

    assert leaves(root) == keys
    first, last = root.children()[0], root.children()[-1]
    assert first.label == "w0 … w39999"
    assert first.covers(("w39999",)) and not first.covers(("w40000",))
    assert last.covers(("w40000",))


def test_a_rank_directory_is_an_entry_of_its_own() -> None:
    def split(key: str) -> list[str]:
        rank, _, name = key.partition(":")
        return [rank, *components(name)]

    tensors = {"r0:optimizer.x.y": Tensor("float32", (1,))}
    root = Entry("module", "", (), (build_names(tensors, split=split),))
    (rank,) = root.children()
    assert (rank.label, labels(rank)) == ("r0", ["optimizer.x.y"])


def test_levels_that_are_not_made_yet_have_the_same_totals_and_tensors() -> None:
    keys = ["m.a", "m.l.0.w", "m.l.1.w", "m", "m.l.0", "m.l.0\\.5.w", "r:m.l.0.w"]
    root = root_of(*keys)

    def check(branch: NamedBranch) -> None:
        before = names_of(branch.tensors())
        below = branch.below
        assert names_of(branch.tensors()) == before
        assert (
            branch.n_tensors
            == len(before)
            == (branch.meta is not None) + sum(child.n_tensors for child in below.values())
        )
        assert branch.n_bytes == 24 * branch.n_tensors
        assert branch.has_below == bool(below)
        for child in below.values():
            check(child)

    check(root.branch)
    assert names_of(root.tensors()) == sorted(keys)


def test_values_are_not_printed_with_all_names_below() -> None:
    assert len(repr(root_of("a.b.c"))) < 100
    assert len(repr(root_of("a.b.c").branch)) < 100
