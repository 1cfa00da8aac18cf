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

from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.key_patterns import ranges, some_of
from core.engine.catalog.tensor import Tensor, stack
from core.engine.changes.factor_states import check_factors
from core.engine.changes.rename import move_leaves, with_parameters
from core.engine.changes.restack.layer_keys import (
    LAYERS,
    ONE_LAYER,
    RestackedCatalog,
    numbered_state_notes,
    without_replaced,
)
from core.engine.changes.stacked_blocks import StateBlocks, blocks_of_states
from core.errors import UsageError


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
    groups: dict[tuple[str, str], dict[int, str]] = {}
    n_layers: dict[str, int] = {}
    for key in catalog.tensors:
        match = ONE_LAYER.fullmatch(key)
        if match is not None:
            number = int(match["number"])
            groups.setdefault((match["head"], match["tail"]), {})[number] = key
            n_layers[match["head"]] = max(n_layers.get(match["head"], 0), number + 1)
    if not groups:
        raise UsageError(
            "--stack-layers: no key has a layer number",
            hint=f"a layer number must follow one of the names {', '.join(LAYERS)}",
        )

    # Choose the groups with the same tensor in every layer; note why the others cannot be stacked.
    blocks = blocks_of_states(catalog, option="--stack-layers", axis=axis)
    parts: dict[str, list[str]] = {}
    unstacked: dict[str, list[str]] = {}
    for (head, tail), members in groups.items():
        tensors = [catalog.tensors[key] for key in members.values()]
        if len(members) != n_layers[head]:
            reason = f"not all of the {n_layers[head]} layers have them"
        elif len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
            reason = "their shapes or dtypes differ between layers"
        elif 0 < len(tensors[0].shape) < axis:
            reason = f"they have too few axes to be stacked along axis {axis}"
        else:
            parts[f"{head}.{tail}"] = [members[number] for number in range(n_layers[head])]
            continue
        unstacked.setdefault(reason, []).append(f"{head}.[{ranges(members)}].{tail}")
    taken = next((key for key in parts if key in catalog.tensors or key in catalog.objects), None)
    if taken is not None:
        raise UsageError("--stack-layers: an entry with this name already exists", key=taken)
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
        f"{some_of(keys)} remain one tensor per layer, because {reason}"
        for reason, keys in unstacked.items()
    ]
    return RestackedCatalog(
        _replace_by_stacks(catalog, parts, blocks, axis=axis),
        len(parts),
        (*notes, *numbered_state_notes(catalog)),
    )


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
    tensors: dict[str, Tensor] = {}
    for key, tensor in catalog.tensors.items():
        new = new_of.get(key, key)
        if new == key:
            tensors[key] = tensor
        elif new not in tensors:
            layers = [catalog.tensors[layer] for layer in parts[new]]
            stacked = blocks[key].stack(layers) if key in blocks else stack(layers, axis)
            tensors[new] = replace(tensor, shape=stacked.shape, tiling=stacked.tiling)

    new_keys = {key: (new,) for key, new in new_of.items()}
    renamed = with_parameters(catalog, new_keys)
    skeleton = renamed.skeleton
    return replace(
        without_replaced(renamed, new_keys),
        tensors=tensors,
        skeleton=None if skeleton is None else move_leaves(skeleton, new_of),
    )
