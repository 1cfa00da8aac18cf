"""CK720, CK721: compare replicas, which must be equal: boxes stored by several ranks, tied tensors.

If the bytes of a box differ between ranks, one of the ranks diverged or its file was damaged.
Arrays are compared by their digests, which the scan computes; the boxes themselves are read and
compared only if the digests differ, or if a replica is part of an array.

Source: docs/facts/reshard.md 3; the layout rules determine the ranks that hold a tensor
(``core.megatron.reshard.from_ranks``).

Two replicas of a box are read again in bands, to locate and count their differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.engine.calibration.choice import choose_device
from core.engine.catalog.decoded import DecodedStore
from core.engine.device.compare import count_differing
from core.engine.device.device import COMPARE, Device
from core.engine.quantize.source import SourceTensor
from core.engine.scan.separate_arrays import split_into_bands
from core.errors import CheckpointingException
from core.megatron.optimizer.form import role_of
from core.values import dataclass
from core.verbs.checks.finding import Finding, Level, Severity, get_code
from core.verbs.checks.subject import Check, Subject
from core.verbs.checks.watch import Watch

if TYPE_CHECKING:
    from core.arrays.box import Box, Shape
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.tensor import Fragment
    from core.files.store import ReadStore

DIFFERENT = get_code("CK720")
UNCOMPARED = get_code("CK721")


_OWN_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Buffers of BatchNorm, which each rank computes from its own batches unless SyncBatchNorm is used.
"""
_OWN_HINT = (
    "no action is needed, because under FSDP and DDP each rank keeps its own BatchNorm statistics;"
    " to convert with the first rank's statistics, add --on-replica-mismatch first"
)


