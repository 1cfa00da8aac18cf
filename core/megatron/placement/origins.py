"""Which stored tensor holds which tensor of the global per-layer form, and where in it.

A stored tensor may stack the layers of a model, and the experts of a layer (``core.megatron.reshard.from_global``)::

    decoder.layers.mlp.experts.experts.linear_fc2.weight (L, E, rows, columns)
        └─ [3, 17] ─▶ decoder.layers.3.mlp.experts.local_experts.17.linear_fc2.weight (rows, columns)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from core.arrays.box import Box, Shape
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.errors import CheckpointingException, CorruptError, Report, raising
from core.megatron.model.facts import ModelFacts
from core.megatron.rules.rules import Layer, Rules


@dataclass(frozen=True, slots=True)
class Origin:
    """The stored tensors that a global per-layer tensor comes from.

    Args:
        keys: keys of the source that hold it; several are copies.
        at: which layer of a tensor that stacks them, then which expert of one that stacks those.
    """

    keys: tuple[str, ...]
    at: tuple[int, ...] = ()


def origins_of(
    catalog: Catalog,
    names: Mapping[str, str],
    facts: ModelFacts,
    rules: Rules,
    *,
    report: Report = raising,
) -> dict[str, Origin]:
    """Return for every global per-layer name where it comes from.

    Args:
        names: key of the source → Megatron's name of the tensor, which may stack layers and
            experts.
        report: takes the problems (rules ``layout.stacks``, ``.entries``), whose subjects are then
            left out; raises them, if none is given.

    Raises:
        CorruptError: two tensors are one, or a stack has other extents than the model.
        UnknownTensorError, UnsupportedError: as for ``Rules.rule_of``.
    """
    origins: dict[str, Origin] = {}

    def add(name: str, key: str, at: tuple[int, ...]) -> None:
        rule = rules.rule_of(name, shapes=[catalog.tensors[key].shape])
        if rule.tied is not None and facts.is_tied:
            name = rule.tied
        existing = origins.get(name)
        if existing is not None and (rule.tied is None or existing.at != at):
            raise CorruptError(f"{existing.keys[0]} and {key} are one tensor", key=name)
        origins[name] = Origin((*(existing.keys if existing else ()), key), at)

    for key, stored in names.items():
        shape = catalog.tensors[key].shape
        try:
            # The last member tells the extents that the stack must have.
            members = names_in(stored, facts, rules)
            at = members[-1][0]
            wanted = tuple(number + 1 for number in at)
            if shape[: len(wanted)] != wanted:
                of = f"{facts.n_layers} layers and {facts.n_experts or 0} experts"
                report(
                    CorruptError(
                        f"a stack of shape {shape} in a model of {of}",
                        key=key,
                        rule="layout.stacks",
                    )
                )
                members = [
                    (at, name)
                    for at, name in members
                    if all(i < n for i, n in zip(at, shape, strict=False))
                ]
            for at, name in members:
                add(name, key, at)
        except CheckpointingException as err:
            report(err.breaking("layout.entries"))
    return origins


def names_in(name: str, facts: ModelFacts, rules: Rules) -> list[tuple[tuple[int, ...], str]]:
    """Return (index, global per-layer name) of everything that a tensor stacks.

    A tensor that stacks nothing has the index ().
    """
    stacked, single = rules.stacked_of(name), rules.layer_of(name)
    names: list[tuple[tuple[int, ...], str]] = [((), name)]
    if stacked is not None:
        stack, sub = stacked[0], _sub(stacked[1], facts, rules)
        names = [
            ((layer,), str(Layer(stack, layer, sub))) for layer in range(facts.stacks.get(stack, 0))
        ]
        if not names:
            raise CorruptError(
                f"the other tensors are those of a {facts.kind.kind} model, which has no such layers",
                key=name,
            )
    elif single is not None:
        names = [((), str(replace(single, sub=_sub(single.sub, facts, rules))))]

    # Each of these may hold one expert or stack several.
    members: list[tuple[tuple[int, ...], str]] = []
    for at, global_name in names:
        expert = rules.expert_of(global_name)
        if expert is None or rules.is_packed_state(global_name):
            members.append((at, global_name))
        elif expert.number is not None:
            members.append((at, expert.numbered(expert.number)))
        else:
            members += [
                ((*at, number), expert.numbered(number)) for number in range(facts.n_experts or 0)
            ]
    return members


def _sub(sub: str, facts: ModelFacts, rules: Rules) -> str:
    """Return a name within a layer as this model's rank files have it."""
    if facts.is_prediction_renamed and facts.pattern is None:
        sub = rules.in_rank_files(sub)
    return rules.local(sub) if facts.fuses_names else sub


