"""Find attributes of mappings in a state dict: ``od.ema = tensor``, or those of a dict subclass.

Pickles store them in addition to the entries. Formats that name tensors by the paths of entries
cannot store them, so conversions drop and report them::

    model._metadata    set by torch.nn.Module.state_dict: versions of modules
    model.ema          set by a training script
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.dropped import Dropped, dropped_each, dropped_together
from core.pickle.inert import NO_STATE, Global, Inert, TensorLeaf, as_mapping, walk
from core.pickle.nesting import Path, containers, entries, join_path, map_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog

VERSIONS = "_metadata"
"""The attribute that ``torch.nn.Module.state_dict`` sets."""
ATTRIBUTES = "attributes of mappings"
"""The reason for not carrying them over (``core.engine.catalog.dropped``)."""


@dataclass(frozen=True, slots=True)
class MappingAttribute:
    """An attribute of a mapping, or the arguments with which its class creates it.

    Args:
        path: path of the mapping.
        name: name of the attribute; ``arguments`` for the arguments of the class.
        value: the inert value.
    """

    path: Path
    name: str
    value: object

    @property
    def key(self) -> str:
        """Dot-joined path of the attribute."""
        return join_path((*self.path, self.name))

    @property
    def holds_tensor(self) -> bool:
        """True if the value contains a tensor."""
        return _holds_tensor(self.value)


def attributes_of(skeleton: object) -> list[MappingAttribute]:
    """Return the attributes of all mappings among the containers of a skeleton, in order.

    The arguments of a mapping's class are listed only if a tensor is among them.
    """
    return [
        MappingAttribute(path, name, value)
        for path, node in containers(skeleton)
        if isinstance(node, Inert)
        for name, value in own_attributes(node)
    ]


def attributes_beside_tensors(skeleton: object) -> list[MappingAttribute]:
    """Return the attributes of the mappings that hold tensors, in entries or in attributes."""
    attributes = attributes_of(skeleton)
    if not attributes:
        return []
    # A tensor belongs to all containers on its path.
    paths = {attribute.path for attribute in attributes if attribute.holds_tensor}
    for entry in entries(skeleton):
        if isinstance(entry.leaf, TensorLeaf):
            paths |= {entry.path[:depth] for depth in range(len(entry.path))}
    return [attribute for attribute in attributes if attribute.path in paths]


def record_attributes(keys: Iterable[str]) -> tuple[Dropped, ...]:
    """Return the record of attributes of mappings that are not carried, by their keys."""
    versions: list[str] = []
    others: list[str] = []
    for key in keys:
        (versions if key.rpartition(".")[2] == VERSIONS else others).append(key)
    return (
        *dropped_each(versions, "module versions, which torch recreates"),
        *dropped_together(others, ATTRIBUTES),
    )


def without_attributes(catalog: Catalog) -> Catalog:
    """Return a copy of a catalog without its ``attributes_beside_tensors``.

    Mappings without tensors keep their attributes: a format that can store other objects may store
    such a mapping unchanged.
    """
    removed = attributes_beside_tensors(catalog.skeleton)
    if not removed:
        return catalog
    paths = {attribute.path for attribute in removed}
    # A copy, so that the catalog's own skeleton does not change.
    skeleton = map_leaves(catalog.skeleton, lambda entry: entry.leaf, copies=True)
    for path, node in containers(skeleton):
        if isinstance(node, Inert) and path in paths:
            # A class cannot be created without its arguments, so the mapping becomes a dict.
            if any(name == _ARGUMENTS for name, _ in own_attributes(node)):
                node.how, node.fn = "reduce", Global("builtins", "dict")
                node.args, node.kwargs, node.items = (), None, []
            node.state = NO_STATE
    return without_tensors_of(replace(catalog, skeleton=skeleton), removed)


def without_tensors_of(catalog: Catalog, attributes: Iterable[MappingAttribute]) -> Catalog:
    """Return a copy of a catalog without the hidden tensors of removed attributes.

    Tensors that objects contain too are kept.
    """
    removed = _tensors_in([attribute.value for attribute in attributes])
    removed -= _tensors_in([catalog.common, *(item.value for item in catalog.objects.values())])
    return replace(
        catalog,
        hidden={key: tensor for key, tensor in catalog.hidden.items() if key not in removed},
    )


_ARGUMENTS = "arguments"


def own_attributes(node: object) -> Iterator[tuple[str, object]]:
    """Yield the name and value of each attribute of a mapping; none for other objects."""
    if not isinstance(node, Inert) or as_mapping(node) is None:
        return
    if node.state is not NO_STATE:
        # A tuple is (attributes, attributes in slots).
        parts = node.state if isinstance(node.state, tuple) else (node.state,)
        for part in parts:
            if isinstance(part, dict):
                yield from ((str(name), value) for name, value in part.items())
            elif part is not None:
                yield "state", part
    arguments = [node.args, node.kwargs, node.items]
    if _holds_tensor(arguments):
        yield _ARGUMENTS, arguments


def _holds_tensor(value: object) -> bool:
    """Return whether an inert value contains a tensor."""
    return any(isinstance(node, TensorLeaf) for node in walk(value))


def _tensors_in(value: object) -> set[str]:
    """Return the keys of all tensors in an inert value."""
    return {node.key for node in walk(value) if isinstance(node, TensorLeaf)}
