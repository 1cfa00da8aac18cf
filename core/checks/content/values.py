"""CK710–CK719: numbers that no trained model holds: NaN, infinities, absurd ones, and weights that are all the same.

What is usual is left alone: norms that are all 1 and biases that are all 0 at the start (only tensors with two axes of
more than one element are looked at), second matrices of LoRA adapters, which begin as zeros, masks that hold −inf, and
the best value so far of a callback (Lightning's ModelCheckpoint), which begins as infinity.
Moments of an optimizer are zero for parameters without a gradient, which is one note for all of them.

Counts are those of the global tensor where the layout is known: replicas count once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.checks.watch import Watch
from core.numbers.facts import ElementCount, ValueFacts, ValueObserver
from core.numbers.kinds import KINDS

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.catalog import Catalog, Fragment, TensorMeta
    from core.catalog.stored import StoredArray

NAN = Code(
    "CK710",
    Severity.ERROR,
    "NaN in a tensor",
    "go back to a checkpoint from before the loss became NaN, or copy this one again",
    Level.DEEP,
)
INFINITE = Code(
    "CK711",
    Severity.ERROR,
    "infinities in a tensor",
    "go back to an older checkpoint, or find out where the values overflowed",
    Level.DEEP,
)
ZERO = Code(
    "CK712",
    Severity.WARNING,
    "a weight matrix is all zeros",
    "compare it with another checkpoint: a part that was never written reads as zeros",
    Level.DEEP,
)
CONSTANT = Code(
    "CK713",
    Severity.NOTE,
    "a weight matrix holds one value only",
    "compare it with another checkpoint",
    Level.DEEP,
)
ZERO_STATES = Code(
    "CK714",
    Severity.NOTE,
    "optimizer states of matrices are all zeros",
    "usual for parameters that are frozen or had no gradient yet",
    Level.DEEP,
)
HUGE = Code(
    "CK715",
    Severity.NOTE,
    "numbers beyond 2^100",
    "compare the tensor with another checkpoint: a flipped bit of an exponent looks so",
    Level.DEEP,
)

CODES = (NAN, INFINITE, ZERO, CONSTANT, ZERO_STATES, HUGE)
_COUNTS = ((NAN, "nan", "NaN"), (INFINITE, "infinite", "infinite"), (HUGE, "huge", "beyond 2^100"))
"""Code, field of ``ValueFacts``, in words."""

_STATE = re.compile(r"(^|[./])(optim(izer)?|exp_avg(_sq)?|max_exp_avg_sq|momentum(_buffer)?)([./]|$)")
_BEGINS_AS_ZEROS = re.compile(r"lora_(B|embedding_B)|lora\.up|linear_out|adaLN|modulation|zero_|gate_scale|bias")
_MASK = re.compile(r"mask|causal|attn\.bias|attention\.bias|alibi")
_CALLBACK = re.compile(r"(^|\.)callbacks\.")


def watch(subject: Subject) -> Watch:
    """The values of all floating-point arrays."""
    return Watch(observers=(ValueObserver(subject.device),))


@dataclass(slots=True)
class _Tensor:
    """A tensor and what is known of its numbers.

    Args:
        meta: of the tensor.
        is_padding: it may hold padding only: what a rank file holds and no global tensor needs.
        parts: (fragment, facts) of its arrays, each box once.
    """

    meta: TensorMeta
    is_padding: bool = False
    parts: list[tuple[Fragment, ValueFacts]] = field(default_factory=list)


def values(subject: Subject) -> Iterator[Finding]:
    """NaN, infinities, zeros and constants."""
    if subject.salvaged.catalog is None:
        return
    (observer,) = subject.deep.watches["content.values"].observers
    assert isinstance(observer, ValueObserver)
    zero_states: list[str] = []
    for tensor in _tensors(subject, observer.facts):
        yield from _counted(subject, tensor)
        value = None if tensor.is_padding else _only_value(tensor)
        if value is None or not _is_matrix(tensor.meta.shape):
            continue
        key = tensor.meta.key
        is_zero = value in (0, 1 << (8 * KINDS[tensor.meta.dtype].n_bytes - 1))
        if _STATE.search(key):
            zero_states += [key] if is_zero else []
        elif is_zero and not _BEGINS_AS_ZEROS.search(key):
            yield ZERO.finding(
                f"all {tensor.meta.n_elements} elements are zero", key=key, file=_file(tensor.parts[0][0].array)
            )
        elif not is_zero:
            yield CONSTANT.finding(
                f"all {tensor.meta.n_elements} elements have the bits {value:#x}",
                key=key,
                file=_file(tensor.parts[0][0].array),
            )
    if zero_states:
        yield ZERO_STATES.finding(f"{len(zero_states)} optimizer states of matrices are all zeros", keys=zero_states)


CHECKS = (Check(values, level=Level.DEEP),)


def _tensors(subject: Subject, facts: dict[str, ValueFacts]) -> Iterator[_Tensor]:
    """Every tensor with what was found of its arrays, under the name that says most.

    Global names are used for rank files whose layout is known, stored ones otherwise.
    """
    catalog = subject.salvaged.catalog
    assert catalog is not None
    left = dict(facts)
    canonical = subject.canonical
    is_joined = canonical is not None and canonical.has_layout and catalog.is_rank_local
    if canonical is not None and is_joined:
        yield from _tensors_of(canonical.catalog, facts, left)
    for tensor in _tensors_of(catalog, dict(left), left):
        tensor.is_padding = is_joined
        yield tensor


def _tensors_of(catalog: Catalog, facts: dict[str, ValueFacts], left: dict[str, ValueFacts]) -> Iterator[_Tensor]:
    """The tensors of a catalog whose arrays have facts; those arrays are taken out of ``left``."""
    for meta in (*catalog.tensors.values(), *catalog.hidden.values()):
        if meta.dtype not in KINDS:
            continue
        found = _Tensor(meta)
        boxes: set[Box] = set()
        for fragment in catalog.fragments(meta.key):
            if fragment.array is None or fragment.array.name not in facts:
                continue
            left.pop(fragment.array.name, None)
            if fragment.box not in boxes or not facts[fragment.array.name].is_usual:
                boxes.add(fragment.box)
                found.parts.append((fragment, facts[fragment.array.name]))
        if found.parts:
            yield found


def _counted(subject: Subject, tensor: _Tensor) -> Iterator[Finding]:
    """What is to say about single numbers."""
    key = tensor.meta.key
    for code, name, what in _COUNTS:
        total = 0
        first: tuple[Shape, Fragment, int] | None = None
        counted: set[str] = set()
        for fragment, facts in tensor.parts:
            count: ElementCount = getattr(facts, name)
            assert fragment.array is not None
            if count.first is None or fragment.array.name in counted:
                continue
            counted.add(fragment.array.name)
            total += count.n
            index = _index(fragment, count.first)
            if first is None or index < first[0]:
                first = index, fragment, count.first
        if first is not None:
            array = first[1].array
            named = _named_in(subject, array, first[2]) if tensor.is_padding else None
            where = f"{key}: " if named not in (None, key) else ""
            yield code.finding(
                f"{where}{total} of {tensor.meta.n_elements} elements are {what}, the first at index {first[0]}",
                key=named or key,
                file=_file(array),
                rank=_rank(array),
                expected="finite numbers" if code is not HUGE else "numbers of a usual size",
                found=f"{total} {what}",
                severity=_severity(code, tensor),
            )


def _named_in(subject: Subject, array: StoredArray | None, number: int) -> str | None:
    """Return the tensor that an element of an array belongs to, where the array is a flat buffer of many."""
    if array is None:
        return None
    extent = array.extent
    if extent.strides is not None or extent.encoding is not None or extent.is_late:
        return None
    at = extent.offset + number * itemsize(array.dtype)
    return next(iter(subject.tensor_names.at(extent.file, at, at + 1)), None)


def _severity(code: Code, tensor: _Tensor) -> Severity:
    if code is INFINITE and _CALLBACK.search(tensor.meta.key) and tensor.meta.shape == ():
        return Severity.NOTE
    if code is NAN or not _MASK.search(tensor.meta.key):
        is_weight = _is_matrix(tensor.meta.shape) and not _STATE.search(tensor.meta.key)
        return Severity.WARNING if code is HUGE and is_weight else code.severity
    return Severity.NOTE


def _index(fragment: Fragment, at: int) -> Shape:
    """Index in the tensor of an element of the fragment's array, as far as the fragment goes."""
    assert fragment.array is not None
    local: list[int] = []
    for extent in reversed(fragment.array.shape):
        at, inside = divmod(at, extent)
        local.insert(0, inside)
    inside_box = [i - start for i, start in zip(local, fragment.at, strict=True)]
    rank = fragment.box.rank
    aligned = ([0] * rank + inside_box)[-rank:] if rank else []
    return tuple(o + i for o, i in zip(fragment.box.offset, aligned, strict=True))


def _only_value(tensor: _Tensor) -> int | None:
    """The value that all elements have; None if they differ, or are not all known."""
    found = {facts.value if facts.is_read else None for _, facts in tensor.parts}
    return found.pop() if len(found) == 1 else None


def _is_matrix(shape: Sequence[int]) -> bool:
    return sum(n > 1 for n in shape) >= 2


def _file(array: StoredArray | None) -> str | None:
    return None if array is None else array.extent.file


def _rank(array: StoredArray | None) -> str | None:
    file = _file(array)
    return file.rpartition("/")[0] or None if file is not None and array is not None and array.coords else None
