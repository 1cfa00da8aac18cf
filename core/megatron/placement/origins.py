"""Origins of the tensors of the global per-layer form: the stored tensors that hold them.

A stored tensor may stack the layers of a model, and the experts of a layer
(``core.megatron.reshard.from_global``)::

    decoder.layers.mlp.experts.experts.linear_fc2.weight  (L, E, rows, columns)
        [3, 17]
    decoder.layers.3.mlp.experts.local_experts.17.linear_fc2.weight  (rows, columns)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

from core.arrays.box import Box, Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped, dropped_unlisted
from core.engine.catalog.tensor import Fragment, Tensor
from core.errors import CheckpointingException, CorruptError, Report, raising
from core.megatron.model.facts import ModelFacts
from core.megatron.model.vocabulary import PADDING
from core.megatron.rules.rules import LLAVA_LAYERS, LLAVA_PROJECTION, Layer, Rules, tower_layer_of
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """The stored tensors that hold a global per-layer tensor.

    Args:
        keys: keys in the source; several are copies.
        at: index on the stacking axes: (), (layer,), (expert,) or (layer, expert).
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
    """Return global per-layer name → origin.

    Args:
        names: key in the source → Megatron's name of the tensor, which may stack layers and
            experts.
        report: takes the problems (rules ``layout.stacks``, ``.entries``) and skips what they
            affect; by default they are raised.

    Raises:
        CorruptError: two stored tensors have the same name in the model, or a stack's extents are
            not the model's.
        UnknownTensorError: no rule matches a name.
        UnsupportedError: the rule marks a tensor as not supported yet.
    """
    origins: dict[str, Origin] = {}

    def add(name: str, key: str, at: tuple[int, ...]) -> None:
        # Only a copy of tied embeddings may be stored twice.
        rule = rules.rule_of(name, shapes=[catalog.tensors[key].shape])
        if rule.tied is not None and facts.is_tied:
            name = rule.tied
        existing = origins.get(name)
        if existing is not None and (rule.tied is None or existing.at != at):
            raise CorruptError(f"{existing.keys[0]} and {key} both contain this tensor", key=name)
        origins[name] = Origin((*(existing.keys if existing else ()), key), at)

    for key, stored in names.items():
        shape = catalog.tensors[key].shape
        try:
            # The index of the last member gives the extents that the stack must have.
            members = names_in(stored, facts, rules)
            expected = tuple(number + 1 for number in members[-1][0])
            if shape[: len(expected)] != expected:
                model = f"the model has {facts.n_layers} layers"
                if facts.n_experts:
                    model += f" and {facts.n_experts} experts"
                if stored.startswith(LLAVA_LAYERS):
                    model = f"the tower has {facts.n_tower_layers} layers"
                problem = f"the shape of the stacked tensor is {shape}, but {model}"
                report(CorruptError(problem, key=key, rule="layout.stacks"))

                # If reporting goes on, only the members that the stack has are real.
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


def with_stacked_tower(facts: ModelFacts, catalog: Catalog, names: Mapping[str, str]) -> ModelFacts:
    """Return the facts with the number of layers that are stacked in the tower of LLaVA.

    Args:
        names: key in the source → Megatron's name.
    """
    if not any(name.startswith(LLAVA_PROJECTION) for name in names.values()):
        return facts
    extents = (
        catalog.tensors[key].shape[:1]
        for key, name in names.items()
        if name.startswith(LLAVA_LAYERS) and tower_layer_of(name) is None
    )
    (n_layers,) = next(extents, ()) or (0,)
    return replace(facts, n_tower_layers=n_layers)


def names_in(name: str, facts: ModelFacts, rules: Rules) -> list[tuple[tuple[int, ...], str]]:
    """Return (index, global per-layer name) of every tensor in a stored one, in C order.

    A tensor that stacks nothing has the index ().

    Raises:
        CorruptError: the model has no layers of this stack.
    """
    # Name the layers: all of a stack, one, or none.
    stacked, single = rules.stacked_of(name), rules.layer_of(name)
    names: list[tuple[tuple[int, ...], str]] = [((), name)]
    if stacked is not None:
        stack, sub = stacked[0], _sub(stacked[1], facts, rules)
        n_layers = facts.stacks.get(stack, 0)
        names = [((layer,), str(Layer(stack, layer, sub))) for layer in range(n_layers)]
        if not names:
            raise CorruptError(
                f"the other tensors belong to a {facts.kind.kind} model, which does not have such "
                "layers",
                key=name,
            )
    elif single is not None:
        names = [((), str(replace(single, sub=_sub(single.sub, facts, rules))))]
    elif facts.n_tower_layers and name.startswith(LLAVA_LAYERS) and tower_layer_of(name) is None:
        sub = name.removeprefix(LLAVA_LAYERS)
        names = [
            ((layer,), str(Layer(LLAVA_LAYERS, layer, sub)))
            for layer in range(facts.n_tower_layers)
        ]

    # Name the experts: each layer's tensor may hold none, one, or a stack of all.
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
    """Return a name within a layer in the form of this model's rank files."""
    if facts.is_prediction_renamed and facts.pattern is None:
        sub = rules.in_rank_files(sub)
    return rules.local(sub) if facts.fuses_names else sub


