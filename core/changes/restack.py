"""Stack the layers' tensors along a new axis, or unstack them.

::

    model.layers.0.mlp.up_proj.weight (rows, cols) ┐
    model.layers.1.mlp.up_proj.weight (rows, cols) ├─ stack ─▶   model.layers.mlp.up_proj.weight
    model.layers.2.mlp.up_proj.weight (rows, cols) ┘ ◀─ unstack  (3, rows, cols)

The number that is removed or added is the one after the first name of ``LAYERS`` in the key. So
numbers of experts remain, and the optimizer's entries
(``optimizer.state.model.layers.0.….exp_avg``) follow their parameters. A scalar (the optimizer's
step) becomes one number per layer.

The axis of the layers is the first, or the one that the caller names: programs in JAX that scan
over layers (MaxText: ``param_scan_axis``) stack along axis 1, ``(rows, 3, cols)``. Tensors of one
number per layer have only one axis.

Only fragments change: the layers of a stacked tensor refer to the same arrays as before, through
views with another order of axes unless the axis is the first. What a quantized optimizer state has
beside its codes follows other rules: ``stacked_blocks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from core.arrays.box import Box, Shape
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.facets import MegatronModel, TorchDistFacts
from core.catalog.key_patterns import LIST_THEM, matcher, ranges, some_of
from core.catalog.stored import with_axes
from core.changes.factor_states import check_factors
from core.changes.rename import is_optimizer_key, move_leaves, nest_again, with_parameters
from core.changes.stacked_blocks import StateBlocks, blocks_of_states, with_their_codes
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
"""Maximum length of an axis of layers."""


@dataclass(frozen=True, slots=True)
class RestackedCatalog:
    """A catalog with its layers stacked or unstacked.

    Args:
        catalog: the changed catalog.
        n_groups: number of stacked tensors that were created or split.
        notes: layers that are unchanged, and why.
    """

    catalog: Catalog
    n_groups: int
    notes: tuple[str, ...] = ()


def stack_layers(catalog: Catalog, *, axis: int = 0) -> RestackedCatalog:
    """Stack the tensors that every layer has, in one dtype and shape.

    The highest number after the same first names (``model.layers``) gives the number of layers.
    Tensors that some layers lack, or have in another shape (as in the first layers of many
    mixture-of-experts models), remain one per layer, and so do tensors with too few axes.

    Args:
        axis: number of the new axis, from 0. Scalars are stacked along axis 0 in any case.

    Raises:
        UsageError: no tensor's key has a layer's number, or a stacked key exists already.
        UnsupportedError: the optimizer is SOAP, Shampoo or Adam-mini.
    """
    check_factors(catalog.tensors, option="--stack-layers")
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
            hint=f"the number must follow one of the names {', '.join(LAYERS)}",
        )

    # Choose the groups with the same tensor in every layer; note why the others cannot be stacked.
    blocks = blocks_of_states(catalog, option="--stack-layers", axis=axis)
    parts: dict[str, list[str]] = {}
    unstacked: dict[str, list[str]] = {}
    for (head, tail), members in groups.items():
        if len(members) != n_layers[head]:
            reason = f"not all of the {n_layers[head]} layers have them"
        elif len({(meta.dtype, meta.shape) for meta in members.values()}) > 1:
            reason = "their shapes or dtypes differ between layers"
        elif 0 < len(members[0].shape) < axis:
            reason = f"they have too few axes for layers along axis {axis}"
        else:
            parts[f"{head}.{tail}"] = [members[number].key for number in range(n_layers[head])]
            continue
        unstacked.setdefault(reason, []).append(f"{head}.[{ranges(members)}].{tail}")
    taken = next((key for key in parts if key in catalog.tensors or key in catalog.objects), None)
    if taken is not None:
        raise UsageError("--stack-layers: an entry with this name exists already", key=taken)
    # The scales of states follow their codes.
    layers_of_codes = {keys[0]: set(keys) for keys in parts.values() if keys[0] not in blocks}
    for new, keys in list(parts.items()):
        if keys[0] in blocks:
            codes = [blocks[key].codes for key in keys]
            if set(codes) != layers_of_codes.get(codes[0]):
                reason = "their codes remain one tensor per layer"
                unstacked.setdefault(reason, []).append(new)
                del parts[new]
                continue
            for key in keys:
                blocks[key].check_cut(blocks[key].n_states, option="--stack-layers")
    notes = [
        f"{some_of(keys)} remain one tensor per layer: {reason}"
        for reason, keys in unstacked.items()
    ]
    return RestackedCatalog(
        _replace_by_stacks(catalog, parts, blocks, axis=axis),
        len(parts),
        (*notes, *_numbered_state_notes(catalog)),
    )


def _numbered_state_notes(catalog: Catalog) -> list[str]:
    """Return a note if the optimizer refers to parameters by number, as their numbers changed."""
    if not any(_NUMBERED.search(key) and is_optimizer_key(key) for key in catalog.tensors):
        return []
    note = (
        "the optimizer state refers to parameters by number and is unchanged, "
        "so it no longer matches the model"
    )
    return [note]


def _replace_by_stacks(
    catalog: Catalog,
    parts: Mapping[str, Sequence[str]],
    blocks: Mapping[str, StateBlocks],
    *,
    axis: int,
) -> Catalog:
    """Replace groups of tensors by stacked tensors.

    Args:
        parts: key of each stacked tensor → keys of its layers in order.
        blocks: scales and tables of optimizer states, by key.
        axis: number of the new axis.
    """
    # A stacked tensor takes the position of its first layer.
    new_of = {key: new for new, keys in parts.items() for key in keys}
    tensors: dict[str, TensorMeta] = {}
    for key, meta in catalog.tensors.items():
        new = new_of.get(key, key)
        if new == key:
            tensors[key] = meta
        elif new not in tensors:
            n_layers = len(parts[new])
            shape = _with(meta.shape, axis, n_layers)
            if key in blocks:
                shape = blocks[key].stacked_shape(n_layers)
            tensors[new] = replace(meta, key=new, shape=shape)

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in parts:
            return catalog.fragments(key)
        if parts[key][0] in blocks:
            return [
                replace(blocks[layer].in_stack(fragment, number), key=key)
                for number, layer in enumerate(parts[key])
                for fragment in catalog.fragments(layer)
            ]
        return [
            _place_layer(fragment, key, number, axis=axis)
            for number, layer in enumerate(parts[key])
            for fragment in catalog.fragments(layer)
        ]

    new_keys = {key: (new,) for key, new in new_of.items()}
    renamed = with_parameters(catalog, new_keys)
    skeleton = renamed.skeleton
    return replace(
        _without_replaced(renamed, new_keys),
        tensors=tensors,
        fragments_of=fragments_of,
        skeleton=None if skeleton is None else move_leaves(skeleton, new_of),
    )


def _place_layer(fragment: Fragment, key: str, number: int, *, axis: int) -> Fragment:
    """Place a fragment of a layer in the stacked tensor."""
    box, array, at = fragment.box, fragment.array, fragment.at
    axis = min(axis, box.rank)
    # Axes that an array lacks are those in front. So a new axis behind others needs a view, in
    # which the array has it too.
    n_before = len(at) - (box.rank - axis)
    if array is not None and axis and n_before > 0:
        n_axes = len(at)
        array = with_axes(array, (*range(n_before), None, *range(n_before, n_axes)))
        at = _with(at, n_before, 0)
    return Fragment(key, Box(_with(box.offset, axis, number), _with(box.shape, axis, 1)), array, at)


def unstack_layers(
    catalog: Catalog, patterns: Sequence[str] = (), *, axis: int = 0
) -> RestackedCatalog:
    """Split stacked tensors into one tensor per layer.

    Args:
        patterns: globs of ``core.catalog.key_patterns`` over the keys of stacked tensors. Empty for
            every tensor with ``layers`` in its key and no number after it.
        axis: number of the axis of layers, from 0; of a tensor with one axis it is that axis.

    Raises:
        UsageError: a pattern matches nothing, a key has no position for a number, the numbers of
            layers of tensors after the same names differ, a tensor does not have the axis, or a
            layer's key exists already.
        UnsupportedError: the optimizer is SOAP, Shampoo or Adam-mini.
    """
    check_factors(catalog.tensors, option="--unstack-layers")
    # Find the position of the layer's number in each key. The scales of states follow their codes.
    blocks = blocks_of_states(catalog, option="--unstack-layers", axis=axis)
    heads: dict[str, list[TensorMeta]] = {}
    halves: dict[str, tuple[str, str]] = {}
    keys = with_their_codes(_stacked_keys(catalog, patterns), blocks, order=list(catalog.tensors))
    for key in keys:
        match = _ALL.fullmatch(key)
        if match is None:
            raise UsageError(
                "--unstack-layers: the key has no position for a layer number",
                key=key,
                hint=f"it needs a name such as {LAYERS[0]}; change the key with --rename",
            )
        halves[key] = match["head"], match["tail"]
        if key not in blocks:
            heads.setdefault(match["head"], []).append(catalog.tensors[key])
    # Tensors after the same names belong to the same layers.
    for metas in heads.values():
        _check_layer_axes(metas, axis)

    # Name the layers' tensors.
    parts: dict[str, list[str]] = {}
    for key, (head, tail) in halves.items():
        n_layers = _n_layers(catalog.tensors[blocks[key].codes if key in blocks else key], axis)
        if key in blocks and n_layers:
            n_states = blocks[key].n_states // n_layers
            blocks[key].check_cut(n_states, option="--unstack-layers")
        parts[key] = [f"{head}.{number}.{tail}" for number in range(n_layers)]
        taken = next(
            (new for new in parts[key] if new in catalog.tensors or new in catalog.objects), None
        )
        if taken is not None:
            raise UsageError("--unstack-layers: an entry with this name exists already", key=taken)
    head_of = {key: head for key, (head, _) in halves.items()}
    result = _replace_by_layers(catalog, parts, head_of, blocks, axis=axis)
    return RestackedCatalog(result, len(parts), tuple(_numbered_state_notes(catalog)))


def _stacked_keys(catalog: Catalog, patterns: Sequence[str]) -> list[str]:
    """Return the keys of the stacked tensors that the patterns choose, in order.

    Args:
        patterns: globs; empty for every key with ``layers`` and no number after it.

    Raises:
        UsageError: a pattern matches no stacked tensor.
    """
    # A key that has a number already is a layer, not a stack.
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
        matching = [key for key in candidates if matches(key)]
        if not matching:
            raise UsageError(
                f"--unstack-layers: no stacked tensor matches {pattern!r}", hint=LIST_THEM
            )
        chosen.update(matching)
    return [key for key in candidates if key in chosen]


def _axis_of(meta: TensorMeta, axis: int) -> int:
    """Return the number of a stacked tensor's axis of layers, which may be its only axis."""
    return 0 if len(meta.shape) == 1 else axis


