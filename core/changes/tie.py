"""Drop one of two equal tensors, or write a tensor twice.

``tie`` proves that the tensors are equal: the fragments of the dropped tensor become replicas of
the original, so the engine compares every byte of both while it copies, and a difference is a
``ReplicaMismatchError``.

The optimizer's entries follow. Those of a dropped alias are dropped too, without a comparison: its
moments come from another use of the parameter and differ from the original's. A new alias gets
copies of the original's entries, and is added to the same groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, TargetCatalog
from core.catalog.key_patterns import LIST_THEM
from core.catalog.removal import aliases_among, record_left_out
from core.catalog.tensor import Tensor
from core.changes.rename import nest_again, new_path, owned_entries, with_parameters
from core.errors import UsageError
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import REMOVED, entries, map_leaves

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage

OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
INPUT = re.compile(r"(^|\.)(embed_tokens|embed_in|word_embeddings|wte)\.weight$")
"""Names of the output layer and the input embedding of a language model in transformers."""

Pair = tuple[str, str]
"""(alias, original): the tensor that is dropped or added, and the tensor that it equals."""


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
                f"--tie: {alias!r} has {attribute} {a}, but {original!r} has {b}",
                key=alias,
                hint="only equal tensors can be tied",
            )

    # Drop the tensor, with the optimizer's entries for it.
    owned = {key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == alias}
    removed = {alias, *owned}
    followed = with_parameters(
        catalog, dict.fromkeys([alias, *(entry.parameter for entry in owned.values())], ())
    )
    skeleton = followed.skeleton
    if skeleton is not None:
        skeleton = map_leaves(
            skeleton, lambda entry: REMOVED if entry.key in removed else entry.leaf
        )
    tied = replace(
        followed,
        tensors={
            key: tensor.with_replicas(first) if key == original else tensor
            for key, tensor in catalog.tensors.items()
            if key not in removed
        },
        objects={key: item for key, item in followed.objects.items() if key not in removed},
        skeleton=skeleton,
        aliases=_aliases_without(catalog, alias),
    )
    return record_left_out(tied, catalog, "tied")


def untie(catalog: Catalog, pairs: Sequence[Pair]) -> Catalog:
    """Store the first tensor of each pair separately, as a copy of the second.

    The first may exist already if it is an alias of the second (in torch files, tensors that share
    their bytes).

    Raises:
        UsageError: the second tensor is missing, or the first exists and is not its alias.
    """
    for added, original in pairs:
        catalog = _untie_pair(catalog, added, original)
    return catalog


def _untie_pair(catalog: Catalog, added: str, original: str) -> Catalog:
    """Add a copy of a tensor and of its optimizer entries under another key."""
    _required_tensor(catalog, original, option="--untie")
    # An existing tensor only stops being an alias.
    aliases = catalog.aliases
    if added in catalog.tensors or added in catalog.objects:
        if added == original or aliases.get(added, added) != aliases.get(original, original):
            raise UsageError(
                "--untie: this entry exists already and does not share the bytes of the other",
                key=added,
                hint="omit --untie",
            )
        return replace(catalog, aliases=_aliases_without(catalog, added))

    # Name the copies: of the tensor and of the optimizer's entries for it.
    owned = {
        key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == original
    }
    old_of = {added: original, **{entry.of(added): key for key, entry in owned.items()}}
    taken = next((new for new in old_of if new in catalog.tensors or new in catalog.objects), None)
    if taken is not None:
        raise UsageError(
            "--untie: the optimizer already has this entry", key=taken, hint="omit --untie"
        )

    # Add them to the parameter groups and to the catalog.
    names = {original: (original, added)}
    names |= {entry.parameter: (entry.parameter, entry.name_of(added)) for entry in owned.values()}
    followed = with_parameters(catalog, names)
    tensors = {new: catalog.tensors[old] for new, old in old_of.items() if old in catalog.tensors}
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
    meta = catalog.tensors.get(key)
    if meta is None:
        raise UsageError(f"{option}: tensor not found", key=key, hint=LIST_THEM)
    return meta


def keep_recordable_ties(catalog: Catalog, config: Mapping[str, object] | None) -> Catalog:
    """Keep only the aliases that a file may record by name, without bytes.

    transformers shares the input embedding with the output layer if the configuration declares them
    tied. It looks for every other tensor in the files, so these are written separately.

    Args:
        config: the model's ``config.json``, or None if the destination has none.
    """
    # The first tensor of a group is its original: the output layer must not be the first.
    outputs_last = sorted(catalog.tensors, key=lambda key: OUTPUT.search(key) is not None)
    aliases = aliases_among(catalog.aliases, outputs_last)
    if config is None:
        return replace(catalog, aliases=aliases)
    is_tied = config.get("tie_word_embeddings") is True
    ties = {
        key: first
        for key, first in aliases.items()
        if is_tied and OUTPUT.search(key) and INPUT.search(first)
    }
    separate = [f"{key} ({first})" for key, first in aliases.items() if key not in ties]
    note = (
        "tied tensors are written separately, because transformers loads each by name: "
        f"{', '.join(separate)}"
    )
    return replace(catalog, aliases=ties).noted([note] if separate else [])


def find_recorded_ties(target: TargetCatalog, images: Iterable[FileImage]) -> dict[str, str]:
    """Return tensor → equal tensor for the tensors of a target that have no bytes in any file."""
    placed = {place.array.name for image in images for place in image.arrays}

    def is_placed(key: str) -> bool:
        return any(
            fragment.array is not None and fragment.array.name in placed
            for fragment in target.fragments(key)
        )

    return {
        key: first
        for key, first in target.aliases.items()
        if key in target.tensors and not is_placed(key)
    }


def _aliases_without(catalog: Catalog, alias: str) -> dict[str, str]:
    """Return the aliases among all tensors except one."""
    return aliases_among(catalog.aliases, [key for key in catalog.tensors if key != alias])
