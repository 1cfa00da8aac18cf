"""Leave out one of two equal tensors, or write a tensor twice.

``tie`` takes nothing on trust: the fragments of the tensor that is left out become replicas of the
original, so the engine compares every byte of both while it copies, and a difference is a
``ReplicaMismatchError``.

The optimizer's entries follow: those of the alias are left out (its moments are sums over another
use of the parameter, and equal to nothing), and a new alias gets copies of the original's, in its
groups too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, Fragment, TargetCatalog, TensorMeta
from core.catalog.key_patterns import LIST_THEM
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
"""(alias, original): the tensor that is left out or added, and the tensor it equals."""


def tie(catalog: Catalog, pairs: Sequence[Pair]) -> Catalog:
    """Leave out the first tensor of each pair, to be proven equal to the second while copying.

    The optimizer's states of the first tensor are left out too.

    Raises:
        UsageError: a tensor is missing, both are the same, or their shapes or dtypes differ.
    """
    for alias, original in pairs:
        catalog = _tie_pair(catalog, alias, original)
    return catalog


def _tie_pair(catalog: Catalog, alias: str, original: str) -> Catalog:
    """Return the catalog without a tensor, whose fragments become replicas of the original's."""
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

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key != original:
            return catalog.fragments(key)
        copies = [replace(fragment, key=original) for fragment in catalog.fragments(alias)]
        return (*catalog.fragments(original), *copies)

    # Leave out the tensor, with what the optimizer has for it.
    owned = {key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == alias}
    removed = {alias, *owned}
    followed = with_parameters(
        catalog, dict.fromkeys([alias, *(entry.parameter for entry in owned.values())], ())
    )
    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = map_leaves(
            skeleton, lambda entry: REMOVED if entry.key in removed else entry.leaf
        )
    return replace(
        followed,
        tensors={key: meta for key, meta in catalog.tensors.items() if key not in removed},
        objects={key: item for key, item in followed.objects.items() if key not in removed},
        fragments_of=fragments_of,
        skeleton=skeleton,
        aliases=_aliases_without(catalog, alias),
    )


def untie(catalog: Catalog, pairs: Sequence[Pair]) -> Catalog:
    """Give the first tensor of each pair bytes of its own, equal to the second's.

    The first may already be an alias of the second (in torch files, tensors that share their
    bytes).

    Raises:
        UsageError: the second tensor is missing, or the first exists and is not its alias.
    """
    for added, original in pairs:
        catalog = _untie_pair(catalog, added, original)
    return catalog


def _untie_pair(catalog: Catalog, added: str, original: str) -> Catalog:
    """Return the catalog with a copy of a tensor and of its optimizer entries under another key."""
    _required_tensor(catalog, original, option="--untie")
    aliases = catalog.aliases
    if added in catalog.tensors or added in catalog.objects:
        if added == original or aliases.get(added, added) != aliases.get(original, original):
            raise UsageError(
                "--untie: this entry exists already, and it does not share the other's bytes",
                key=added,
                hint="leave --untie out",
            )
        return replace(catalog, aliases=_aliases_without(catalog, added))

    # The optimizer's entries of the original are copied too.
    owned = {
        key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == original
    }
    old_of = {added: original, **{entry.of(added): key for key, entry in owned.items()}}
    taken = next((new for new in old_of if new in catalog.tensors or new in catalog.objects), None)
    if taken is not None:
        raise UsageError(
            "--untie: the optimizer already has this entry", key=taken, hint="leave --untie out"
        )

    def fragments_of(key: str) -> Sequence[Fragment]:
        old = old_of.get(key)
        return (
            catalog.fragments(key)
            if old is None
            else [replace(piece, key=key) for piece in catalog.fragments(old)]
        )

    names = {original: (original, added)}
    names |= {entry.parameter: (entry.parameter, entry.name_of(added)) for entry in owned.values()}
    followed = with_parameters(catalog, names)
    tensors = {
        new: replace(catalog.tensors[old], key=new)
        for new, old in old_of.items()
        if old in catalog.tensors
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
        fragments_of=fragments_of,
        skeleton=None if catalog.skeleton is None else _with_leaves(catalog.skeleton, old_of),
    )


def _with_leaves(skeleton: object, old_of: Mapping[str, str]) -> object:
    """Return the skeleton with copies of leaves.

    A copy goes into the container of its original if its key says so, else to the root.

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
            added[new_path(entry, new)] = replace(entry.leaf, key=new) if is_leaf else entry.leaf  # type: ignore[type-var]
    return nest_again({**leaves, **added})


def _required_tensor(catalog: Catalog, key: str, *, option: str) -> TensorMeta:
    """Return a tensor that an option names, or raise a usage error if it is missing."""
    meta = catalog.tensors.get(key)
    if meta is None:
        raise UsageError(f"{option}: tensor not found", key=key, hint=LIST_THEM)
    return meta


def keep_recordable_ties(catalog: Catalog, config: Mapping[str, object] | None) -> Catalog:
    """Return the catalog with only those aliases that a file may record by name, without bytes.

    transformers makes an output layer from the input embedding where the configuration says that
    they are tied, and looks for every other tensor in the files, so those are written with bytes of
    their own.

    Args:
        config: the model's ``config.json``, or None if the destination has none.
    """
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
    note = f"tied tensors are written separately, because transformers loads each by name: {', '.join(separate)}"
    return replace(catalog, aliases=ties).noted([note] if separate else [])


def find_recorded_ties(target: TargetCatalog, images: Iterable[FileImage]) -> dict[str, str]:
    """Return tensor → equal tensor for the tensors of a target that have no bytes in any file."""
    placed = {place.array.name for image in images for place in image.arrays}

    def is_placed(key: str) -> bool:
        return any(
            piece.array is not None and piece.array.name in placed
            for piece in target.fragments(key)
        )

    return {
        key: first
        for key, first in target.aliases.items()
        if key in target.tensors and not is_placed(key)
    }


def aliases_among(aliases: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """Return the aliases among some tensors; the first tensor of each group is the original.

    Args:
        aliases: as ``Catalog.aliases``.
        keys: keys of the tensors that remain, in order.
    """
    first_of: dict[str, str] = {}
    result: dict[str, str] = {}
    for key in keys:
        group = aliases.get(key, key)
        first = first_of.setdefault(group, key)
        if first != key:
            result[key] = first
    return result


def _aliases_without(catalog: Catalog, alias: str) -> dict[str, str]:
    """Return the aliases among all tensors but one."""
    return aliases_among(catalog.aliases, [key for key in catalog.tensors if key != alias])