_MOMENTS_HINT = (
    "the weights do not differ, so you can convert with --no-optim; to keep the optimizer, use an"
    " older checkpoint, or use the first replica with --on-replica-mismatch first"
)


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The fragments of one tensor with the same box, in different arrays."""

    key: str
    box: Box
    fragments: Sequence[Fragment]

    @property
    def are_comparable_by_array(self) -> bool:
        """The fragments have equal positions in arrays of one shape: compare the arrays."""
        positions = {
            (fragment.at, fragment.array.shape)
            for fragment in self.fragments
            if fragment.array is not None
        }
        return len(positions) == 1


def watch(subject: Subject) -> Watch:
    """Request the digests of arrays that have replicas."""
    names = (
        fragment.array.name
        for replicas in _all_replicas(subject)
        for fragment in replicas.fragments
        if fragment.array
    )
    return Watch(digests_of=frozenset(names))


def _all_replicas(subject: Subject) -> Iterator[_Replicas]:
    """Yield every group of replicas, if the layout is known."""
    canonical = subject.canonical
    if canonical is None or not canonical.is_global:
        return
    catalog = canonical.catalog
    for key in catalog.tensors:
        # Two fragments in the same array are the same bytes, so each array counts once.
        groups: dict[Box, dict[str, Fragment]] = {}
        for fragment in catalog.fragments(key):
            if fragment.array is not None and not fragment.box.is_empty:
                groups.setdefault(fragment.box, {})[fragment.array.name] = fragment
        for box, fragments in groups.items():
            if len(fragments) > 1:
                yield _Replicas(key, box, tuple(fragments.values()))


def check_replicas(subject: Subject) -> Iterator[Finding]:
    """Report every replica that differs from the majority of its group (CK720, CK721)."""
    canonical = subject.canonical
    if canonical is None:
        return
    sums = subject.byte_scan.scanned.arrays
    findings: list[Finding] = []
    for replicas in _all_replicas(subject):
        # Number of each fragment → digest of its array, where the scan could read it.
        digests: dict[int, str] = {}
        for number, fragment in enumerate(replicas.fragments):
            array_sum = None if fragment.array is None else sums.get(fragment.array.name)
            if array_sum is not None and array_sum.digest is not None:
                digests[number] = array_sum.digest
        # Unless all replicas can be compared by digest, all boxes are read.
        if len(digests) < len(replicas.fragments) or not replicas.are_comparable_by_array:
            digests = {}
        elif len(set(digests.values())) == 1:
            continue
        findings += _compare_replicas(subject, canonical.catalog, replicas, digests)
    # Without its moments, a checkpoint whose other tensors agree is a good one.
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if all(item.code == DIFFERENT.code and role_of(item.key or "") == "moments" for item in errors):
        findings = [
            replace(item, hint=_MOMENTS_HINT) if item.severity is Severity.ERROR else item
            for item in findings
        ]
    yield from findings


def _compare_replicas(
    subject: Subject, catalog: Catalog, replicas: _Replicas, digests: Mapping[int, str]
) -> Iterator[Finding]:
    """Compare the replicas with the first one of the majority.

    Args:
        digests: number of each fragment → digest of its array; {} if they cannot be used.
    """
    # The most frequent digest has the majority; without digests, take the first replica.
    first = 0
    if digests:
        usual, _ = Counter(digests.values()).most_common(1)[0]
        first = next(number for number, digest in digests.items() if digest == usual)
    primary = replicas.fragments[first]
    # Read and compare only replicas with another digest than the first one.
    for number, fragment in enumerate(replicas.fragments):
        if number == first or (digests and digests.get(number) == digests.get(first)):
            continue
        file, rank = _file(fragment), _rank(fragment)
        try:
            difference = first_difference(
                subject.store, catalog, replicas.key, primary, fragment, device=subject.device
            )
        except CheckpointingException as err:
            file = err.file or file
            if not subject.is_covered_by_finding(file):
                yield UNCOMPARED.finding(err.message, key=replicas.key, file=file, rank=rank)
            continue
        if difference is not None:
            n_different, index, (first_bytes, other_bytes) = difference
            is_own = replicas.key.rpartition(".")[2] in _OWN_STATISTICS
            yield DIFFERENT.finding(
                f"{n_different} of {replicas.box.n_elements} elements differ from the"
                f" replica in {_file(primary)}, the first at index {index}",
                file=file,
                key=replicas.key,
                rank=rank,
                expected=f"{first_bytes}, as in {_rank(primary) or _file(primary)}",
                found=other_bytes,
                severity=Severity.NOTE if is_own else None,
                hint=_OWN_HINT if is_own else None,
            )


def _file(fragment: Fragment) -> str | None:
    """Return the file of a fragment."""
    return None if fragment.array is None else fragment.array.extent.file


def _rank(fragment: Fragment) -> str | None:
    """Return the rank directory of a fragment; None if its file is at the top level."""
    file = _file(fragment)
    return None if file is None else file.rpartition("/")[0] or None


_BAND_BYTES = 4 << 20


def first_difference(
    store: ReadStore,
    catalog: Catalog,
    key: str,
    first: Fragment,
    other: Fragment,
    *,
    device: Device | None = None,
) -> tuple[int, Shape, tuple[str, str]] | None:
    """Compare two fragments with the same box; return None if they are equal bit for bit.

    Args:
        key: key of the tensor.
        first, other: two of its fragments.
        device: accelerator that may compare the bytes; None for the CPU.

    Returns:
        The number of elements with any different bit, the index of the first one in the tensor, and
        the bytes of that element in both, in hexadecimal digits.

    Raises:
        CheckpointingException: a fragment cannot be read.
    """
    import numpy as np

    tensor = catalog.tensor(key)
    size = itemsize(tensor.dtype)
    decoded = DecodedStore(store)
    compare_device = choose_device(device, [COMPARE], threads=1)
    sources = [
        SourceTensor(key, tensor.dtype, tensor.shape, (fragment,)) for fragment in (first, other)
    ]
    # Read row bands of both, so that memory stays small whatever the size of the box.
    n_different = 0
    index: Shape | None = None
    elements = ("", "")
    for start, shape in split_into_bands(first.box.shape, max(1, _BAND_BYTES // size)):
        band = Box(tuple(a + b for a, b in zip(first.box.offset, start, strict=True)), shape)
        contents = [source.read(decoded, band) for source in sources]
        if contents[0] == contents[1]:
            continue
        count = count_differing(
            compare_device, memoryview(contents[0]), memoryview(contents[1]), size
        )
        n_different += count.n
        # Keep the index of the first difference, and the element in both replicas.
        if index is None:
            first_in_band = count.first
            assert first_in_band is not None
            in_band = np.unravel_index(first_in_band, shape) if shape else ()
            index = tuple(a + int(b) for a, b in zip(band.offset, in_band, strict=True))
            span = slice(first_in_band * size, (first_in_band + 1) * size)
            elements = (bytes(contents[0][span]).hex(), bytes(contents[1][span]).hex())
    return None if index is None else (n_different, index, elements)


CHECKS = (Check(check_replicas, Level.DEEP),)
