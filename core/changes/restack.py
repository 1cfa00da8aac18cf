"""Layers as separate tensors, or stacked along a new first axis.

::

    model.layers.0.mlp.up_proj.weight (rows, cols) ┐
    model.layers.1.mlp.up_proj.weight (rows, cols) ├─ stack ─▶  model.layers.mlp.up_proj.weight (3, rows, cols)
    model.layers.2.mlp.up_proj.weight (rows, cols) ┘ ◀ unstack ─

The number that goes or comes is the one behind the first name of ``LAYERS`` in the key. So numbers of experts stay,
and the optimizer's entries (``optimizer.state.model.layers.0.….exp_avg``) follow their parameters. A scalar (the
optimizer's step) becomes one number a layer.

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
from core.changes.rename import is_optimizer_key, moved, nested_again, with_parameters
from core.changes.tie import aliases_among
from core.errors import UsageError
from core.pickle.inert import TensorLeaf
from core.pickle.nesting import entries, join_path

LAYERS = ("layers", "layer", "h", "blocks", "block")
"""Names behind which a model's layers are numbered."""

_NAMES = "|".join(LAYERS)
_ONE = re.compile(rf"(?P<head>(?:.*?\.)??(?:{_NAMES}))\.(?P<number>0|[1-9]\d{{0,8}})\.(?P<tail>.+)", re.DOTALL)
_ALL = re.compile(rf"(?P<head>(?:.*?\.)??(?:{_NAMES}))\.(?P<tail>(?!\d+\.).+)", re.DOTALL)
_USUAL = re.compile(rf"(?:.*?\.)??{LAYERS[0]}\.(?!\d+\.).+", re.DOTALL)
_NUMBERED = re.compile(r"(^|\.)state\.\d+\.[^.]+$")
MAX_LAYERS = 10_000
"""A stacked tensor of more layers is none."""


@dataclass(frozen=True, slots=True)
class Restacked:
    """A catalog with its layers stacked or apart.

    Args:
        catalog: the catalog.
        n_groups: how many stacked tensors were made or taken apart.
        notes: layers that stayed as they were, and why.
    """

    catalog: Catalog
    n_groups: int
    notes: tuple[str, ...] = ()


def stack_layers(catalog: Catalog) -> Restacked:
    """Stacks the tensors that every layer has, in one dtype and shape.

    How many layers there are is told by the highest number behind the same first names (``model.layers``). What some
    layers lack, or have otherwise (the first layers of many mixture-of-experts models), stays one tensor a layer.

    Raises:
        UsageError: no tensor's key has a layer's number, or a stacked key is there already.
    """
    groups: dict[tuple[str, str], dict[int, TensorMeta]] = {}
    n_layers: dict[str, int] = {}
    for key, meta in catalog.tensors.items():
        found = _ONE.fullmatch(key)
        if found is not None:
            number = int(found["number"])
            groups.setdefault((found["head"], found["tail"]), {})[number] = meta
            n_layers[found["head"]] = max(n_layers.get(found["head"], 0), number + 1)
    if not groups:
        raise UsageError("--stack-layers: no key has a layer's number", hint=f"known names: {', '.join(LAYERS)}")
    parts: dict[str, list[str]] = {}
    whys: dict[str, list[str]] = {}
    for (head, tail), members in groups.items():
        why = _why_apart(members, n_layers[head])
        if why is None:
            parts[f"{head}.{tail}"] = [members[number].key for number in range(n_layers[head])]
        else:
            whys.setdefault(why, []).append(f"{head}.[{ranges(members)}].{tail}")
    taken = next((key for key in parts if key in catalog.tensors or key in catalog.objects), None)
    if taken is not None:
        raise UsageError("--stack-layers: there is an entry of that name already", key=taken)
    notes = [f"{some_of(keys)} stay one tensor a layer: {why}" for why, keys in whys.items()]
    return Restacked(_stacked(catalog, parts), len(parts), (*notes, *_left_numbered(catalog)))


