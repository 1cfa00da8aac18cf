"""Stack the layers' tensors along a new first axis, or take them apart.

::

    model.layers.0.mlp.up_proj.weight (rows, cols) ┐
    model.layers.1.mlp.up_proj.weight (rows, cols) ├─ stack ─▶  model.layers.mlp.up_proj.weight (3,
    rows, cols)
    model.layers.2.mlp.up_proj.weight (rows, cols) ┘ ◀ unstack ─

The number that is removed or added is the one behind the first name of ``LAYERS`` in the key. So
numbers of experts stay, and the optimizer's entries (``optimizer.state.model.layers.0.….exp_avg``)
follow their parameters. A scalar (the optimizer's step) becomes one number per layer.

Only fragments change: a layer of a stacked tensor lies where it lay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from core.arrays.box import Box
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.facets import MegatronModel, TorchDistFacts
from core.catalog.key_patterns import LIST_THEM, matcher, ranges, some_of
from core.changes.rename import is_optimizer_key, move_leaves, nest_again, with_parameters
from core.changes.tie import aliases_among
from core.errors import UsageError
from core.pickle.inert import TensorLeaf
from core.pickle.nesting import entries, join_path

LAYERS = ("layers", "layer", "h", "blocks", "block")
"""Names that come before the number of a model's layer."""

_NAMES = "|".join(LAYERS)
_ONE = re.compile(
    rf"(?P<head>(?:.*?\.)??(?:{_NAMES}))\.(?P<number>0|[1-9]\d{{0,8}})\.(?P<tail>.+)", re.DOTALL
)
_ALL = re.compile(rf"(?P<head>(?:.*?\.)??(?:{_NAMES}))\.(?P<tail>(?!\d+\.).+)", re.DOTALL)
_USUAL = re.compile(rf"(?:.*?\.)??{LAYERS[0]}\.(?!\d+\.).+", re.DOTALL)
_NUMBERED = re.compile(r"(^|\.)state\.\d+\.[^.]+$")
MAX_LAYERS = 10_000
"""A tensor with a longer first axis is not taken for stacked layers."""


@dataclass(frozen=True, slots=True)
class RestackedCatalog:
    """A catalog with its layers stacked or taken apart.

    Args:
        catalog: the changed catalog.
        n_groups: how many stacked tensors were made or taken apart.
        notes: layers that stayed as they were, and why.
    """

    catalog: Catalog
    n_groups: int
    notes: tuple[str, ...] = ()


def stack_layers(catalog: Catalog) -> RestackedCatalog:
    """Stack the tensors that every layer has, in one dtype and shape.

    The highest number behind the same first names (``model.layers``) determines how many layers
    there are. Tensors that some layers lack, or have in another shape (the first layers of many
    mixture-of-experts models), stay one per layer.

    Raises:
        UsageError: no tensor's key has a layer's number, or a stacked key exists already.
    """
    # Group the tensors by their keys without the number of the layer.
    groups: dict[tuple[str, str], dict[int, TensorMeta]] = {}
    n_layers: dict[str, int] = {}
    for key, meta in catalog.tensors.items():
        match = _ONE.fullmatch(key)
        if match is not None:
            number = int(match["number"])
            groups.setdefault((match["head"], match["tail"]), {})[number] = meta
            n_layers[match["head"]] = max(n_layers.get(match["head"], 0), number + 1)
    if not groups:
        raise UsageError(
            "--stack-layers: no key has a layer number",
            hint=f"it must follow one of the names {', '.join(LAYERS)}",
        )

    # Stack the groups that have the same tensor in every layer, and say why the others cannot be stacked.
    parts: dict[str, list[str]] = {}
    unstacked: dict[str, list[str]] = {}
    for (head, tail), members in groups.items():
        reason = _reason_against_stacking(members, n_layers[head])
        if reason is None:
            parts[f"{head}.{tail}"] = [members[number].key for number in range(n_layers[head])]
        else:
            unstacked.setdefault(reason, []).append(f"{head}.[{ranges(members)}].{tail}")
    taken = next((key for key in parts if key in catalog.tensors or key in catalog.objects), None)
    if taken is not None:
        raise UsageError("--stack-layers: an entry with this name exists already", key=taken)
    notes = [
        f"{some_of(keys)} stay one tensor per layer: {reason}" for reason, keys in unstacked.items()
    ]
    return RestackedCatalog(
        _with_stacked(catalog, parts), len(parts), (*notes, *_numbered_state_notes(catalog))
    )


def _numbered_state_notes(catalog: Catalog) -> list[str]:
    """Return a note if the optimizer counts the parameters, whose number has changed."""
    if not any(_NUMBERED.search(key) and is_optimizer_key(key) for key in catalog.tensors):
        return []
    return [
        "the optimizer state refers to parameters by number and is unchanged, so it no longer matches the model"
    ]