def _n_layers(meta: TensorMeta, axis: int) -> int:
    """Return the number of layers of a stacked tensor."""
    return meta.shape[_axis_of(meta, axis)]


def _check_layer_axes(metas: Sequence[TensorMeta], axis: int) -> None:
    """Raise unless all tensors after the same names have the same number of layers.

    Raises:
        UsageError: the numbers differ or are too large, or a tensor does not have the axis.
    """
    first = metas[0]
    for meta in metas:
        reason = None
        if not meta.shape:
            reason = "a scalar has no layer axis"
        elif _axis_of(meta, axis) >= len(meta.shape):
            reason = f"a tensor of shape {meta.shape} has no axis {axis}"
        elif _n_layers(meta, axis) > MAX_LAYERS:
            reason = f"{_n_layers(meta, axis):,} layers are too many (maximum {MAX_LAYERS:,})"
        elif _n_layers(meta, axis) != _n_layers(first, axis):
            reason = (
                f"{first.key!r} has {_n_layers(first, axis)} layers, "
                f"but this tensor has {_n_layers(meta, axis)}"
            )
        if reason is not None:
            raise UsageError(f"--unstack-layers: {reason}", key=meta.key, hint=_CHOOSE_TENSORS)


_CHOOSE_TENSORS = (
    "choose the stacked tensors with a glob: --unstack-layers GLOB, "
    "and the axis of their layers with --layer-axis N"
)