def _left_numbered(catalog: Catalog) -> list[str]:
    """A note, if the optimizer counts parameters of which there is now another number."""
    if not any(_NUMBERED.search(key) and is_optimizer_key(key) for key in catalog.tensors):
        return []
    return ["the optimizer's state goes by parameter number and stays as it was, so it fits the model no more"]


def _why_apart(members: Mapping[int, TensorMeta], n_layers: int) -> str | None:
    """Why a group cannot be stacked, or None if it can."""
    if len(members) != n_layers:
        return f"not all of the {n_layers} layers have them"
    if len({(meta.dtype, meta.shape) for meta in members.values()}) > 1:
        return "the layers have them in several shapes or dtypes"
    return None


def _stacked(catalog: Catalog, parts: Mapping[str, Sequence[str]]) -> Catalog:
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
    news_of = {key: (new,) for key, new in new_of.items()}
    return replace(
        _without_replaced(with_parameters(catalog, news_of), news_of),
        tensors=tensors,
        fragments_of=fragments_of,
        skeleton=None if skeleton is None else moved(skeleton, new_of),
    )


def unstack_layers(catalog: Catalog, patterns: Sequence[str] = ()) -> Restacked:
    """Takes stacked tensors apart, into one tensor a layer.

    Args:
        patterns: globs of ``core.catalog.key_patterns`` over the keys of stacked tensors. Without any: every tensor
            with ``layers`` in its key, and no number behind it.

    Raises:
        UsageError: a pattern matches nothing, a key has no place for a number, the first axes of tensors behind the
            same names differ, or a layer's key is there already.
    """
    chosen = _chosen(catalog, patterns)
    heads: dict[str, list[TensorMeta]] = {}
    place: dict[str, tuple[str, str]] = {}
    for key in chosen:
        found = _ALL.fullmatch(key)
        if found is None:
            raise UsageError(
                "--unstack-layers: the key has no place for a layer's number",
                key=key,
                hint=f"a name such as {LAYERS[0]} must come before it; see --rename",
            )
        place[key] = found["head"], found["tail"]
        heads.setdefault(found["head"], []).append(catalog.tensors[key])
    for metas in heads.values():
        _check_first_axes(metas)
    parts: dict[str, list[str]] = {}
    for key, (head, tail) in place.items():
        parts[key] = [f"{head}.{number}.{tail}" for number in range(catalog.tensors[key].shape[0])]
        taken = next((new for new in parts[key] if new in catalog.tensors or new in catalog.objects), None)
        if taken is not None:
            raise UsageError("--unstack-layers: there is an entry of that name already", key=taken)
    made = _unstacked(catalog, parts, {key: head for key, (head, _) in place.items()})
    return Restacked(made, len(parts), tuple(_left_numbered(catalog)))


def _chosen(catalog: Catalog, patterns: Sequence[str]) -> list[str]:
    """Keys of the stacked tensors, in order."""
    if not patterns:
        found = [key for key in catalog.tensors if _ONE.fullmatch(key) is None and _USUAL.fullmatch(key) is not None]
        if not found:
            raise UsageError(
                "--unstack-layers: no key looks like that of stacked layers",
                hint="they have 'layers' in their names; say which others are stacked with a glob",
            )
        return found
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = matcher(pattern)
        hits = [key for key in catalog.tensors if matches(key) and _ONE.fullmatch(key) is None]
        if not hits:
            raise UsageError(f"--unstack-layers: no stacked tensor matches {pattern!r}", hint=LIST_THEM)
        chosen.update(dict.fromkeys(hits))
    return [key for key in catalog.tensors if key in chosen]


def _check_first_axes(metas: Sequence[TensorMeta]) -> None:
    """All tensors behind the same names have one number of layers."""
    first = metas[0]
    for meta in metas:
        if not meta.shape or meta.shape[0] > MAX_LAYERS:
            what = f"{meta.shape[0]} layers are too many" if meta.shape else "a scalar has no axis of layers"
            raise UsageError(f"--unstack-layers: {what}", key=meta.key, hint=_SAY_WHICH)
        if meta.shape[0] != first.shape[0]:
            raise UsageError(
                f"--unstack-layers: {first.key!r} has {first.shape[0]} layers, this one {meta.shape[0]}",
                key=meta.key,
                hint=_SAY_WHICH,
            )


