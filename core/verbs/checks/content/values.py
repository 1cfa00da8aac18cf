"""CK710–CK715: find values that a trained model does not have: NaN, infinite, huge or constant.

Usual cases are not reported: norms that are all 1 and biases that are all 0 at the start (only
tensors with two axes of more than one element are checked for that), second matrices of LoRA
adapters, which begin as zeros, masks that hold −inf, and the best value so far of a callback
(Lightning's ModelCheckpoint), which begins as infinity. Moments of an optimizer are zero for
parameters without a gradient; one note covers all of them.

If the layout is known, elements are counted in the global tensor, so replicas count once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.engine.numbers.facts import ElementCount, ValueFacts, ValueObserver
from core.engine.numbers.kinds import KINDS
from core.values import dataclass, n_text
from core.verbs.checks.finding import Code, Finding, Level, Severity, get_code
from core.verbs.checks.subject import Check, Subject
from core.verbs.checks.watch import Watch

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.stored import StoredArray
    from core.engine.catalog.tensor import Fragment, Tensor

NAN = get_code("CK710")
INFINITE = get_code("CK711")
ZERO = get_code("CK712")
CONSTANT = get_code("CK713")
ZERO_STATES = get_code("CK714")
HUGE = get_code("CK715")

_COUNTS = ((NAN, "nan", "NaN"), (INFINITE, "infinite", "infinite"), (HUGE, "huge", "beyond 2^100"))
"""(code, field of ``ValueFacts``, description)."""

_STATE = re.compile(
    r"(^|[./])(optim(izer)?|exp_avg(_sq)?|max_exp_avg_sq|momentum(_buffer)?)([./]|$)"
)
_BEGINS_AS_ZEROS = re.compile(
    r"lora_(B|embedding_B)|lora\.up|linear_out|adaLN|modulation|zero_|gate_scale|bias"
)
_MASK = re.compile(r"mask|causal|attn\.bias|attention\.bias|alibi")
_CALLBACK = re.compile(r"(^|\.)callbacks\.")


def watch(subject: Subject) -> Watch:
    """Request the values of all floating-point arrays."""
    return Watch(observers=(ValueObserver(subject.device),))


@dataclass(slots=True)
class _Tensor:
    """A tensor and the facts about its values.

    Args:
        key, meta: the tensor.
        is_padding: a tensor of a rank file that is not part of any global tensor; it may hold only
            padding, or the flat buffer of several tensors.
        parts: (fragment, facts) of its arrays; each box once, unless a replica has unusual values.
    """

    key: str
    meta: Tensor
    is_padding: bool = False
    parts: list[tuple[Fragment, ValueFacts]] = field(default_factory=list)


def check_values(subject: Subject) -> Iterator[Finding]:
    """Report NaN, infinities, huge values, and matrices that hold a single value (CK710–CK715)."""
    if subject.salvaged.catalog is None:
        return
    (observer,) = subject.byte_scan.watches["content.values"].observers
    assert isinstance(observer, ValueObserver)
    zero_states: list[str] = []
    for tensor in _tensors(subject, observer.facts):
        yield from _check_numbers(subject, tensor)
        # Only matrices are checked for a single value: norms and biases often have one.
        if tensor.is_padding or not _is_matrix(tensor.meta.shape):
            continue
        # The bits that all elements share; None if they differ or were not all read.
        distinct = {facts.value if facts.is_read else None for _, facts in tensor.parts}
        value = distinct.pop() if len(distinct) == 1 else None
        if value is None:
            continue
        # Negative zero has the sign bit set.
        is_zero = value in (0, 1 << (8 * KINDS[tensor.meta.dtype].n_bytes - 1))
        if not _STATE.search(tensor.key):
            # Some weights begin as zeros.
            key, n_elements = tensor.key, tensor.meta.n_elements
            array = tensor.parts[0][0].array
            file = None if array is None else array.extent.file
            if not is_zero:
                yield CONSTANT.finding(
                    f"all {n_elements} elements have the same bits, {value:#x}", key=key, file=file
                )
            elif not _BEGINS_AS_ZEROS.search(key):
                yield ZERO.finding(f"all {n_elements} elements are zero", key=key, file=file)
        elif is_zero:
            zero_states.append(tensor.key)
    if zero_states:
        n = len(zero_states)
        states_are = n_text(n, "matrix optimizer state is", "matrix optimizer states are")
        yield ZERO_STATES.finding(f"{states_are} all zeros", keys=zero_states)


def _tensors(subject: Subject, facts: dict[str, ValueFacts]) -> Iterator[_Tensor]:
    """Yield every tensor with the facts about its values.

    Tensors of rank files have their global names if the layout is known, otherwise those stored.
    """
    catalog = subject.salvaged.catalog
    assert catalog is not None
    # First the global tensors, then the arrays of rank files that are in none of them.
    unassigned = dict(facts)
    canonical = subject.canonical
    is_joined = canonical is not None and canonical.has_layout and catalog.is_rank_local
    if canonical is not None and is_joined:
        yield from _tensors_of(canonical.catalog, facts, unassigned)
    for tensor in _tensors_of(catalog, dict(unassigned), unassigned):
        tensor.is_padding = is_joined
        yield tensor


def _tensors_of(
    catalog: Catalog, facts: dict[str, ValueFacts], unassigned: dict[str, ValueFacts]
) -> Iterator[_Tensor]:
    """Yield the tensors of a catalog with facts, and remove their arrays from ``unassigned``."""
    for key, meta in catalog.all_tensors():
        if meta.dtype not in KINDS:
            continue
        tensor = _Tensor(key, meta)
        boxes: set[Box] = set()
        for fragment in meta.fragments():
            if fragment.array is None or fragment.array.name not in facts:
                continue
            unassigned.pop(fragment.array.name, None)
            # A replica counts once, but a replica with unusual values must not be lost.
            if fragment.box not in boxes or not facts[fragment.array.name].is_usual:
                boxes.add(fragment.box)
                tensor.parts.append((fragment, facts[fragment.array.name]))
        if tensor.parts:
            yield tensor


def _check_numbers(subject: Subject, tensor: _Tensor) -> Iterator[Finding]:
    """Report NaN, infinities and huge values in one tensor (CK710, CK711, CK715)."""
    key, n_elements = tensor.key, tensor.meta.n_elements
    for code, name, description in _COUNTS:
        total, first = _count_elements(tensor, name)
        if first is None:
            continue
        index, array, number = first
        file = array.extent.file
        # In a flat buffer of many tensors, name the one that the element belongs to.
        owner = _tensor_at(subject, array, number) if tensor.is_padding else None
        prefix = f"{key}: " if owner not in (None, key) else ""
        yield code.finding(
            f"{prefix}{total} of {n_elements} elements are {description}, the first at index"
            f" {index}",
            key=owner or key,
            file=file,
            rank=file.rpartition("/")[0] or None if array.coords else None,
            expected="finite numbers" if code is not HUGE else "values up to 2^100",
            found=f"{total} {description}",
            severity=_severity(code, tensor),
        )


def _count_elements(
    tensor: _Tensor, name: str
) -> tuple[int, tuple[Shape, StoredArray, int] | None]:
    """Add up the unusual elements of one kind in all arrays of a tensor.

    Args:
        name: field of ``ValueFacts`` with the count.

    Returns:
        Their number, and the first of them: (index in the tensor, array, element of the array).
    """
    total = 0
    first: tuple[Shape, StoredArray, int] | None = None
    # Several fragments may be parts of one array, whose count is that of the complete array.
    counted: set[str] = set()
    for fragment, facts in tensor.parts:
        count: ElementCount = getattr(facts, name)
        assert fragment.array is not None
        if count.first is None or fragment.array.name in counted:
            continue
        counted.add(fragment.array.name)
        total += count.n
        index = _index_in_tensor(fragment, count.first)
        if first is None or index < first[0]:
            first = index, fragment.array, count.first
    return total, first


def _tensor_at(subject: Subject, array: StoredArray, number: int) -> str | None:
    """Return the name of the tensor that an element of an array belongs to.

    Returns:
        None if the position of the element in the file is unknown.
    """
    extent = array.extent
    if extent.strides is not None or extent.encoding is not None or extent.is_late:
        return None
    at = extent.offset + number * itemsize(array.dtype)
    return next(iter(subject.tensor_names.at(extent.file, at, at + 1)), None)


def _severity(code: Code, tensor: _Tensor) -> Severity:
    """Return the severity of unusual values in a tensor, judging by its name."""
    # The best value so far of a callback begins as infinity.
    if code is INFINITE and _CALLBACK.search(tensor.key) and tensor.meta.shape == ():
        return Severity.NOTE
    # Masks hold −inf, or huge values in its place, but never NaN.
    if code is NAN or not _MASK.search(tensor.key):
        is_weight = _is_matrix(tensor.meta.shape) and not _STATE.search(tensor.key)
        return Severity.WARNING if code is HUGE and is_weight else code.severity
    return Severity.NOTE


def _index_in_tensor(fragment: Fragment, number: int) -> Shape:
    """Return the index in the tensor of an element of a fragment's array.

    Args:
        number: flat index of the element in the array, in C order.
    """
    assert fragment.array is not None
    local: list[int] = []
    for extent in reversed(fragment.array.shape):
        number, inside = divmod(number, extent)
        local.insert(0, inside)
    # Array and box may differ in rank by leading axes of one element.
    inside_box = [i - start for i, start in zip(local, fragment.at, strict=True)]
    rank = fragment.box.rank
    aligned = ([0] * rank + inside_box)[-rank:] if rank else []
    return tuple(o + i for o, i in zip(fragment.box.offset, aligned, strict=True))


def is_zero_unusual(key: str, tensor: Tensor) -> bool:
    """Return whether a tensor is a matrix of numbers that training leaves no zeros in."""
    key = key.rpartition(":")[2]  # without the rank directory
    return (
        tensor.dtype in KINDS
        and _is_matrix(tensor.shape)
        and not any(pattern.search(key) for pattern in (_STATE, _BEGINS_AS_ZEROS, _MASK))
    )


def _is_matrix(shape: Sequence[int]) -> bool:
    """Return whether at least two axes have more than one element."""
    return sum(n > 1 for n in shape) >= 2


CHECKS = (Check(check_values, level=Level.DEEP),)