def _replace_by_layers(
    catalog: Catalog,
    parts: Mapping[str, Sequence[str]],
    head_of: Mapping[str, str],
    blocks: Mapping[str, StateBlocks],
    *,
    axis: int,
) -> Catalog:
    """Replace stacked tensors by one tensor per layer.

    Args:
        parts: key of each stacked tensor → keys of its layers in order.
        head_of: key of each stacked tensor → the names before the layer's number.
        blocks: scales and tables of optimizer states, by key.
        axis: number of the axis of layers.
    """
    # Order all tensors after the same names layer by layer, at the position of the first of them.
    tensors: dict[str, TensorMeta] = {}
    for key, meta in catalog.tensors.items():
        if key not in parts:
            tensors[key] = meta
        elif parts[key] and parts[key][0] not in tensors:
            siblings = [sibling for sibling in parts if head_of[sibling] == head_of[key]]
            for number in range(len(parts[key])):
                for sibling in siblings:
                    new, stacked = parts[sibling][number], catalog.tensors[sibling]
                    shape = (
                        blocks[sibling].layer_shape(len(parts[key]))
                        if sibling in blocks
                        else _without(stacked.shape, _axis_of(stacked, axis))
                    )
                    tensors[new] = replace(stacked, key=new, shape=shape)

    # Cut the fragments of a stack into layers. One pass serves all layers, hence the cache.
    @lru_cache(maxsize=64)
    def layers_of(key: str) -> Sequence[Sequence[Fragment]]:
        if key in blocks:
            n_layers = len(parts[key])
            return [
                [
                    replace(cut, key=new)
                    for fragment in catalog.fragments(key)
                    if (cut := blocks[key].of_layer(fragment, number, n_layers)) is not None
                ]
                for number, new in enumerate(parts[key])
            ]
        layers: list[list[Fragment]] = [[] for _ in parts[key]]
        of_layers = _axis_of(catalog.tensors[key], axis)
        for fragment in catalog.fragments(key):
            for number, layer in _cut_layers(fragment, parts[key], axis=of_layers):
                layers[number].append(layer)
        return layers

    stack_of = {
        new: (key, number) for key, new_keys in parts.items() for number, new in enumerate(new_keys)
    }

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in stack_of:
            return catalog.fragments(key)
        stacked, number = stack_of[key]
        return layers_of(stacked)[number]

    renamed = with_parameters(catalog, parts)
    skeleton = renamed.skeleton
    return replace(
        _without_replaced(renamed, parts),
        tensors=tensors,
        fragments_of=fragments_of,
        skeleton=None if skeleton is None else _split_leaves(skeleton, parts),
    )