_SAY_WHICH = "say which tensors are stacked with a glob: --unstack-layers GLOB"


def _unstacked(catalog: Catalog, parts: Mapping[str, Sequence[str]], head_of: Mapping[str, str]) -> Catalog:
    where = {new: (key, number) for key, news in parts.items() for number, new in enumerate(news)}
    tensors: dict[str, TensorMeta] = {}
    for key, meta in catalog.tensors.items():
        if key not in parts:
            tensors[key] = meta
        elif parts[key] and parts[key][0] not in tensors:  # all that lies behind the same names, layer by layer
            alike = [other for other in parts if head_of[other] == head_of[key]]
            for number in range(meta.shape[0]):
                for other in alike:
                    new = parts[other][number]
                    tensors[new] = replace(catalog.tensors[other], key=new, shape=catalog.tensors[other].shape[1:])

    @lru_cache(maxsize=64)
    def layers_of(key: str) -> Sequence[Sequence[Fragment]]:
        layers: list[list[Fragment]] = [[] for _ in parts[key]]
        for fragment in catalog.fragments(key):
            first = fragment.box.offset[0]
            for number in range(first, min(first + fragment.box.shape[0], len(layers))):
                layers[number].append(_layer(fragment, parts[key][number], number))
        return layers

    def fragments_of(key: str) -> Sequence[Fragment]:
        found = where.get(key)
        return catalog.fragments(key) if found is None else layers_of(found[0])[found[1]]

    skeleton = catalog.skeleton
    return replace(
        _without_replaced(with_parameters(catalog, parts), parts),
        tensors=tensors,
        fragments_of=fragments_of,
        skeleton=None if skeleton is None else _with_layers(skeleton, parts),
    )


def _layer(fragment: Fragment, key: str, number: int) -> Fragment:
    """One layer of a fragment of a stacked tensor."""
    box, at = fragment.box, fragment.at
    axis = len(at) - box.rank
    if fragment.array is not None and axis >= 0:  # the array has the axis of layers too
        at = (*at[:axis], at[axis] + number - box.offset[0], *at[axis + 1 :])
    return Fragment(key, Box(box.offset[1:], box.shape[1:]), fragment.array, at)


def _with_layers(skeleton: object, parts: Mapping[str, Sequence[str]]) -> object:
    """A skeleton in which a leaf for every layer stands in place of each stacked one."""
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        if not isinstance(entry.leaf, TensorLeaf) or entry.key not in parts:
            leaves[entry.path] = entry.leaf
            continue
        for new in parts[entry.key]:
            found = _ONE.fullmatch(new)
            assert found is not None
            leaves[_layer_path(entry.path, found["head"], found["number"])] = replace(entry.leaf, key=new)
    return nested_again(leaves)


def _layer_path(path: tuple[object, ...], head: str, number: str) -> tuple[object, ...]:
    """The path of a stacked leaf with a layer's number behind ``head``."""
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
    """Return the catalog without what aliases, order and torch_dist's facts say of tensors that are no more."""
    model, torch_dist = catalog.facet(MegatronModel), catalog.facet(TorchDistFacts)
    if model is not None and model.order is not None:
        order = tuple(dict.fromkeys(new for key in model.order for new in new_of.get(key, (key,))))
        catalog = catalog.with_facet(replace(model, order=order))
    if torch_dist is not None and torch_dist.mcore_data is not None:
        mcore_data = {key: facts for key, facts in torch_dist.mcore_data.items() if key not in new_of}
        catalog = catalog.with_facet(replace(torch_dist, mcore_data=mcore_data))
    return replace(
        catalog, aliases=aliases_among(catalog.aliases, [key for key in catalog.tensors if key not in new_of])
    )
