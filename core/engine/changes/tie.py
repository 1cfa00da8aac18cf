"""Drop one of two equal tensors, or write a tensor twice.

``tie`` proves that the tensors are equal: the fragments of the dropped tensor become replicas of
the original, so the engine compares every byte of both while it copies, and a difference is a
``ReplicaMismatchError``.

The optimizer's entries follow. Those of a dropped tensor are dropped too, without a comparison: its
moments come from another use of the parameter and differ from the original's. A tensor that is
added gets copies of the original's entries, and is added to the same groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.key_patterns import LIST_THEM
from core.engine.catalog.removal import record_unlisted, remove_entries
from core.engine.catalog.tensor import Tensor
from core.engine.changes.rename import nest_again, new_path, owned_entries, with_parameters
from core.errors import UsageError
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import entries

OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
INPUT = re.compile(r"(^|\.)(embed_tokens|embed_in|word_embeddings|wte)\.weight$")
"""Names of the output layer and the input embedding of a language model in transformers."""

Pair = tuple[str, str]
"""The tensor that is dropped or added, and the tensor that it equals, its original."""


def tie(catalog: Catalog, pairs: Sequence[Pair]) -> Catalog:
    """Drop the first tensor of each pair; copying then proves that it equals the second.

    The optimizer's state of the first tensor is dropped too.

    Raises:
        UsageError: a tensor is missing, both are the same, or their shapes or dtypes differ.
    """
    for alias, original in pairs:
        catalog = _tie_pair(catalog, alias, original)
    return catalog


def _tie_pair(catalog: Catalog, alias: str, original: str) -> Catalog:
    """Drop a tensor and make its fragments replicas of the original's."""
    # Shapes and dtypes can be compared now, the bytes only while copying.
    first, second = (_required_tensor(catalog, key, option="--tie") for key in (alias, original))
    if alias == original:
        raise UsageError("--tie: a tensor cannot be tied to itself", key=alias)
    for attribute, a, b in (
        ("shape", first.shape, second.shape),
        ("dtype", first.dtype, second.dtype),
    ):
        if a != b:
            raise UsageError(
                f"--tie: {alias!r} has {attribute} {a}, but {original!r} has {attribute} {b}",
                key=alias,
                hint="omit --tie, or choose two tensors with the same shape and dtype",
            )

    # Drop the tensor, with the optimizer's entries for it.
    owned = {key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == alias}
    followed = with_parameters(
        catalog, dict.fromkeys([alias, *(entry.parameter for entry in owned.values())], ())
    )
    remaining = remove_entries(followed, {alias, *owned})
    both = second.with_replicas(first)
    tensors = {
        key: both if tensor is second else tensor for key, tensor in remaining.tensors.items()
    }
    return record_unlisted(replace(remaining, tensors=tensors), catalog, "tied")


def untie(catalog: Catalog, pairs: Sequence[Pair]) -> Catalog:
    """Store the first tensor of each pair separately, as a copy of the second.

    The first may exist already if it is tied to the second (in torch files, tensors that share
    their bytes).

    Raises:
        UsageError: the second tensor is missing, or the first exists and is not tied to it.
    """
    for added, original in pairs:
        catalog = _untie_pair(catalog, added, original)
    return catalog


def _untie_pair(catalog: Catalog, added: str, original: str) -> Catalog:
    """Add a copy of a tensor and of its optimizer entries under another key."""
    _required_tensor(catalog, original, option="--untie")
    # An existing tensor only stops being tied.
    tensor = catalog.tensors[original]
    if added in catalog.tensors or added in catalog.objects:
        if added == original or catalog.tensors.get(added) is not tensor:
            raise UsageError(
                f"--untie: this entry already exists and is not tied to {original!r}",
                key=added,
                hint="omit --untie",
            )
        return replace(catalog, tensors={**catalog.tensors, added: replace(tensor)})

    # Name the copies: of the tensor and of the optimizer's entries for it.
    owned = {
        key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == original
    }
    old_of = {added: original, **{entry.of(added): key for key, entry in owned.items()}}
    taken = next((new for new in old_of if new in catalog.tensors or new in catalog.objects), None)
    if taken is not None:
        raise UsageError(
            "--untie: the optimizer state already has this entry", key=taken, hint="omit --untie"
        )

    # Add them to the parameter groups and to the catalog.
    names = {original: (original, added)}
    names |= {entry.parameter: (entry.parameter, entry.name_of(added)) for entry in owned.values()}
    followed = with_parameters(catalog, names)
    tensors = {
        new: replace(catalog.tensors[old]) for new, old in old_of.items() if old in catalog.tensors
    }
    objects = {
        new: replace(catalog.objects[old], key=new)
        for new, old in old_of.items()
        if old in catalog.objects
    }
    return replace(
        followed,
        tensors={**catalog.tensors, **tensors},
        objects={**followed.objects, **objects},
        skeleton=None if followed.skeleton is None else _copy_leaves(followed.skeleton, old_of),
    )


def _copy_leaves(skeleton: object, old_of: Mapping[str, str]) -> object:
    """Add copies of leaves to a skeleton.

    A copy goes into the container of its original if its key begins with that path, else to the
    root.

    Args:
        old_of: key of each copy → key of its original.
    """
    new_of = {old: new for new, old in old_of.items()}
    leaves: dict[tuple[object, ...], object] = {}
    added: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        leaves[entry.path] = entry.leaf
        new = new_of.get(entry.key)
        if new is not None:
            is_leaf = isinstance(entry.leaf, (TensorLeaf, ObjectLeaf))
            copy = replace(entry.leaf, key=new) if is_leaf else entry.leaf  # type: ignore[type-var]
            added[new_path(entry, new)] = copy
    return nest_again({**leaves, **added})


def _required_tensor(catalog: Catalog, key: str, *, option: str) -> Tensor:
    """Return a tensor that an option names.

    Raises:
        UsageError: the catalog has no such tensor.
    """
    tensor = catalog.tensors.get(key)
    if tensor is None:
        raise UsageError(f"{option}: the checkpoint has no such tensor", key=key, hint=LIST_THEM)
    return tensor


def keep_recordable_ties(catalog: Catalog, config: Mapping[str, object] | None) -> Catalog:
    """Keep only the ties that a file may record by name, without bytes.

    transformers shares the input embedding with the output layer if the configuration declares them
    tied. It looks for every other tensor in the files, so these are written separately.

    Args:
        config: the model's ``config.json``, or None if the destination has none.
    """
    # The first name of a tensor is the one with bytes: it must not be that of the output layer.
    tied = {*catalog.ties, *catalog.ties.values()}
    last = [key for key in catalog.tensors if key in tied and OUTPUT.search(key)]
    order = [*(key for key in catalog.tensors if key not in last), *last]
    catalog = replace(catalog, tensors={key: catalog.tensors[key] for key in order})
    if config is None:
        return catalog
    is_tied = config.get("tie_word_embeddings") is True
    lost = {
        key: first
        for key, first in catalog.ties.items()
        if not (is_tied and OUTPUT.search(key) and INPUT.search(first))
    }
    copies = {key: replace(catalog.tensors[key]) for key in lost}
    separate = [f"{key} ({first})" for key, first in lost.items()]
    note = (
        "tied tensors are written separately, because transformers loads each by name: "
        f"{', '.join(separate)}"
    )
    catalog = replace(catalog, tensors={**catalog.tensors, **copies})
    return catalog.noted([note] if separate else [])