def _reason_against_stacking(members: Mapping[int, TensorMeta], n_layers: int) -> str | None:
    """Return why a group of tensors cannot be stacked, or None if it can."""
    if len(members) != n_layers:
        return f"not all of the {n_layers} layers have them"
    if len({(meta.dtype, meta.shape) for meta in members.values()}) > 1:
        return "their shapes or dtypes differ between layers"
    return None


def _with_stacked(catalog: Catalog, parts: Mapping[str, Sequence[str]]) -> Catalog:
    """Return the catalog with groups of tensors stacked.

    Args:
        parts: key of each stacked tensor → keys of its layers in order.
    """
    new_of = {key: new for new, keys in parts.items() for key in keys}
    tensors: dict[str, TensorMeta] = {}
    for key, meta in catalog.tensors.items():
        new = new_of.get(key, key)
        if new == key:
            tensors[key] = meta
        elif new not in tensors:
            tensors[new] = replace(meta, key=new, shape=(len(parts[new]), *meta.shape))

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in parts:
            return catalog.fragments(key)
        return [
            Fragment(key, Box((number, *old.box.offset), (1, *old.box.shape)), old.array, old.at)
            for number, layer in enumerate(parts[key])
            for old in catalog.fragments(layer)
        ]

    skeleton = catalog.skeleton
    new_keys = {key: (new,) for key, new in new_of.items()}
    return replace(
        _without_replaced(with_parameters(catalog, new_keys), new_keys),
        tensors=tensors,
        fragments_of=fragments_of,
        skeleton=None if skeleton is None else move_leaves(skeleton, new_of),
    )


def unstack_layers(catalog: Catalog, patterns: Sequence[str] = ()) -> RestackedCatalog:
    """Take stacked tensors apart, into one tensor per layer.

    Args:
        patterns: globs of ``core.catalog.key_patterns`` over the keys of stacked tensors. Without
            any: every tensor with ``layers`` in its key, and no number behind it.

    Raises:
        UsageError: a pattern matches nothing, a key has no position for a number, the first axes of
            tensors behind the same names differ, or a layer's key exists already.
    """
    # Find where in each key the layer's number goes.
    heads: dict[str, list[TensorMeta]] = {}
    halves: dict[str, tuple[str, str]] = {}
    for key in _stacked_keys(catalog, patterns):
        match = _ALL.fullmatch(key)
        if match is None:
            raise UsageError(
                "--unstack-layers: the key has no position for a layer number",
                key=key,
                hint=f"it needs a name such as {LAYERS[0]}; change the key with --rename",
            )
        halves[key] = match["head"], match["tail"]
        heads.setdefault(match["head"], []).append(catalog.tensors[key])
    for metas in heads.values():
        _check_first_axes(metas)

    # Name the layers' tensors.
    parts: dict[str, list[str]] = {}
    for key, (head, tail) in halves.items():
        parts[key] = [f"{head}.{number}.{tail}" for number in range(catalog.tensors[key].shape[0])]
        taken = next(
            (new for new in parts[key] if new in catalog.tensors or new in catalog.objects), None
        )
        if taken is not None:
            raise UsageError("--unstack-layers: an entry with this name exists already", key=taken)
    result = _with_unstacked(catalog, parts, {key: head for key, (head, _) in halves.items()})
    return RestackedCatalog(result, len(parts), tuple(_numbered_state_notes(catalog)))


def _stacked_keys(catalog: Catalog, patterns: Sequence[str]) -> list[str]:
    """Return the keys of the stacked tensors that the patterns choose, in order.

    Args:
        patterns: globs; none choose every key with ``layers`` and no number behind it.

    Raises:
        UsageError: a pattern matches no stacked tensor.
    """
    candidates = [key for key in catalog.tensors if _ONE.fullmatch(key) is None]
    if not patterns:
        keys = [key for key in candidates if _USUAL.fullmatch(key) is not None]
        if not keys:
            raise UsageError(
                "--unstack-layers: no key looks like a stack of layers",
                hint="such keys contain 'layers'; name other stacked tensors with a glob",
            )
        return keys
    chosen: set[str] = set()
    for pattern in patterns:
        matches = matcher(pattern)
        hits = [key for key in candidates if matches(key)]
        if not hits:
            raise UsageError(
                f"--unstack-layers: no stacked tensor matches {pattern!r}", hint=LIST_THEM
            )
        chosen.update(hits)
    return [key for key in candidates if key in chosen]


def _check_first_axes(metas: Sequence[TensorMeta]) -> None:
    """Raise unless all tensors behind the same names have the same number of layers.

    Raises:
        UsageError: the numbers differ, are too large, or a tensor is a scalar.
    """
    first = metas[0]
    for meta in metas:
        if not meta.shape or meta.shape[0] > MAX_LAYERS:
            reason = (
                f"{meta.shape[0]} layers are too many"
                if meta.shape
                else "a scalar has no layer axis"
            )
            raise UsageError(f"--unstack-layers: {reason}", key=meta.key, hint=_CHOOSE_TENSORS)
        if meta.shape[0] != first.shape[0]:
            raise UsageError(
                f"--unstack-layers: {first.key!r} has {first.shape[0]} layers, but this tensor {meta.shape[0]}",
                key=meta.key,
                hint=_CHOOSE_TENSORS,
            )


