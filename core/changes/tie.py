"""Tied tensors: leaving one of two equal ones out, and writing one twice.

``tie`` trusts nobody: the fragments of the tensor that goes become replicas of the one that stays, so the engine
compares every byte of both while it copies, and a difference is a ``ReplicaMismatchError``.

The optimizer's entries follow: those of the tensor that goes are left out (their moments are sums over another use of
the parameter, and equal to nothing), and one that comes gets copies of the other's, in its groups too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, Fragment, TargetCatalog, TensorMeta
from core.catalog.key_patterns import LIST_THEM
from core.changes.rename import nested_again, new_path, owned_entries, with_parameters
from core.errors import UsageError
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import REMOVED, entries, map_leaves

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage

OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
INPUT = re.compile(r"(^|\.)(embed_tokens|embed_in|word_embeddings|wte)\.weight$")
"""What transformers calls the output layer and the input embedding of a language model."""

Pair = tuple[str, str]
"""(the tensor that goes or comes, the one it equals)."""


def tie(catalog: Catalog, pairs: Sequence[Pair]) -> Catalog:
    """Leaves the first tensor of each pair out, to be proven equal to the second while copying; its states with it.

    Raises:
        UsageError: there is no such tensor, both are the same, or their shapes or dtypes differ.
    """
    for gone, kept in pairs:
        catalog = _tied(catalog, gone, kept)
    return catalog


def _tied(catalog: Catalog, gone: str, kept: str) -> Catalog:
    first, second = (_found(catalog, key, option="--tie") for key in (gone, kept))
    if gone == kept:
        raise UsageError("--tie: a tensor cannot be tied to itself", key=gone)
    for what, a, b in (("shape", first.shape, second.shape), ("dtype", first.dtype, second.dtype)):
        if a != b:
            raise UsageError(
                f"--tie: {gone!r} has {what} {a}, but {kept!r} has {b}", key=gone, hint="only equal tensors can be tied"
            )

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key != kept:
            return catalog.fragments(key)
        copies = [replace(fragment, key=kept) for fragment in catalog.fragments(gone)]
        return (*catalog.fragments(kept), *copies)

    owned = {key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == gone}
    out = {gone, *owned}
    followed = with_parameters(catalog, dict.fromkeys([gone, *(entry.parameter for entry in owned.values())], ()))
    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = map_leaves(skeleton, lambda entry: REMOVED if entry.key in out else entry.leaf)
    return replace(
        followed,
        tensors={key: meta for key, meta in catalog.tensors.items() if key not in out},
        objects={key: item for key, item in followed.objects.items() if key not in out},
        fragments_of=fragments_of,
        skeleton=skeleton,
        aliases=_without(catalog, gone),
    )


def untie(catalog: Catalog, pairs: Sequence[Pair]) -> Catalog:
    """Gives the first tensor of each pair bytes of its own, equal to the second's.

    It may be there already as an alias (in torch files, tensors that share their bytes).

    Raises:
        UsageError: the second does not exist, or the first exists and is not its alias.
    """
    for added, original in pairs:
        catalog = _untied(catalog, added, original)
    return catalog


def _untied(catalog: Catalog, added: str, original: str) -> Catalog:
    _found(catalog, original, option="--untie")
    aliases = catalog.aliases
    if added in catalog.tensors or added in catalog.objects:
        if added == original or aliases.get(added, added) != aliases.get(original, original):
            raise UsageError(
                "--untie: there is such an entry already, and it does not share the other's bytes",
                key=added,
                hint="leave --untie out",
            )
        return replace(catalog, aliases=_without(catalog, added))

    owned = {key: entry for key, entry in owned_entries(catalog).items() if entry.tensor == original}
    old_of = {added: original, **{entry.of(added): key for key, entry in owned.items()}}
    taken = next((new for new in old_of if new in catalog.tensors or new in catalog.objects), None)
    if taken is not None:
        raise UsageError("--untie: the optimizer has such an entry already", key=taken, hint="leave --untie out")

    def fragments_of(key: str) -> Sequence[Fragment]:
        old = old_of.get(key)
        return catalog.fragments(key) if old is None else [replace(piece, key=key) for piece in catalog.fragments(old)]

    names = {original: (original, added)}
    names |= {entry.parameter: (entry.parameter, entry.name_of(added)) for entry in owned.values()}
    followed = with_parameters(catalog, names)
    tensors = {new: replace(catalog.tensors[old], key=new) for new, old in old_of.items() if old in catalog.tensors}
    objects = {new: replace(catalog.objects[old], key=new) for new, old in old_of.items() if old in catalog.objects}
    return replace(
        followed,
        tensors={**catalog.tensors, **tensors},
        objects={**followed.objects, **objects},
        fragments_of=fragments_of,
        skeleton=None if catalog.skeleton is None else _with_leaves(catalog.skeleton, old_of),
    )


def _with_leaves(skeleton: object, old_of: Mapping[str, str]) -> object:
    """The skeleton with more leaves: in the containers of the originals if their keys say so, else at the root."""
    new_of = {old: new for new, old in old_of.items()}
    leaves: dict[tuple[object, ...], object] = {}
    added: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        leaves[entry.path] = entry.leaf
        new = new_of.get(entry.key)
        if new is not None:
            is_leaf = isinstance(entry.leaf, (TensorLeaf, ObjectLeaf))
            added[new_path(entry, new)] = replace(entry.leaf, key=new) if is_leaf else entry.leaf  # type: ignore[type-var]
    return nested_again({**leaves, **added})


def _found(catalog: Catalog, key: str, *, option: str) -> TensorMeta:
    meta = catalog.tensors.get(key)
    if meta is None:
        raise UsageError(f"{option}: there is no such tensor", key=key, hint=LIST_THEM)
    return meta


def recordable(catalog: Catalog, config: Mapping[str, object] | None) -> Catalog:
    """Return the catalog with those aliases that may be names only, in a file that holds each group's bytes once.

    transformers makes an output layer from the input embedding where the configuration says that they are tied, and
    looks for every other tensor in the files, so those are written with bytes of their own.

    Args:
        config: the model's ``config.json``, None where there is none beside the weights.
    """
    outputs_last = sorted(catalog.tensors, key=lambda key: OUTPUT.search(key) is not None)
    aliases = aliases_among(catalog.aliases, outputs_last)
    if config is None:
        return replace(catalog, aliases=aliases)
    is_tied = config.get("tie_word_embeddings") is True
    kept = {key: first for key, first in aliases.items() if is_tied and OUTPUT.search(key) and INPUT.search(first)}
    twice = [f"{key} ({first})" for key, first in aliases.items() if key not in kept]
    note = f"tied tensors are written separately, as transformers looks for each: {', '.join(twice)}"
    return replace(catalog, aliases=kept).noted([note] if twice else [])


def recorded(target: TargetCatalog, images: Iterable[FileImage]) -> dict[str, str]:
    """Return tensor → the equal one in its place, for the tensors of a target that no file holds bytes of."""
    placed = {place.array.name for image in images for place in image.arrays}

    def is_placed(key: str) -> bool:
        return any(piece.array is not None and piece.array.name in placed for piece in target.fragments(key))

    return {key: first for key, first in target.aliases.items() if key in target.tensors and not is_placed(key)}


def aliases_among(aliases: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """The aliases among the tensors that remain; the first of them stands for each group.

    Args:
        aliases: ``Catalog.aliases``.
        keys: of the tensors that remain, in order.
    """
    first_of: dict[str, str] = {}
    kept: dict[str, str] = {}
    for key in keys:
        group = aliases.get(key, key)
        first = first_of.setdefault(group, key)
        if first != key:
            kept[key] = first
    return kept


def _without(catalog: Catalog, gone: str) -> dict[str, str]:
    """The aliases, ``gone`` not among them."""
    return aliases_among(catalog.aliases, [key for key in catalog.tensors if key != gone])
