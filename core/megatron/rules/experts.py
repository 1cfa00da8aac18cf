"""The names of experts: every implementation has its own, rules see one.

::

    sequential   mlp.experts.local_experts.3.linear_fc1.weight   numbered within an expert parallel rank
    te_grouped   mlp.experts.linear_fc1.weight3                  the same
    grouped      mlp.experts.weight1                             all experts of a rank in one parameter
    stacked      mlp.experts.experts.linear_fc1.weight           torch_dist: all experts, on an axis in front
    single       mlp.experts.experts.3.linear_fc1.weight         torch_dist: numbered over the model
    switch       mlp.local_experts.3.dense_h_to_4h.weight        megatron.legacy: numbered within a rank

The common form is ``sequential``, numbered over the model. The rows are data: ``[[experts]]`` in
``megatron/rules/*.toml``.

A parameter of legacy grouped experts is declared as a matrix, but used as another one: ``weight1``
of shape (h, n * r), for n experts of r rows of fc1, is a C-order (n, h, r) array, and each expert's
(h, r) is its weight transposed; ``weight2`` of shape (n * c, h) is an (n, c, h) array in the same
way. So an expert's weight is a strided view, and cutting ``weight1`` by columns would mix the
experts. To write them, the weights of experts are transposed on both sides (``transposed``), and a
parameter is joined of dense arrays.

Source of that: megatron-core 0.12.1 ``transformer/moe/experts.py`` ``GroupedMLP``, tests/golden
(``moe_grouped``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box, c_strides
from core.arrays.dtypes import itemsize
from core.arrays.fast_value import value
from core.catalog.catalog import Catalog, Fragment, swapped
from core.catalog.file_image import JoinedArray
from core.catalog.stored import PlannedArray, StoredArray
from core.errors import CorruptError, UnsupportedError

OPTION = "--moe-experts"


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """One way to name the parameters of experts.

    Args:
        names: one of those above, such as ``te_grouped``; several rows may share it.
        pattern: searched in a name; what it finds is the part behind ``experts.``.
        name: that part, with ``{e}`` and ``{rest}``; None for a form that is read only.
        rest: the parameter within its expert, where the pattern has no such group.
    """

    names: str
    pattern: re.Pattern[str]
    name: str | None = None
    rest: str | None = None

    def named(self, expert: Expert, number: int) -> str:
        """Return the name of an expert's parameter in this form, which is not a read-only one."""
        assert self.name is not None
        return expert.before + self.name.format(e=number, rest=expert.rest)


@value(frozen=True, slots=True)
class Expert:
    """A parameter of an expert, or of all of them.

    Args:
        before: the name up to and with ``experts.``.
        number: which expert; None for a tensor that holds several.
        rest: the parameter's name within its expert, such as ``linear_fc1.weight``.
        names: the form that it was found in.
    """

    before: str
    number: int | None
    rest: str
    names: str

    def numbered(self, number: int) -> str:
        """Return the common name of one expert's parameter."""
        return f"{self.before}local_experts.{number}.{self.rest}"


def expert_of(forms: Sequence[ExpertForm], name: str) -> Expert | None:
    """Return the expert that a parameter (or module) belongs to, or None."""
    if "experts." not in name:
        return None
    for form in forms:
        match = form.pattern.search(name)
        if match is not None:
            groups = match.groupdict()
            number = groups.get("e")
            return Expert(
                before=name[: match.start()],
                number=None if number is None else int(number),
                rest=form.rest or groups["rest"],
                names=form.names,
            )
    return None


def expert_form(
    forms: Sequence[ExpertForm], expert: Expert, *, names: str, number: int
) -> ExpertForm:
    """Return the form that can name an expert's parameter; what holds for one number holds for all.

    Raises:
        UnsupportedError: the form has no name for it.
    """
    for form in forms:
        if form.names == names and form.name is not None:
            again = expert_of(forms, form.named(expert, number))
            if again is not None and (again.names, again.rest) == (names, expert.rest):
                return form
    raise UnsupportedError(
        f"experts of the kind {names} have no such parameter", key=expert.numbered(number)
    )


