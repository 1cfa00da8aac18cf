"""Compute the fingerprints of a checkpoint of any format and layout by reading it.

The copy engine "writes" each canonical tensor to a dense file of its own; the store that gets these
bytes sums them up instead of writing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock

from core.arrays.dtypes import itemsize
from core.engine.calibration.choice import choose_device
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.tensor import Tensor
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.device.device import FINGERPRINT, Device
from core.engine.fingerprint.definition import (
    LANES,
    Fingerprint,
    Form,
    add_lanes,
    form_of,
    format_lanes,
)
from core.engine.fingerprint.kernel import Products, fastest_products
from core.engine.fingerprint.sums import FormSum
from core.engine.plan.plan import make_plan
from core.files.store import ReadStore, TargetStore
from core.opening.target import dense_target
from core.progress import OnProgress, Phase, count_steps


def read_fingerprints(
    catalog: Catalog,
    store: ReadStore,
    keys: Iterable[str] | None = None,
    *,
    threads: int,
    memory_bytes: int | None = None,
    progress: OnProgress | None = None,
    device: Device | None = None,
) -> dict[str, Fingerprint]:
    """Read tensors and return key → fingerprint; of several replicas only the first is read.

    Args:
        catalog: in canonical form.
        store: the checkpoint's files.
        keys: keys of the tensors; None for all.
        threads: number of reading threads.
        memory_bytes: memory limit of the process; None for no limit.
        progress: called with the number of bytes of tensors that have been read.
        device: may compute the fingerprints; None for the CPU path.

    Raises:
        CheckpointingException: a tensor cannot be read, or does not fit in memory.
    """
    # Plan a file for each tensor, with its number as the name.
    tensors = {key: catalog.tensors[key] for key in (catalog.tensors if keys is None else keys)}
    target = dense_target(tensors)
    arrays = [target.whole_array(key) for key in tensors]
    images = [
        FileImage(str(number), array.n_bytes, (PlacedArray(0, array),))
        for number, array in enumerate(arrays)
    ]
    plan = make_plan(
        catalog,
        target,
        images,
        threads=threads,
        memory_bytes=memory_bytes,
        compares=False,
    )
    # Run the copy into the sums.
    with fastest_products(
        plan.write_bytes, choose_device(device, [FINGERPRINT], threads=plan.threads)
    ) as products:
        sink = _SummingStore(tensors, products)
        execute(
            plan,
            store,
            sink,
            CopyOptions(
                crc=False,
                digest=False,
                progress=count_steps(progress, Phase.FINGERPRINTING, plan.write_bytes),
                device=device,
            ),
        )
    return sink.fingerprints()


class _SummingStore(TargetStore):
    """A destination of a copy that keeps only sums; file n is tensor n, dense."""

    def __init__(self, tensors: Mapping[str, Tensor], products: Products) -> None:
        self._tensors = tensors
        self._products = products
        self._forms: list[Form] = [
            form_of(tensor.shape, itemsize(tensor.dtype)) for tensor in tensors.values()
        ]
        self._lanes = [(0,) * LANES for _ in tensors]
        self._lock = Lock()

    def create(self, name: str, n_bytes: int) -> None:
        """Create nothing."""

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Add bytes of a tensor to its sum."""
        number = int(name)
        total = FormSum(self._forms[number], self._products)
        total.add_run(offset, memoryview(data))
        with self._lock:
            self._lanes[number] = add_lanes((self._lanes[number], total.lanes))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Raise, since only checksums read back, and this copy computes none."""
        raise NotImplementedError

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return key → fingerprint, after the copy is complete."""
        return {
            key: Fingerprint(tensor.dtype, tensor.shape, format_lanes(lanes))
            for (key, tensor), lanes in zip(self._tensors.items(), self._lanes, strict=True)
        }