_CHOOSE_TENSORS = "choose the stacked tensors with a glob: --unstack-layers GLOB"


def _with_unstacked(
    catalog: Catalog, parts: Mapping[str, Sequence[str]], head_of: Mapping[str, str]
) -> Catalog:
    """Return the catalog with stacked tensors taken apart.

    Args:
        parts: key of each stacked tensor → keys of its layers in order.
        head_of: key of each stacked tensor → the names before the layer's number.
    """
    # All tensors behind the same names come layer by layer, where the first of them was.
    tensors: dict[str, TensorMeta] = {}
    for key, meta in catalog.tensors.items():
        if key not in parts:
            tensors[key] = meta
        elif parts[key] and parts[key][0] not in tensors:
            siblings = [sibling for sibling in parts if head_of[sibling] == head_of[key]]
            for number in range(meta.shape[0]):
                for sibling in siblings:
                    new, stacked = parts[sibling][number], catalog.tensors[sibling]
                    tensors[new] = replace(stacked, key=new, shape=stacked.shape[1:])

    @lru_cache(maxsize=64)
    def layers_of(key: str) -> Sequence[Sequence[Fragment]]:
        layers: list[list[Fragment]] = [[] for _ in parts[key]]
        for fragment in catalog.fragments(key):
            first = fragment.box.offset[0]
            for number in range(first, min(first + fragment.box.shape[0], len(layers))):
                layers[number].append(_layer(fragment, parts[key][number], number))
        return layers

    stack_of = {
        new: (key, number) for key, new_keys in parts.items() for number, new in enumerate(new_keys)
    }

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in stack_of:
            return catalog.fragments(key)
        stacked, number = stack_of[key]
        return layers_of(stacked)[number]

    skeleton = catalog.skeleton
    return replace(
        _without_replaced(with_parameters(catalog, parts), parts),
        tensors=tensors,
        fragments_of=fragments_of,
        skeleton=None if skeleton is None else _with_layers(skeleton, parts),
    )


def _layer(fragment: Fragment, key: str, number: int) -> Fragment:
    """Return one layer of a fragment of a stacked tensor."""
    box, at = fragment.box, fragment.at
    axis = len(at) - box.rank
    if fragment.array is not None and axis >= 0:  # the array has the axis of layers too
        at = (*at[:axis], at[axis] + number - box.offset[0], *at[axis + 1 :])
    return Fragment(key, Box(box.offset[1:], box.shape[1:]), fragment.array, at)


def _with_layers(skeleton: object, parts: Mapping[str, Sequence[str]]) -> object:
    """Return a skeleton in which each stacked leaf is replaced by a leaf for every layer."""
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        if not isinstance(entry.leaf, TensorLeaf) or entry.key not in parts:
            leaves[entry.path] = entry.leaf
            continue
        for new in parts[entry.key]:
            match = _ONE.fullmatch(new)
            assert match is not None, "the key was made with a number"
            leaves[_layer_path(entry.path, match["head"], match["number"])] = replace(
                entry.leaf, key=new
            )
    return nest_again(leaves)


def _layer_path(path: tuple[object, ...], head: str, number: str) -> tuple[object, ...]:
    """Return the path of a stacked leaf with a layer's number behind ``head``."""
    for depth in range(1, len(path)):
        if join_path(path[:depth]) == head:
            return (*path[:depth], number, *path[depth:])
    so_far = ""
    for depth, name in enumerate(path):
        inner = head.removeprefix(so_far)
        if str(name).startswith(f"{inner}."):
            return (*path[:depth], f"{inner}.{number}{str(name)[len(inner) :]}", *path[depth + 1 :])
        so_far += f"{name}."
    return path


def _without_replaced(catalog: Catalog, new_of: Mapping[str, Sequence[str]]) -> Catalog:
    """Return the catalog without the aliases, order and torch_dist facts of replaced tensors."""
    model, torch_dist = catalog.facet(MegatronModel), catalog.facet(TorchDistFacts)
    if model is not None and model.order is not None:
        order = tuple(dict.fromkeys(new for key in model.order for new in new_of.get(key, (key,))))
        catalog = catalog.with_facet(replace(model, order=order))
    if torch_dist is not None and torch_dist.mcore_data is not None:
        mcore_data = {
            key: facts for key, facts in torch_dist.mcore_data.items() if key not in new_of
        }
        catalog = catalog.with_facet(replace(torch_dist, mcore_data=mcore_data))
    return replace(
        catalog,
        aliases=aliases_among(
            catalog.aliases, [key for key in catalog.tensors if key not in new_of]
        ),
    )