def unpacked(
    array: StoredArray, rest: str, *, n: int, key: str, rank: str
) -> Iterator[StoredArray]:
    """Yield the weights of single experts in a parameter of legacy grouped experts.

    They are strided views; no data moves.

    Args:
        array: ``weight1`` or ``weight2`` of one rank.
        rest: what it holds, ``linear_fc1.weight`` or ``linear_fc2.weight``.
        n: experts of the rank.
        key, rank: for messages.

    Raises:
        CorruptError: the shape or the strides are not those of such a parameter.
    """
    extent = array.extent
    assert not extent.is_late, "rank files know where their arrays are"
    packed = 1 if rest.startswith("linear_fc1") else 0
    if len(array.shape) != 2 or array.shape[packed] % n:
        raise CorruptError(
            f"a parameter of {n} grouped experts has the shape {array.shape}", key=key, rank=rank
        )
    if extent.strides not in (None, (array.shape[1], 1)):
        raise CorruptError(
            f"a parameter of grouped experts has the strides {extent.strides}", key=key, rank=rank
        )
    share = array.shape[packed] // n
    rows, columns = (
        (array.shape[0], share) if packed else (share, array.shape[1])
    )  # of one expert, not yet transposed
    for number in range(n):
        offset = extent.offset + number * rows * columns * itemsize(array.dtype)
        view = replace(extent, offset=offset, strides=(1, columns), crc=None)
        yield replace(array, name=f"{array.name}[{number}]", shape=(columns, rows), extent=view)


def packed(name: str, experts: Sequence[PlannedArray], rest: str) -> JoinedArray:
    """Return the parameter of legacy grouped experts that their transposed weights make.

    Args:
        name: name of the parameter's array.
        experts: the weights of a rank's experts in order, transposed.
        rest: what they are, ``linear_fc1.weight`` or ``linear_fc2.weight``.
    """
    n, (rows, columns) = len(experts), experts[0].shape
    shape = (rows, n * columns) if rest.startswith("linear_fc1") else (n * rows, columns)
    parts = tuple((number * rows * columns, array) for number, array in enumerate(experts))
    return JoinedArray(name, experts[0].dtype, n * rows * columns, parts, shape)


def transposed(catalog: Catalog, keys: Collection[str]) -> Catalog:
    """Return a catalog in which some matrices are transposed; no data moves.

    Raises:
        UnsupportedError: a matrix is stored in a form that has no strides; raised when its
            fragments are asked for.
    """
    if not keys:
        return catalog

    def fragments_of(key: str) -> Sequence[Fragment]:
        fragments = catalog.fragments(key)
        return [_transposed(fragment) for fragment in fragments] if key in keys else fragments

    tensors = {
        key: replace(meta, shape=meta.shape[::-1]) if key in keys else meta
        for key, meta in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, fragments_of=fragments_of)


def _transposed(fragment: Fragment) -> Fragment:
    """Return a fragment of the transposed matrix; its array is a transposed view."""
    array = fragment.array
    box = Box(fragment.box.offset[::-1], fragment.box.shape[::-1])
    if array is None:
        return replace(fragment, box=box)
    extent = array.extent
    if extent.encoding is not None or len(array.shape) < 2:
        raise UnsupportedError(
            "compressed experts cannot be written as one parameter (the old GroupedMLP)",
            key=fragment.key,
            hint=f"write one module for each expert with {OPTION} sequential",
        )

    # A transposed view has the strides in the other order; its bytes stay where they are.
    shape, strides = swapped(array.shape), swapped(extent.strides or c_strides(array.shape))
    if extent.is_late:
        extent = replace(extent, is_swapped=not extent.is_swapped)
    else:
        extent = replace(extent, strides=None if strides == c_strides(shape) else strides, crc=None)
    view = replace(array, name=f"{array.name}^T", shape=shape, extent=extent)
    return replace(fragment, box=box, array=view, at=swapped(fragment.at))
