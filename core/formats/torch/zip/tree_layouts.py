"""Layouts of many torch zips that are alike; each distinct layout is computed only once.

The files of a pipeline stage's ranks differ only in their arrays. A pickle depends on the tree, on
which leaves share an array, and on dtypes and shapes. ``TreePlans`` describes all of these by a
signature, and computes pickle and record positions once per signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.formats.torch.zip.tree_layout import TreePlan, placed_records, plan_tree
from core.pickle.inert import NO_STATE, Global, Inert, Size, TensorLeaf, ValueCounter

if TYPE_CHECKING:
    from core.engine.catalog.file_image import JoinedArray
    from core.engine.catalog.stored import PlannedArray

_PLAIN = frozenset({str, int, bool, bytes, type(None), Global})
_MAX_PLANS = 256
_MANY = 64
"""Number of values from which a container counts as large, so that its content gets a number."""


class TreePlans:
    """Plans the torch zips of one checkpoint.

    Args:
        prefix: as for ``plan_tree``.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._plans: dict[tuple[object, ...], TreePlan] = {}
        self._opaque: dict[int, tuple[object, int | None]] = {}
        """id of a container → (the container, kept so that its id stays unique; the number of its
        content if it is large and contains no tensor, else None).
        """
        self._contents: dict[tuple[object, ...], int] = {}
        """Signature of a content → its number."""
        self._weights = ValueCounter()

    def plan(
        self, value: object, array_of: Callable[[str], PlannedArray | JoinedArray]
    ) -> TreePlan:
        """Plan the torch zip of an inert tree, as ``plan_tree`` does.

        Raises:
            UnsupportedError: the tree refers to a storage in another file.
        """
        builder = _SignatureBuilder(array_of, self._number_of)
        signature = builder.signature(value)
        if signature is None:
            return plan_tree(value, array_of, prefix=self._prefix)
        # A tree with a known signature differs from the planned one only in its arrays.
        cached = self._plans.get(signature)
        if cached is not None:
            arrays = placed_records(cached.archive, builder.records)
            return replace(cached, arrays=arrays, records=builder.records)
        # A plan serves others only if both walks found the storages in the same order.
        plan = plan_tree(value, array_of, prefix=self._prefix)
        if [array.name for array in plan.records] == [array.name for array in builder.records]:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[signature] = plan
        return plan

    def _number_of(self, node: object) -> int | None:
        """Return the number of a container's content, if it is large and contains no tensor.

        Ranks repeat such containers, and a number is faster to compare than their content.
        """
        numbered = self._opaque.get(id(node))
        if numbered is None:
            number = None
            # The weight of a container with tensors is 0.
            if self._weights.of(node) > _MANY:
                content = _SignatureBuilder(_no_array, lambda _: None).signature(node)
                # A content without a signature equals only itself.
                content_key = (id(node),) if content is None else content
                number = self._contents.setdefault(content_key, len(self._contents))
            numbered = self._opaque[id(node)] = (node, number)
        return numbered[1]


def _no_array(key: str) -> PlannedArray:
    raise AssertionError(f"a container without tensors has the tensor {key}")


class _SignatureBuilder:
    """Builds the signature of one tree; trees with equal signatures have equal pickles.

    Args:
        array_of: returns the array for a leaf's key.
        number_of: returns the number that describes the content of a container, or None.

    Attributes:
        records: the arrays in the order of the pickle's storages.
    """

    def __init__(
        self,
        array_of: Callable[[str], PlannedArray | JoinedArray],
        number_of: Callable[[object], int | None],
    ) -> None:
        self._array_of = array_of
        self._number_of = number_of
        self._parts: list[object] = []
        self._numbered_nodes: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        self.records: list[PlannedArray | JoinedArray] = []

    def signature(self, value: object) -> tuple[object, ...] | None:
        """Return the signature of a tree; None if it cannot be described or is nested too deeply.

        A list, tuple or mapping is described by its kind and length, followed by the descriptions
        of its elements; an object that occurs again, by the number of its first occurrence.
        """
        try:
            return tuple(self._parts) if self._add(value) else None
        except RecursionError:
            return None

    def _add(self, node: object) -> bool:
        kind = type(node)
        add = self._parts.append
        if kind is TensorLeaf:
            self._add_leaf(node)  # type: ignore[arg-type]
        elif kind in _PLAIN:
            add(kind)
            add(node)
        elif kind is float:
            add(repr(node))
        elif id(node) in self._numbered_nodes:
            add(("again", self._numbered_nodes[id(node)]))
        elif kind is tuple and not node:
            add(())
        else:
            self._numbered_nodes[id(node)] = len(self._numbered_nodes)
            number = self._number_of(node)
            if number is None:
                return self._add_container(node)
            add(("content", number))
        return True

    def _add_leaf(self, leaf: TensorLeaf) -> None:
        if id(leaf) in self._numbered_nodes:
            self._parts.append(("again", self._numbered_nodes[id(leaf)]))
            return
        self._numbered_nodes[id(leaf)] = len(self._numbered_nodes)
        array = self._array_of(leaf.key)
        number = self._numbers.setdefault(array.name, len(self.records))
        if number == len(self.records):
            self.records.append(array)
        self._parts.append((leaf.wrapper, leaf.requires_grad, number, array.dtype, array.shape))

    def _add_container(self, node: Any) -> bool:
        kind = type(node)
        if kind is dict:
            self._parts.append(("dict", len(node)))
            return self._add_entries(node.items())
        if kind is list or kind is tuple or kind is Size:
            self._parts.append((kind, len(node)))
            return all(map(self._add, node))
        if kind is not Inert:
            return False
        # The numbers of parts come first, so that different objects have different descriptions.
        has_state = node.state is not NO_STATE
        self._parts.append(
            (node.how, len(node.args), len(node.items), len(node.entries), not has_state)
        )
        state = node.state if has_state else None
        members = (node.fn, node.args, node.kwargs, state, node.items)
        return all(map(self._add, members)) and self._add_entries(node.entries)

    def _add_entries(self, entries: Iterable[tuple[object, object]]) -> bool:
        return all(self._add(key) and self._add(item) for key, item in entries)
