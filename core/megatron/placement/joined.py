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
from dataclasses import dataclass, replace

from core.arrays.box import Box, Shape
from core.catalog.catalog import Catalog, Fragment, TensorMeta, clip_fragment
from core.catalog.optimizer_keys import param_of
from core.catalog.stored import ArrayT, array_name
from core.errors import CorruptError, MissingShardError
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import parts_of
from core.megatron.rules.rules import Rules


@dataclass(frozen=True, slots=True)
class _PartRange:
    """The range of a part on the axis of its parameter.

    Args:
        key: key of the part.
        start, extent: in elements.
    """

    key: str
    start: int
    extent: int


def join_parts(catalog: Catalog, rules: Rules) -> Catalog:
    """Return a catalog in which the parts of each parameter are one tensor.

    Raises:
        MissingShardError: a part is missing.
        CorruptError: parts have different dtypes, or shapes that do not fit together.
    """
    # Collect the parts of every parameter, with the axis on which to join them.
    parts_of_key: dict[str, tuple[int, dict[str, TensorMeta]]] = {}
    order: dict[str, tuple[str, ...]] = {}
    names = rules.part_names
    for key, meta in catalog.tensors.items():
        param, _, name = key.rpartition(".")
        rule = rules.parted_rule(param_of(param), name) if name in names else None
        if rule is not None and rule.axis is not None:
            parts_of_key.setdefault(param, (rule.axis + _n_front(param, rules), {}))[1][name] = meta
            order[param] = rule.names
    if not parts_of_key:
        return catalog

    # Replace the first part by the parameter, whose extent is the sum of the parts'.
    runs = {
        param: _place_parts(param, axis, parts, order[param])
        for param, (axis, parts) in parts_of_key.items()
    }
    tensors: dict[str, TensorMeta] = {}
    for key, meta in catalog.tensors.items():
        param = key.rpartition(".")[0]
        if param not in runs:
            tensors[key] = meta
        elif param not in tensors:
            axis, extent = parts_of_key[param][0], sum(run.extent for run in runs[param])
            tensors[param] = replace(meta, key=param, shape=_with(meta.shape, axis, extent))

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in runs:
            return catalog.fragments(key)
        axis = parts_of_key[key][0]
        return tuple(
            replace(
                piece,
                key=key,
                box=Box(
                    _with(piece.box.offset, axis, piece.box.offset[axis] + run.start),
                    piece.box.shape,
                ),
            )
            for run in runs[key]
            for piece in catalog.fragments(run.key)
        )

    return replace(catalog, tensors=tensors, fragments_of=fragments_of)


def _place_parts(
    param: str, axis: int, parts: Mapping[str, TensorMeta], names: Sequence[str]
) -> list[_PartRange]:
    """Return the ranges of a parameter's parts on their axis, in order.

    Args:
        parts: name → metadata of the part.
        names: names of all parts, in order.

    Raises:
        MissingShardError: a part is missing.
        CorruptError: parts have different dtypes, or other axes have different extents.
    """
    first_part = next(iter(parts.values()))
    runs: list[_PartRange] = []
    start = 0
    for name in names:
        meta = parts.get(name)
        if meta is None:
            raise MissingShardError(
                "this part of the parameter is missing; the others are present",
                key=f"{param}.{name}",
            )
        if meta.dtype != first_part.dtype or _with(meta.shape, axis, 0) != _with(
            first_part.shape, axis, 0
        ):
            raise CorruptError(
                f"{meta.dtype} of shape {meta.shape}, but another part of {param} is "
                f"{first_part.dtype} of {first_part.shape}",
                key=meta.key,
            )
        runs.append(_PartRange(f"{param}.{name}", start, meta.shape[axis]))
        start += meta.shape[axis]
    return runs


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
    tensors: dict[str, TensorMeta] = {}
    runs: dict[str, tuple[int, str, _PartRange]] = {}
    for key, meta in catalog.tensors.items():
        rule = rules.parted_rule(param_of(key))
        axis = 0 if rule is None else (rule.axis or 0) + _n_front(key, rules)
        parts = [] if rule is None else parts_of(rule, meta.shape[axis], facts, key=key)
        if rule is None or len(parts) != len(rule.names):
            tensors[key] = meta
            continue

        # A name of one word is appended to the key; one of several replaces as many of the key's.
        start = 0
        for name, extent in zip(rule.names, parts, strict=True):
            part = f"{key}.{name}"
            n_words = name.count(".") + 1
            if n_words > 1:
                part = ".".join([*key.split(".")[:-n_words], name])
            tensors[part] = replace(meta, key=part, shape=_with(meta.shape, axis, extent))
            runs[part] = (axis, key, _PartRange(part, start, extent))
            start += extent
    if not runs:
        return catalog

    def fragments_of(key: str) -> Sequence[Fragment[ArrayT]]:
        if key not in runs:
            return catalog.fragments(key)
        axis, param, run = runs[key]
        pieces = (
            clip_fragment(piece, run.key, start=run.start, extent=run.extent, axis=axis)
            for piece in catalog.fragments(param)
        )
        clipped = tuple(piece for piece in pieces if piece is not None)
        return tuple(map(_as_own_chunk, clipped)) if is_target else clipped

    return replace(catalog, tensors=tensors, fragments_of=fragments_of)


def _n_front(key: str, rules: Rules) -> int:
    """Return the number of stacking axes before a parameter's own: 1 if layers are stacked."""
    return int(rules.stacked_of(param_of(key)) is not None)


def _as_own_chunk(piece: Fragment[ArrayT]) -> Fragment[ArrayT]:
    """Return a fragment of a part in a chunk of its own, not in its parameter's chunk."""
    assert piece.array is not None, "chunks that are to be written are arrays"
    name = array_name(piece.key, piece.box)
    array = replace(piece.array, name=name, shape=piece.box.shape)
    return replace(piece, array=array, at=(0,) * len(array.shape))


def _with(values: Shape, axis: int, value: int) -> Shape:
    """Return a shape or offset with another value on one axis."""
    return (*values[:axis], value, *values[axis + 1 :])