def meta_of(catalog: Catalog, name: str, origin: Origin) -> Tensor:
    """Return the metadata of a global per-layer tensor.

    Raises:
        CorruptError: copies of the tensor have different dtypes or shapes.
    """
    first = catalog.tensors[origin.keys[0]]
    for key in origin.keys[1:]:
        other = catalog.tensors[key]
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CorruptError(
                f"this tensor is {other.dtype} of shape {other.shape}, but its copy "
                f"{origin.keys[0]} is {first.dtype} of shape {first.shape}",
                key=key,
            )
    return Tensor(first.dtype, first.shape[len(origin.at) :])


def place_tensors(
    catalog: Catalog, origins: Mapping[str, Origin], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return global per-layer tensors, made of stored ones.

    Args:
        catalog: the stored tensors.
        origins: global name → origin.
        tensors: global name → dtype and shape, which may have fewer rows than the stored tensor.
    """
    # The layers of a stack are usually requested one after the other.
    unstacked = lru_cache(maxsize=32)(lambda key, depth: _unstack(catalog.fragments(key), depth))

    def fragments_at(origin: Origin, shape: Shape) -> list[Fragment]:
        fragments: list[Fragment] = []
        for source in origin.keys:
            pieces: Iterable[Fragment]
            if origin.at:
                pieces = unstacked(source, len(origin.at)).get(origin.at, [])
            else:
                pieces = catalog.fragments(source)

            # Clip the pieces: padding rows of the vocabulary may have been dropped.
            for piece in pieces:
                box = piece.box
                if shape and box.offset[0] + box.shape[0] > shape[0]:
                    n_rows = shape[0] - box.offset[0]
                    if n_rows <= 0:
                        continue
                    box = Box(box.offset, (n_rows, *box.shape[1:]))
                fragments.append(replace(piece, box=box))
        return fragments

    return {
        name: replace(tensors[name], tiling=partial(fragments_at, origin, tensors[name].shape))
        for name, origin in origins.items()
    }


def record_padding(
    catalog: Catalog, origins: Mapping[str, Origin], metas: Mapping[str, Tensor]
) -> tuple[Dropped, ...]:
    """Record the rows that ``place_tensors`` leaves out: padding of the vocabulary."""
    stored = {name: meta_of(catalog, name, origin) for name, origin in origins.items()}
    padded = {name: tensor for name, tensor in stored.items() if tensor.shape != metas[name].shape}
    tensors = place_tensors(catalog, {name: origins[name] for name in padded}, padded)
    padding = {
        name: tensor.narrow(0, n_rows := metas[name].shape[0], tensor.shape[0] - n_rows)
        for name, tensor in tensors.items()
    }
    return dropped_unlisted(padding, PADDING)


def _unstack(fragments: Iterable[Fragment], depth: int) -> dict[tuple[int, ...], list[Fragment]]:
    """Split the fragments of a stack by their index on the first ``depth`` axes.

    Returns:
        Index on these axes → fragments of the tensor at that index.
    """
    fragments_at: dict[tuple[int, ...], list[Fragment]] = {}
    for piece in fragments:
        offset, shape = piece.box.offset, piece.box.shape
        box = Box(offset[depth:], shape[depth:])
        for steps in product(*map(range, shape[:depth])):
            # Step along the stacking axes of the array, too, which may have further axes in front.
            at = piece.at
            if piece.array is not None:
                first = len(at) - len(shape)
                at = tuple(
                    start + (steps[axis - first] if 0 <= axis - first < depth else 0)
                    for axis, start in enumerate(at)
                )
            index = tuple(start + step for start, step in zip(offset, steps, strict=False))
            fragments_at.setdefault(index, []).append(Fragment(box, piece.array, at))
    return fragments_at
