"""From what was found to a catalog: one nested tree of tensors and objects, from which keys and skeleton follow.

::

    <parameter>                                the weights, under their own names
    optimizer.state.<parameter>.<state>        exp_avg, exp_avg_sq, step … of each parameter
    optimizer.param_groups.<group>.<setting>   lr, betas …, and ``params``: the names of the group's parameters
    optimizer.loss_scaler …                    the rest of what the optimizer keeps
    lr_scheduler, ds_config, iteration …       the rest of the model file, the training script's own entries among it

A key is its path in the tree, dot-joined, as in torch's distributed checkpoints of the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, Fragment, StoredObject, TensorMeta
from core.catalog.stored import StoredArray
from core.errors import CorruptError
from core.formats.deepspeed.pieces import Held, held_whole
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk

if TYPE_CHECKING:
    from core.formats.deepspeed.state_file import StateFile

OPTIMIZER = "optimizer"
STATE = "state"
PARAM_GROUPS = "param_groups"
PARAMS = "params"


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that is one object of the catalog."""

    value: object


@dataclass(slots=True)
class _Found:
    tensors: dict[str, Held]
    objects: dict[str, StoredObject]


def assembled(
    tree: Mapping[str, object],
    *,
    format: str,
    version: str | None,
    files: Sequence[StateFile],
) -> Catalog:
    """The catalog of a tree.

    Args:
        tree: nested dicts and lists with ``Held`` (a tensor) and ``Whole`` (an object) as leaves.
        files: where the tensors lie that objects hold.

    Raises:
        CorruptError: two entries have one key.
    """
    found = _Found({}, {})
    skeleton = _skeleton(tree, (), found)
    hidden = dict(_inside(found.objects.values(), files))

    def fragments_of(key: str) -> Sequence[Fragment]:
        held = found.tensors.get(key) or held_whole(hidden[key])
        return held.fragments(key)

    return Catalog(
        format=format,
        version=version,
        tensors={key: TensorMeta(key, held.dtype, held.shape) for key, held in found.tensors.items()},
        fragments_of=fragments_of,
        objects=found.objects,
        hidden={key: TensorMeta(key, array.dtype, array.shape) for key, array in hidden.items()},
        skeleton=skeleton,
    )


def _skeleton(node: object, path: tuple[str, ...], found: _Found) -> object:
    if isinstance(node, Mapping):
        return {name: _skeleton(item, (*path, name), found) for name, item in node.items()}
    if isinstance(node, list):
        return [_skeleton(item, (*path, str(index)), found) for index, item in enumerate(node)]
    key = ".".join(path)
    if key in found.tensors or key in found.objects:
        raise CorruptError("two entries have this name", key=key)
    if isinstance(node, Held):
        found.tensors[key] = node
        return TensorLeaf(key)
    assert isinstance(node, Whole)
    found.objects[key] = StoredObject(key, value=node.value)
    return ObjectLeaf(key)


def _inside(objects: Iterable[StoredObject], files: Sequence[StateFile]) -> Iterator[tuple[str, StoredArray]]:
    """The tensors inside the objects, by their keys."""
    arrays: dict[str, StoredArray] = {}
    for file in files:
        arrays.update(file.arrays)
    for node in walk([item.value for item in objects]):
        if isinstance(node, TensorLeaf):
            yield node.key, arrays[node.key]


def spread(value: object, file: StateFile) -> object:
    """A stored value as a tree: every tensor in it a tensor of the catalog, everything else objects.

    Lists without tensors and mappings in them stay whole.
    """
    mapping = as_mapping(value)
    if mapping:
        return {str(name): spread(item, file) for name, item in mapping.items()}
    if isinstance(value, (list, tuple)) and any(_is_container(item) for item in value):
        return [spread(item, file) for item in value]
    if isinstance(value, TensorLeaf):
        return held_whole(file.arrays[value.key])
    return Whole(value)


def _is_container(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_container(item) for item in value)
    return isinstance(value, TensorLeaf) or as_mapping(value) is not None


def group_trees(
    param_groups: Sequence[Mapping[object, object]], names_of: Mapping[int, Sequence[str]]
) -> list[dict[str, object]]:
    """The settings of the optimizer's groups, ``params`` by name.

    Args:
        param_groups: as stored; their ``params`` are numbers of flat groups.
        names_of: number of a flat group → the names of its parameters.
    """
    made = []
    for group in param_groups:
        tree: dict[str, object] = {str(name): Whole(value) for name, value in group.items() if name != PARAMS}
        numbers = group.get(PARAMS)
        if isinstance(numbers, (list, tuple)) and all(number in names_of for number in numbers):
            tree[PARAMS] = Whole([name for number in numbers for name in names_of[number]])
        elif PARAMS in group:
            tree[PARAMS] = Whole(numbers)
        made.append(tree)
    return made


def tree_of(
    *,
    weights: Mapping[str, Held],
    states: Mapping[str, Mapping[str, object]],
    groups: Sequence[Mapping[str, object]],
    optimizer: Mapping[str, object],
    beside: Mapping[str, object],
) -> dict[str, object]:
    """The tree of the module's docstring.

    Args:
        weights: by name.
        states: parameter name → state name → ``Held`` or ``Whole``.
        groups: from ``group_trees``.
        optimizer: what else the optimizer keeps, by name; None is left out.
        beside: everything else, by name; None is left out.

    Raises:
        CorruptError: a parameter is called like one of the other entries.
    """
    tree: dict[str, object] = dict(weights)
    below: dict[str, object] = {}
    if states:
        below[STATE] = dict(states)
    if groups:
        below[PARAM_GROUPS] = list(groups)
    below |= {name: Whole(value) for name, value in optimizer.items() if value is not None and name not in below}
    others: dict[str, object] = {OPTIMIZER: below} if below else {}
    others |= {name: Whole(value) for name, value in beside.items() if value is not None and name != OPTIMIZER}
    for name, item in others.items():
        if name in tree:
            raise CorruptError("a parameter has the name of another entry of the checkpoint", key=name)
        tree[name] = item
    return tree