def _cut_layers(
    fragment: Fragment, keys: Sequence[str], *, axis: int
) -> Iterator[tuple[int, Fragment]]:
    """Yield the number of each layer in a fragment of a stacked tensor, and the layer's fragment.

    Args:
        keys: keys of all layers in order.
        axis: number of the tensor's axis of layers.
    """
    box, array, at = fragment.box, fragment.array, fragment.at
    inside = Box(_without(box.offset, axis), _without(box.shape, axis))
    # Axes of the array are counted from the last; it may lack the axis of layers.
    position = len(at) - box.rank + axis
    # Further axes of an array are those in front, so the axis of layers becomes the first.
    if array is not None and axis and position > 0:
        array = with_axes(array, (position, *_without(tuple(range(len(at))), position)))
        at = (at[position], *_without(at, position))
        position = 0
    first = box.offset[axis]
    for number in range(first, min(first + box.shape[axis], len(keys))):
        start = at
        if array is not None and position >= 0:
            start = (*at[:position], at[position] + number - first, *at[position + 1 :])
        yield number, Fragment(keys[number], inside, array, start)


def _with(extents: Shape, axis: int, extent: int) -> Shape:
    """Return a shape or an offset with one more axis."""
    return (*extents[:axis], extent, *extents[axis:])


def _without(extents: Shape, axis: int) -> Shape:
    """Return a shape or an offset without one axis."""
    return (*extents[:axis], *extents[axis + 1 :])


def _split_leaves(skeleton: object, parts: Mapping[str, Sequence[str]]) -> object:
    """Replace each stacked leaf of a skeleton by one leaf per layer."""
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        if not isinstance(entry.leaf, TensorLeaf) or entry.key not in parts:
            leaves[entry.path] = entry.leaf
            continue
        for new in parts[entry.key]:
            match = _ONE.fullmatch(new)
            assert match is not None, "the key was built with a number"
            leaves[_layer_path(entry.path, match["head"], match["number"])] = replace(
                entry.leaf, key=new
            )
    return nest_again(leaves)


def _layer_path(path: tuple[object, ...], head: str, number: str) -> tuple[object, ...]:
    """Return the path of a stacked leaf with a layer's number after ``head``."""
    # Nested containers: the number becomes a container of its own.
    for depth in range(1, len(path)):
        if join_path(path[:depth]) == head:
            return (*path[:depth], number, *path[depth:])
    # Names with dots, as in a flat state dict: the number goes into the name that contains the end
    # of ``head``.
    so_far = ""
    for depth, name in enumerate(path):
        inner = head.removeprefix(so_far)
        if str(name).startswith(f"{inner}."):
            return (*path[:depth], f"{inner}.{number}{str(name)[len(inner) :]}", *path[depth + 1 :])
        so_far += f"{name}."
    return path


def _without_replaced(catalog: Catalog, new_of: Mapping[str, Sequence[str]]) -> Catalog:
    """Remove replaced tensors from the aliases, the order and the torch_dist facts of a catalog."""
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
