"""Laying out many torch zips that are alike: the ranks of a pipeline stage differ by their arrays
only.

A pickle depends on the tree, on which leaves share an array, and on dtypes and shapes.
``TreePlans`` describes all of that by a signature and makes the pickle and the places of the
records once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from core.formats.torch.zip.tree_layout import TreePlan, placed_records, plan_tree
from core.pickle.inert import NO_STATE, Global, Inert, Size, TensorLeaf, ValueCounter

if TYPE_CHECKING:
    from core.catalog.file_image import JoinedArray
    from core.catalog.stored import PlannedArray

_PLAIN = frozenset({str, int, bool, bytes, type(None), Global})
_MAX_PLANS = 256
_MANY = 64


class TreePlans:
    """Plans the torch zips of one checkpoint.

    Args:
        prefix: as for ``plan_tree``.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._plans: dict[tuple[object, ...], TreePlan] = {}
        self._opaque: dict[int, tuple[object, int | None]] = {}
        """id of a container → (the container, so that its id stays its own; the number of its
        content, if it is large and holds no tensor).
        """
        self._contents: dict[tuple[object, ...], int] = {}
        self._weights = ValueCounter()

    def plan(
        self, value: object, array_of: Callable[[str], PlannedArray | JoinedArray]
    ) -> TreePlan:
        """Plan the torch zip of an inert tree, as ``plan_tree`` does."""
        signing = _TreeSignature(array_of, self._number_of)
        signature = signing.signature(value)
        if signature is None:
            return plan_tree(value, array_of, prefix=self._prefix)
        cached = self._plans.get(signature)
        if cached is None:
            plan = plan_tree(value, array_of, prefix=self._prefix)
            if [record.name for record in plan.records] == [
                record.name for record in signing.records
            ]:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[signature] = plan
            return plan
        return replace(
            cached, arrays=placed_records(cached.archive, signing.records), records=signing.records
        )

    def _number_of(self, node: object) -> int | None:
        """Return the number of a container's content, if it is large and holds no tensor.

        Ranks repeat such containers.
        """
        numbered = self._opaque.get(id(node))
        if numbered is None:
            is_large = self._weights.of(node) > _MANY  # 0 with tensors in it
            numbered = self._opaque[id(node)] = (
                node,
                self._number_content(node) if is_large else None,
            )
        return numbered[1]

    def _number_content(self, node: object) -> int:
        signature = _TreeSignature(_no_array, lambda _: None).signature(node)
        content_key = (
            (id(node),) if signature is None else signature
        )  # of a kind that is not described: equal to itself
        return self._contents.setdefault(content_key, len(self._contents))


def _no_array(key: str) -> PlannedArray:
    raise AssertionError(f"a container without tensors has the tensor {key}")


class _TreeSignature:
    """Describes one tree: two with equal signatures have equal pickles, whose storages are
    ``records`` in order.
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
        """Return the signature.

        None for a tree of a kind that is not described, or nested too deeply.
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

    def _add_container(self, node: object) -> bool:
        kind = type(node)
        if kind is dict:
            self._parts.append(("dict", len(node)))  # type: ignore[arg-type]
            return all(self._add(key) and self._add(item) for key, item in node.items())  # type: ignore[attr-defined]
        if kind is list or kind is tuple or kind is Size:
            self._parts.append((kind, len(node)))  # type: ignore[arg-type]
            return all(map(self._add, node))  # type: ignore[call-overload]
        if kind is not Inert:
            return False
        assert isinstance(node, Inert)
        self._parts.append(
            (node.how, len(node.args), len(node.items), len(node.entries), node.state is NO_STATE)
        )
        parts = [
            node.fn,
            node.args,
            node.kwargs,
            None if node.state is NO_STATE else node.state,
            node.items,
        ]
        return all(map(self._add, parts)) and all(
            self._add(key) and self._add(item) for key, item in node.entries
        )