def meta_of(catalog: Catalog, name: str, origin: Origin) -> TensorMeta:
    """Return the metadata of the tensor that an origin gives.

    Raises:
        CorruptError: its copies have different dtypes or shapes.
    """
    first = catalog.tensors[origin.keys[0]]
    for key in origin.keys[1:]:
        other = catalog.tensors[key]
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CorruptError(
                f"{other.dtype} of shape {other.shape}, but its twin is {first.dtype} of {first.shape}",
                key=key,
            )
    return TensorMeta(name, first.dtype, first.shape[len(origin.at) :])


class OriginFragments:
    """The fragments of global per-layer tensors.

    Args:
        catalog: what holds them.
        origins: where.
        metas: their final shapes, which may have fewer rows than what is stored.
    """

    def __init__(
        self, catalog: Catalog, origins: Mapping[str, Origin], metas: Mapping[str, TensorMeta]
    ) -> None:
        self._catalog = catalog
        self._origins = origins
        self._metas = metas
        self._unstacked = lru_cache(maxsize=32)(
            lambda key, depth: _unstacked(catalog.fragments(key), depth)
        )

    def fragments_of(self, key: str) -> Sequence[Fragment]:
        """Return the fragments of one tensor; those of the catalog for a key that has no origin."""
        origin = self._origins.get(key)
        if origin is None:
            return self._catalog.fragments(key)
        fragments: list[Fragment] = []
        for source in origin.keys:
            pieces: Iterable[Fragment] = self._catalog.fragments(source) if not origin.at else ()
            if origin.at:
                pieces = self._unstacked(source, len(origin.at)).get(origin.at, [])
            for piece in pieces:
                kept = _cut(piece, self._metas[key].shape)
                if kept is not None:
                    fragments.append(replace(kept, key=key))
        return tuple(fragments)


def _unstacked(fragments: Iterable[Fragment], depth: int) -> dict[tuple[int, ...], list[Fragment]]:
    """Return index on the first axes → fragments of the tensor that is stacked there."""
    fragments_at: dict[tuple[int, ...], list[Fragment]] = {}
    for piece in fragments:
        offset, shape = piece.box.offset, piece.box.shape
        box = Box(offset[depth:], shape[depth:])
        for steps in product(*map(range, shape[:depth])):
            at = piece.at
            if piece.array is not None:
                first = len(at) - len(shape)  # where the first stacking axis is in the array
                at = tuple(
                    start + (steps[axis - first] if 0 <= axis - first < depth else 0)
                    for axis, start in enumerate(at)
                )
            index = tuple(start + step for start, step in zip(offset, steps, strict=False))
            fragments_at.setdefault(index, []).append(Fragment(piece.key, box, piece.array, at))
    return fragments_at


def _cut(piece: Fragment, shape: Shape) -> Fragment | None:
    """Return the part of a fragment that lies in ``shape``; None if there is none.

    The shape may have fewer rows than the stored tensor.
    """
    if not shape or piece.box.offset[0] + piece.box.shape[0] <= shape[0]:
        return piece
    rows = shape[0] - piece.box.offset[0]
    if rows <= 0:
        return None
    return replace(piece, box=Box(piece.box.offset, (rows, *piece.box.shape[1:])))
