"""Parameters that torch_dist stores in parts, one tensor for each: joined when read, parted when
written.

::

    decoder.layers.0.mixer.in_proj.weight          (2d + 2gN + h, H)     rank files, and the global per-layer form
    decoder.layers.0.mixer.in_proj.weight.z        (d, H)                torch_dist
    decoder.layers.0.mixer.in_proj.weight.x        (d, H)                …
    decoder.layers.0.mixer.in_proj.weight.dt       (h, H)

and so for an optimizer's states. Which parameters: rules with ``names``. Parts with names of
several words (``linear_q_down_proj.weight``) are those of models without a joined layer: when read,
they stay what they are.

Source: megatron-core 0.16.1 ``ssm/mamba_mixer.py``, ``ssm/gated_delta_net.py``
    ``_split_tensor_factory``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box, Shape
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.optimizer_keys import param_of
from core.catalog.stored import ArrayT, array_name
from core.errors import CorruptError, MissingShardError
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import parts_of
from core.megatron.rules.rules import Rules


@dataclass(frozen=True, slots=True)
class _PartRange:
    """Consecutive elements of an axis, and the tensor that they are."""

    key: str
    start: int
    extent: int


def join_parts(catalog: Catalog, rules: Rules) -> Catalog:
    """Return a catalog in which the parts of a parameter are one tensor.

    Raises:
        MissingShardError: a part is absent.
        CorruptError: parts are of different dtypes, or of shapes that do not fit together.
    """
    parts_of_key: dict[str, tuple[int, dict[str, TensorMeta]]] = {}
    order: dict[str, tuple[str, ...]] = {}

    # Collect the parts of every parameter.
    names = rules.part_names
    for key, meta in catalog.tensors.items():
        param, _, name = key.rpartition(".")
        rule = rules.parted_rule(param_of(param), name) if name in names else None
        if rule is not None and rule.axis is not None:
            parts_of_key.setdefault(param, (rule.axis + _n_front(param, rules), {}))[1][name] = meta
            order[param] = rule.names
    if not parts_of_key:
        return catalog

    # Join their extents on the axis of the parts, where the first part stands.
    runs = {
        param: _runs(param, axis, parts, order[param])
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
            replace(piece, key=key, box=_moved(piece.box, axis, run.start))
            for run in runs[key]
            for piece in catalog.fragments(run.key)
        )

    return replace(catalog, tensors=tensors, fragments_of=fragments_of)


def _runs(
    param: str, axis: int, parts: Mapping[str, TensorMeta], names: Sequence[str]
) -> list[_PartRange]:
    """Return the ranges of the parts of a parameter on its axis, in order."""
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
                f"{meta.dtype} of shape {meta.shape}, but another part of {param} is {first_part.dtype} of "
                f"{first_part.shape}",
                key=meta.key,
            )
        runs.append(_PartRange(f"{param}.{name}", start, meta.shape[axis]))
        start += meta.shape[axis]
    return runs


def separate_parts(
    catalog: Catalog[ArrayT], facts: ModelFacts, rules: Rules, *, is_target: bool
) -> Catalog[ArrayT]:
    """Return a catalog in which every part of such a parameter is a tensor of its own.

    Args:
        is_target: arrays are to be written: those of parts get names of their own.

    Raises:
        UnsupportedError, CorruptError: as for ``core.megatron.model.parts.parts_of``.
    """
    tensors: dict[str, TensorMeta] = {}

    # Give every part its range on the axis; other tensors stay as they are.
    runs: dict[str, tuple[int, str, _PartRange]] = {}
    for key, meta in catalog.tensors.items():
        rule = rules.parted_rule(param_of(key))
        axis = 0 if rule is None else (rule.axis or 0) + _n_front(key, rules)
        parts = [] if rule is None else parts_of(rule, meta.shape[axis], facts, key=key)
        if rule is None or len(parts) != len(rule.names):
            tensors[key] = meta
            continue
        start = 0
        for name, extent in zip(rule.names, parts, strict=True):
            part = _part_key(key, name)
            tensors[part] = replace(meta, key=part, shape=_with(meta.shape, axis, extent))
            runs[part] = (axis, key, _PartRange(part, start, extent))
            start += extent
    if not runs:
        return catalog

    def fragments_of(key: str) -> Sequence[Fragment[ArrayT]]:
        if key not in runs:
            return catalog.fragments(key)
        axis, param, run = runs[key]
        pieces = (_within(piece, axis, run) for piece in catalog.fragments(param))
        kept = tuple(piece for piece in pieces if piece is not None)
        return tuple(map(_renamed, kept)) if is_target else kept

    return replace(catalog, tensors=tensors, fragments_of=fragments_of)


def _n_front(key: str, rules: Rules) -> int:
    """Return the number of axes before a parameter's own: one for layers, if they are stacked."""
    return int(rules.stacked_of(param_of(key)) is not None)


def _part_key(key: str, name: str) -> str:
    """Return the key of a part.

    A name of one word is appended; several words replace as many of the parameter's.
    """
    words = name.split(".")
    return f"{key}.{name}" if len(words) == 1 else ".".join([*key.split(".")[: -len(words)], name])


def _within(piece: Fragment[ArrayT], axis: int, run: _PartRange) -> Fragment[ArrayT] | None:
    """Return the part of a fragment that lies in a range, in coordinates of the range.

    None if there is none.
    """
    box = piece.box
    start = max(box.offset[axis], run.start)
    stop = min(box.offset[axis] + box.shape[axis], run.start + run.extent)
    if start >= stop:
        return None
    at = piece.at
    if piece.array is not None:
        place = axis + len(at) - len(box.shape)  # stored arrays may have axes in front
        at = _with(at, place, at[place] + start - box.offset[axis])
    inside = Box(_with(box.offset, axis, start - run.start), _with(box.shape, axis, stop - start))
    return replace(piece, key=run.key, box=inside, at=at)


def _renamed(piece: Fragment[ArrayT]) -> Fragment[ArrayT]:
    """Return a piece of a part with a chunk of its own, in place of the part's share of a chunk."""
    assert piece.array is not None, "chunks that are to be written are arrays"
    name = array_name(piece.key, piece.box)
    array = replace(piece.array, name=name, shape=piece.box.shape)
    return replace(piece, array=array, at=(0,) * len(array.shape))


def _moved(box: Box, axis: int, by: int) -> Box:
    return Box(_with(box.offset, axis, box.offset[axis] + by), box.shape)


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])
