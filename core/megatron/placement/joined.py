"""Join parameters that torch_dist stores in parts, one tensor per part, and separate them again.

::

    rank files, and the global per-layer form:
    decoder.layers.0.mixer.in_proj.weight       (2d + 2gN + h, H)
    torch_dist:
    decoder.layers.0.mixer.in_proj.weight.z     (d, H)
    decoder.layers.0.mixer.in_proj.weight.x     (d, H)
    …
    decoder.layers.0.mixer.in_proj.weight.dt    (h, H)

The states of an optimizer are stored in the same way. The parameters are those whose rules have
``names``. A part's name of several words (``linear_q_down_proj.weight``) is the name of a parameter
in models without the joined layer, so such parts are not joined when read.

Source: megatron-core 0.16.1 ``ssm/mamba_mixer.py``, ``ssm/gated_delta_net.py``
    ``_split_tensor_factory``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import param_of
from core.engine.catalog.stored import ArrayT, array_name
from core.engine.catalog.tensor import Fragment, Tensor, concat
from core.errors import CorruptError, MissingShardError
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import measure_parts
from core.megatron.rules.rules import Rules


def join_parts(catalog: Catalog, rules: Rules) -> Catalog:
    """Return a catalog in which the parts of each parameter are one tensor.

    Raises:
        MissingShardError: a part is missing.
        CorruptError: parts have different dtypes, or shapes that do not fit together.
    """
    # Collect the parts of every parameter, with the axis on which to join them.
    parts_of_key: dict[str, tuple[int, dict[str, Tensor]]] = {}
    order: dict[str, tuple[str, ...]] = {}
    names = rules.part_names
    for key, tensor in catalog.tensors.items():
        param, _, name = key.rpartition(".")
        rule = rules.parted_rule(param_of(param), name) if name in names else None
        if rule is not None and rule.axis is not None:
            parts_of_key.setdefault(param, (rule.axis + _n_front(param, rules), {}))[1][name] = (
                tensor
            )
            order[param] = rule.names
    if not parts_of_key:
        return catalog

    # Replace the first part by the parameter, whose extent is the sum of the parts'.
    parts_in_order = {
        param: _in_order(param, axis, parts, order[param])
        for param, (axis, parts) in parts_of_key.items()
    }
    tensors: dict[str, Tensor] = {}
    for key, tensor in catalog.tensors.items():
        param = key.rpartition(".")[0]
        if param not in parts_in_order:
            tensors[key] = tensor
        elif param not in tensors:
            whole = concat(parts_in_order[param], parts_of_key[param][0])
            tensors[param] = replace(tensor, shape=whole.shape, tiling=whole.tiling)
    return replace(catalog, tensors=tensors)


def _in_order(
    param: str, axis: int, parts: Mapping[str, Tensor], names: Sequence[str]
) -> list[Tensor]:
    """Return the parts of a parameter in the order in which they follow each other.

    Args:
        axis: the axis that they divide.
        parts: name → part.
        names: names of all parts, in order.

    Raises:
        MissingShardError: a part is missing.
        CorruptError: parts have different dtypes, or other axes have different extents.
    """
    first = next(iter(parts.values()))
    for name in names:
        part = parts.get(name)
        if part is None:
            raise MissingShardError(
                "this part of the parameter is missing, but its other parts are present",
                key=f"{param}.{name}",
            )
        if part.dtype != first.dtype or _with(part.shape, axis, 0) != _with(first.shape, axis, 0):
            raise CorruptError(
                f"this part is {part.dtype} of shape {part.shape}, but another part of {param} is "
                f"{first.dtype} of shape {first.shape}",
                key=f"{param}.{name}",
            )
    return [parts[name] for name in names]


def separate_parts(
    catalog: Catalog[ArrayT], facts: ModelFacts, rules: Rules, *, is_target: bool
) -> Catalog[ArrayT]:
    """Return a catalog in which every part of a parameter is a tensor of its own.

    Args:
        is_target: the catalog's arrays are to be written: parts get arrays of their own.

    Raises:
        UnsupportedError: the arguments do not give the sizes of the parts.
        CorruptError: the sizes of the parts do not add up to the tensor's extent.
    """
    # Give every part its range on the axis; other tensors stay as they are.
    tensors: dict[str, Tensor[ArrayT]] = {}
    for key, tensor in catalog.tensors.items():
        rule = rules.parted_rule(param_of(key))
        axis = 0 if rule is None else (rule.axis or 0) + _n_front(key, rules)
        parts = [] if rule is None else measure_parts(rule, tensor.shape[axis], facts, key=key)
        if rule is None or len(parts) != len(rule.names):
            tensors[key] = tensor
            continue

        # A name of one word is appended to the key; one of several replaces as many of the key's.
        start = 0
        for name, extent in zip(rule.names, parts, strict=True):
            part = f"{key}.{name}"
            n_words = name.count(".") + 1
            if n_words > 1:
                part = ".".join([*key.split(".")[:-n_words], name])
            range_of_key = tensor.narrow(axis, start, extent)
            if is_target:
                range_of_key = range_of_key.with_fragments(partial(_as_own_chunk, part))
            tensors[part] = replace(tensor, shape=range_of_key.shape, tiling=range_of_key.tiling)
            start += extent
    return replace(catalog, tensors=tensors)


def _n_front(key: str, rules: Rules) -> int:
    """Return the number of stacking axes before a parameter's own: 1 if layers are stacked."""
    return int(rules.stacked_of(param_of(key)) is not None)


def _as_own_chunk(key: str, piece: Fragment[ArrayT]) -> Fragment[ArrayT]:
    """Return a fragment of a part in a chunk of its own, not in its parameter's chunk."""
    assert piece.array is not None, "chunks that are to be written are arrays"
    name = array_name(key, piece.box)
    array = replace(piece.array, name=name, shape=piece.box.shape)
    return replace(piece, array=array, at=(0,) * len(array.shape))


def _with(values: Shape, axis: int, value: int) -> Shape:
    """Return a shape or offset with another value on one axis."""
    return (*values[:axis], value, *values[axis + 1 :])
