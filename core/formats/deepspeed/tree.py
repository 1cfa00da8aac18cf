"""Building a catalog from a nested tree of tensors and objects, which defines keys and skeleton.

::

    <parameter>                                the weights, under their own names
    optimizer.state.<parameter>.<state>        exp_avg, exp_avg_sq, step … of each parameter
    optimizer.param_groups.<group>.<setting>   lr, betas …; ``params``: names of the parameters
    optimizer.loss_scaler …                    the optimizer's other entries
    lr_scheduler, ds_config, iteration …       the model file's other entries, including those of
                                               the training script

A key is the dot-joined path in the tree, as in torch's distributed checkpoints of the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.tensor import Tensor, tensors_of, whole_tensor
from core.errors import CorruptError
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.values import dataclass

if TYPE_CHECKING:
    from core.formats.deepspeed.state_file import StateFile

OPTIMIZER = "optimizer"
STATE = "state"
PARAM_GROUPS = "param_groups"
PARAMS = "params"
EXTRAS = "universal"
"""Prefix of the keys of the objects that describe how tensor parallelism shards a parameter."""


@dataclass(frozen=True, slots=True)
class WholeObject:
    """A leaf of the tree: a value that becomes one object of the catalog."""

    value: object


@dataclass(slots=True)
class _KeyedEntries:
    """The tensors and objects of a tree by key."""

    tensors: dict[str, Tensor]
    objects: dict[str, StoredObject]

    def add(self, node: object, path: tuple[str, ...]) -> object:
        """Add the entries of a tree below a path, and return its skeleton.

        Raises:
            CorruptError: two entries have the same key.
        """
        if isinstance(node, Mapping):
            return {name: self.add(item, (*path, name)) for name, item in node.items()}
        if isinstance(node, list):
            return [self.add(item, (*path, str(index))) for index, item in enumerate(node)]
        key = ".".join(path)
        if key in self.tensors or key in self.objects:
            raise CorruptError("two entries have the same name", key=key)
        if isinstance(node, Tensor):
            self.tensors[key] = node
            return TensorLeaf(key)
        assert isinstance(node, WholeObject)
        self.objects[key] = StoredObject(key, value=node.value)
        return ObjectLeaf(key)


def assemble_catalog(
    tree: Mapping[str, object],
    *,
    format: str,
    version: str | None,
    files: Sequence[StateFile],
) -> Catalog:
    """Return the catalog of a tree.

    Args:
        tree: nested dicts and lists with ``Tensor`` and ``WholeObject`` as leaves.
        files: the files that contain the tensors inside objects.

    Raises:
        CorruptError: two entries have the same key.
    """
    entries = _KeyedEntries({}, {})
    skeleton = entries.add(tree, ())
    # Tensors inside objects are hidden: they are copied with the object, under the keys that their
    # leaves have already.
    array_of = {key: array for file in files for key, array in file.arrays.items()}
    hidden = {
        node.key: array_of[node.key]
        for node in walk([item.value for item in entries.objects.values()])
        if isinstance(node, TensorLeaf)
    }

    return Catalog(
        format=format,
        version=version,
        tensors=entries.tensors,
        objects=entries.objects,
        hidden=tensors_of(hidden),
        skeleton=skeleton,
    )


def spread(value: object, file: StateFile) -> object:
    """Convert a stored value to a tree, in which its tensors become tensors of the catalog.

    All other values become objects. A list is one object unless it contains a tensor or a mapping.
    """
    mapping = as_mapping(value)
    if mapping:
        return {str(name): spread(item, file) for name, item in mapping.items()}
    if isinstance(value, (list, tuple)) and any(_is_container(item) for item in value):
        return [spread(item, file) for item in value]
    if isinstance(value, TensorLeaf):
        return whole_tensor(file.arrays[value.key])
    return WholeObject(value)


def _is_container(value: object) -> bool:
    """Return whether a value is a tensor, a mapping, or a list that contains one of them."""
    if isinstance(value, (list, tuple)):
        return any(_is_container(item) for item in value)
    return isinstance(value, TensorLeaf) or as_mapping(value) is not None


def group_trees(
    param_groups: Sequence[Mapping[object, object]], names_of: Mapping[int, Sequence[str]]
) -> list[dict[str, object]]:
    """Return the settings of the optimizer's groups as trees, with ``params`` by name.

    Args:
        param_groups: the groups as stored; their ``params`` are numbers of flat groups.
        names_of: number of a flat group → names of its parameters.
    """
    trees = []
    for group in param_groups:
        tree: dict[str, object] = {
            str(name): WholeObject(value) for name, value in group.items() if name != PARAMS
        }
        numbers = group.get(PARAMS)
        if isinstance(numbers, (list, tuple)) and all(number in names_of for number in numbers):
            tree[PARAMS] = WholeObject([name for number in numbers for name in names_of[number]])
        elif PARAMS in group:  # numbers of something else are kept as they are
            tree[PARAMS] = WholeObject(numbers)
        trees.append(tree)
    return trees


def build_state_tree(
    *,
    weights: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, object]],
    groups: Sequence[Mapping[str, object]],
    optimizer: Mapping[str, object],
    other_entries: Mapping[str, object],
) -> dict[str, object]:
    """Build the tree that the module's docstring shows.

    Args:
        weights: weights by name.
        states: parameter name → state name → ``Tensor`` or ``WholeObject``.
        groups: result of ``group_trees``.
        optimizer: other values of the optimizer by name; those that are None are skipped.
        other_entries: all other values by name; those that are None are skipped.

    Raises:
        CorruptError: a parameter has the name of another entry.
    """
    tree: dict[str, object] = dict(weights)
    optimizer_tree: dict[str, object] = {}
    if states:
        # A file may have one step for many parameters; each parameter gets a tensor of its own.
        optimizer_tree[STATE] = {
            name: {
                state: replace(item) if isinstance(item, Tensor) else item
                for state, item in of_parameter.items()
            }
            for name, of_parameter in states.items()
        }
    if groups:
        optimizer_tree[PARAM_GROUPS] = list(groups)
    optimizer_tree |= {
        name: WholeObject(value)
        for name, value in optimizer.items()
        if value is not None and name not in optimizer_tree
    }
    # An entry that is called like the optimizer must not replace the tree above.
    top_level: dict[str, object] = {OPTIMIZER: optimizer_tree} if optimizer_tree else {}
    top_level |= {
        name: WholeObject(value)
        for name, value in other_entries.items()
        if value is not None and name != OPTIMIZER
    }
    for name, item in top_level.items():
        # Parameters have arbitrary names: one may be called ``iteration``.
        if name in tree:
            raise CorruptError(
                "a parameter and another entry of the checkpoint have the same name", key=name
            )
        tree[name] = item
    return tree
