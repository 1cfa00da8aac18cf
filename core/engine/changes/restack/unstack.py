"""Split stacked tensors into the layers' tensors; ``restack.stack`` describes both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.key_patterns import LIST_THEM, matcher
from core.engine.catalog.tensor import Tensor
from core.engine.changes.factor_states import check_factors
from core.engine.changes.rename import nest_again, with_parameters
from core.engine.changes.restack.layer_keys import (
    ALL_LAYERS,
    LAYERS,
    MAX_LAYERS,
    ONE_LAYER,
    USUAL_STACK,
    RestackedCatalog,
    numbered_state_notes,
    without_replaced,
)
from core.engine.changes.stacked_blocks import StateBlocks, blocks_of_states, with_their_codes
from core.errors import UsageError
from core.pickle.inert import TensorLeaf
from core.pickle.nesting import entries, join_path


def unstack_layers(
    catalog: Catalog, patterns: Sequence[str] = (), *, axis: int = 0
) -> RestackedCatalog:
    """Split stacked tensors into one tensor per layer.

    Args:
        patterns: globs of ``core.engine.catalog.key_patterns`` over the keys of stacked tensors.
            Empty for every tensor with ``layers`` in its key and no number after it.
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
    heads: dict[str, dict[str, Tensor]] = {}
    halves: dict[str, tuple[str, str]] = {}
    keys = with_their_codes(_stacked_keys(catalog, patterns), blocks, order=list(catalog.tensors))
    for key in keys:
        match = ALL_LAYERS.fullmatch(key)
        if match is None:
            raise UsageError(
                "--unstack-layers: the key has no place for a layer number",
                key=key,
                hint=f"use --rename to give the key a part such as {LAYERS[0]}",
            )
        halves[key] = match["head"], match["tail"]
        if key not in blocks:
            heads.setdefault(match["head"], {})[key] = catalog.tensors[key]
    # Tensors after the same names belong to the same layers.
    for stacks in heads.values():
        _check_layer_axes(stacks, axis)

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
            raise UsageError("--unstack-layers: an entry with this name already exists", key=taken)
    head_of = {key: head for key, (head, _) in halves.items()}
    result = _replace_by_layers(catalog, parts, head_of, blocks, axis=axis)
    return RestackedCatalog(result, len(parts), tuple(numbered_state_notes(catalog)))


def _stacked_keys(catalog: Catalog, patterns: Sequence[str]) -> list[str]:
    """Return the keys of the stacked tensors that the patterns choose, in order.

    Args:
        patterns: globs; empty for every key with ``layers`` and no number after it.

    Raises:
        UsageError: a pattern matches no stacked tensor.
    """
    # A key that has a number already is a layer, not a stack.
    candidates = [key for key in catalog.tensors if ONE_LAYER.fullmatch(key) is None]
    if not patterns:
        keys = [key for key in candidates if USUAL_STACK.fullmatch(key) is not None]
        if not keys:
            raise UsageError(
                "--unstack-layers: no key looks like stacked layers",
                hint="keys of stacked layers contain 'layers'; select other tensors with "
                "--unstack-layers GLOB",
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


def _axis_of(tensor: Tensor, axis: int) -> int:
    """Return the number of a stacked tensor's axis of layers, which may be its only axis."""
    return 0 if len(tensor.shape) == 1 else axis


def _n_layers(tensor: Tensor, axis: int) -> int:
    """Return the number of layers of a stacked tensor."""
    return tensor.shape[_axis_of(tensor, axis)]


def _check_layer_axes(tensors: Mapping[str, Tensor], axis: int) -> None:
    """Raise unless all tensors after the same names have the same number of layers.

    Raises:
        UsageError: the numbers differ or are too large, or a tensor does not have the axis.
    """
    first_key, first = next(iter(tensors.items()))
    for key, tensor in tensors.items():
        reason = None
        if not tensor.shape:
            reason = "a scalar has no layer axis"
        elif _axis_of(tensor, axis) >= len(tensor.shape):
            reason = f"a tensor of shape {tensor.shape} has no axis {axis}"
        elif _n_layers(tensor, axis) > MAX_LAYERS:
            reason = (
                f"{_n_layers(tensor, axis):,} layers are more than the maximum of {MAX_LAYERS:,}"
            )
        elif _n_layers(tensor, axis) != _n_layers(first, axis):
            reason = (
                f"{first_key!r} has {_n_layers(first, axis)} layers, "
                f"but this tensor has {_n_layers(tensor, axis)}"
            )
        if reason is not None:
            raise UsageError(f"--unstack-layers: {reason}", key=key, hint=_CHOOSE_TENSORS)


_CHOOSE_TENSORS = (
    "select the stacked tensors with --unstack-layers GLOB, "
    "and their layer axis with --layer-axis N"
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
    tensors: dict[str, Tensor] = {}
    for key, tensor in catalog.tensors.items():
        if key not in parts:
            tensors[key] = tensor
        elif parts[key] and parts[key][0] not in tensors:
            siblings = [sibling for sibling in parts if head_of[sibling] == head_of[key]]
            for number in range(len(parts[key])):
                for sibling in siblings:
                    stacked = catalog.tensors[sibling]
                    layer = (
                        blocks[sibling].unstack(stacked, number, len(parts[key]))
                        if sibling in blocks
                        else catalog.entry(sibling, number, _axis_of(stacked, axis))
                    )
                    tensors[parts[sibling][number]] = replace(
                        stacked, shape=layer.shape, tiling=layer.tiling
                    )

    renamed = with_parameters(catalog, parts)
    skeleton = renamed.skeleton
    return replace(
        without_replaced(renamed, parts),
        tensors=tensors,
        skeleton=None if skeleton is None else _split_leaves(skeleton, parts),
    )


def _split_leaves(skeleton: object, parts: Mapping[str, Sequence[str]]) -> object:
    """Replace each stacked leaf of a skeleton by one leaf per layer."""
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        if not isinstance(entry.leaf, TensorLeaf) or entry.key not in parts:
            leaves[entry.path] = entry.leaf
            continue
        for new in parts[entry.key]:
            match = ONE_LAYER.fullmatch(new)
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
