"""Names of experts: every implementation has its own form, rules are written for one form.

::

    sequential   mlp.experts.local_experts.3.linear_fc1.weight   numbered within an EP rank
    te_grouped   mlp.experts.linear_fc1.weight3                  the same
    grouped      mlp.experts.weight1                             all experts of a rank at once
    stacked      mlp.experts.experts.linear_fc1.weight           torch_dist: stacked on axis 0
    single       mlp.experts.experts.3.linear_fc1.weight         torch_dist: numbered over the model
    switch       mlp.local_experts.3.dense_h_to_4h.weight        megatron.legacy: numbered in a rank

The common form is ``sequential``, numbered over the complete model. The forms are data:
``[[experts]]`` in ``megatron/rules/*.toml``.

A parameter of legacy grouped experts (GroupedMLP) is declared as a matrix, but used as another
array: ``weight1`` of shape (h, n * r), for n experts with r rows of fc1 each, is a C-order (n, h,
r) array, and each expert's (h, r) matrix is its weight transposed. In the same way, ``weight2`` of
shape (n * c, h) is an (n, c, h) array. So an expert's weight is a strided view, and cutting
``weight1`` by columns would mix the experts. To write such a parameter, the weights of experts are
transposed on both sides (``transposed``), and dense arrays are joined (``packed``).

Source for GroupedMLP: megatron-core 0.12.1 ``transformer/moe/experts.py``, tests/golden
(``moe_grouped``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.file_image import JoinedArray
from core.engine.catalog.stored import PlannedArray, StoredArray, with_axes
from core.engine.catalog.tensor import Fragment, swapped
from core.errors import CorruptError, UnsupportedError
from core.values import dataclass

OPTION = "--experts"


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """A form of the names of experts' parameters.

    Args:
        names: name of the form, such as ``te_grouped``; several patterns may share it.
        pattern: searched in a parameter's name; matches the part after ``experts.``.
        name: template of that part, with ``{e}`` and ``{rest}``; None for a form that is only read.
        rest: the parameter's name within its expert, if the pattern has no such group.
    """

    names: str
    pattern: re.Pattern[str]
    name: str | None = None
    rest: str | None = None

    def named(self, expert: Expert, number: int) -> str:
        """Return the name of an expert's parameter in this form, which must not be read-only."""
        assert self.name is not None
        return expert.before + self.name.format(e=number, rest=expert.rest)


@dataclass(frozen=True, slots=True)
class Expert:
    """A parameter of an expert, or of all of them.

    Args:
        before: the name up to and including ``experts.``.
        number: number of the expert; None for a tensor that holds several.
        rest: the parameter's name within its expert, such as ``linear_fc1.weight``.
        names: the form of the name (``ExpertForm.names``).
    """

    before: str
    number: int | None
    rest: str
    names: str

    def numbered(self, number: int) -> str:
        """Return the common name of one expert's parameter."""
        return f"{self.before}local_experts.{number}.{self.rest}"


def find_expert(forms: Sequence[ExpertForm], name: str) -> Expert | None:
    """Return the expert to which a parameter or module belongs, or None."""
    # Most names are not those of experts: skip the patterns.
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
    """Return the form that can name an expert's parameter, whatever the expert's number.

    Args:
        names: name of the form.
        number: any number.

    Raises:
        UnsupportedError: the form has no name for the parameter.
    """
    # A form can name the parameter if reading that name gives the same parameter again.
    for form in forms:
        if form.names == names and form.name is not None:
            reread = find_expert(forms, form.named(expert, number))
            if reread is not None and (reread.names, reread.rest) == (names, expert.rest):
                return form
    raise UnsupportedError(
        f"{names} experts do not have this parameter", key=expert.numbered(number)
    )


def unpacked(
    array: StoredArray, rest: str, *, n: int, key: str, rank: str
) -> Iterator[StoredArray]:
    """Yield the weights of single experts in a parameter of legacy grouped experts.

    They are strided views; no data moves.

    Args:
        array: ``weight1`` or ``weight2`` of one rank.
        rest: parameter of the experts, ``linear_fc1.weight`` or ``linear_fc2.weight``.
        n: number of experts on the rank.
        key, rank: for messages.

    Raises:
        CorruptError: the shape or the strides are not those of such a parameter.
    """
    extent = array.extent
    assert not extent.is_late, "rank files know where their arrays are"
    packed_axis = 1 if rest.startswith("linear_fc1") else 0
    if len(array.shape) != 2 or array.shape[packed_axis] % n:
        raise CorruptError(
            f"the parameter's shape {array.shape} does not divide into matrices of {n} grouped "
            "experts",
            key=key,
            rank=rank,
        )
    if extent.strides not in (None, (array.shape[1], 1)):
        raise CorruptError(
            "parameters of grouped experts must be contiguous, but the strides are "
            f"{extent.strides}",
            key=key,
            rank=rank,
        )

    # The matrices of the experts follow each other in memory, whichever axis is declared longer.
    share = array.shape[packed_axis] // n
    rows, columns = (array.shape[0], share) if packed_axis else (share, array.shape[1])
    for number in range(n):
        offset = extent.offset + number * rows * columns * itemsize(array.dtype)
        view = replace(extent, offset=offset, strides=(1, columns), crc=None)
        yield replace(array, name=f"{array.name}[{number}]", shape=(columns, rows), extent=view)


def packed(name: str, experts: Sequence[PlannedArray], rest: str) -> JoinedArray:
    """Return the parameter of legacy grouped experts that joins their transposed weights.

    Args:
        name: name of the parameter's array.
        experts: the weights of a rank's experts in order, transposed.
        rest: parameter of the experts, ``linear_fc1.weight`` or ``linear_fc2.weight``.
    """
    n, (rows, columns) = len(experts), experts[0].shape
    shape = (rows, n * columns) if rest.startswith("linear_fc1") else (n * rows, columns)
    parts = tuple((number * rows * columns, array) for number, array in enumerate(experts))
    return JoinedArray(name, experts[0].dtype, n * rows * columns, parts, shape)


def transposed(catalog: Catalog, keys: Collection[str]) -> Catalog:
    """Return a catalog in which some matrices are transposed; no data moves.

    Args:
        keys: keys of the matrices.

    Raises:
        UnsupportedError: a matrix is stored without strides (raised when its fragments are
            requested).
    """
    if not keys:
        return catalog

    tensors = {
        key: replace(tensor.with_fragments(partial(_transposed, key)), shape=tensor.shape[::-1])
        if key in keys
        else tensor
        for key, tensor in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors)


def _transposed(key: str, fragment: Fragment) -> Fragment:
    """Return a fragment of the transposed matrix; its array is a transposed view."""
    array = fragment.array
    box = Box(fragment.box.offset[::-1], fragment.box.shape[::-1])
    if array is None:
        return replace(fragment, box=box)
    extent = array.extent
    if extent.encoding is not None or len(array.shape) < 2:
        raise UnsupportedError(
            "compressed experts cannot be packed into a single parameter (the old GroupedMLP)",
            key=key,
            hint=f"write one module per expert with {OPTION} sequential",
        )

    view = with_axes(array, swapped(tuple(range(len(array.shape)))))
    return replace(fragment, box=box, array=view, at=swapped(fragment.at))
