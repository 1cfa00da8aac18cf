"""The fingerprints of a checkpoint by reading it, through the engine that copies: any format, any layout.

The canonical tensors are moved to dense files that do not exist; what would be written to them is summed up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import Lock

from core.arrays.dtypes import itemsize
from core.calibration.choice import choose_device
from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.file_image import FileImage, PlacedArray
from core.copy.options import CopyOptions
from core.copy.run import execute
from core.device.device import FINGERPRINT, Device
from core.files.store import ReadStore
from core.fingerprint.definition import LANES, Fingerprint, Form, add_lanes, form_of, format_lanes
from core.fingerprint.kernel import Products, fastest_products
from core.fingerprint.sums import FormSum
from core.opening.target import dense_target
from core.plan.plan import make_plan


def read_fingerprints(
    catalog: Catalog,
    store: ReadStore,
    keys: Iterable[str] | None = None,
    *,
    threads: int,
    memory_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
    device: Device | None = None,
) -> dict[str, Fingerprint]:
    """Return the fingerprints of tensors, by key.

    Where ranks hold copies of one tensor, the first is taken.

    Args:
        catalog: in canonical form.
        store: its files.
        keys: which tensors; None for all.
        threads: that read.
        memory_bytes: most bytes the process may use; None for no limit.
        progress: told about bytes of tensors.
        device: on which they may be made; None for the CPU path.

    Raises:
        CheckpointingException: a tensor cannot be read, or does not fit in memory.
    """
    wanted = list(catalog.tensors) if keys is None else list(keys)
    metas = [catalog.tensors[key] for key in wanted]
    target = dense_target(metas)
    images = [_image(number, target, meta) for number, meta in enumerate(metas)]
    plan = make_plan(catalog, target, images, zeros={}, threads=threads, memory_bytes=memory_bytes, compares=False)
    with fastest_products(plan.write_bytes, choose_device(device, [FINGERPRINT], threads=plan.threads)) as products:
        sink = _Sink(metas, products)
        execute(plan, store, sink, CopyOptions(crc=False, digest=False, progress=progress, device=device))
    return sink.found()


def _image(number: int, target: Catalog, meta: TensorMeta) -> FileImage:
    array = replace(target.whole_array(meta.key), extent=None)
    return FileImage(str(number), array.n_bytes, (PlacedArray(0, array),))


class _Sink:
    """A stage that keeps sums only; file n is tensor n, as dense elements."""

    def __init__(self, metas: Sequence[TensorMeta], products: Products) -> None:
        self._metas = metas
        self._products = products
        self._forms: list[Form] = [form_of(meta.shape, itemsize(meta.dtype)) for meta in metas]
        self._lanes = [(0,) * LANES for _ in metas]
        self._lock = Lock()

    def create(self, name: str, n_bytes: int) -> None:
        """Nothing is made."""

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Adds bytes of a tensor."""
        number = int(name)
        made = FormSum(self._forms[number], self._products)
        made.add_run(offset, memoryview(data))
        with self._lock:
            self._lanes[number] = add_lanes((self._lanes[number], made.lanes))

    def sync(self, name: str) -> None:
        """Nothing was written."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Never asked: there are no checksums whose blocks two pieces of work could share."""
        raise NotImplementedError

    def settle(self, name: str, offset: int, n_bytes: int) -> None:
        """Nothing was written."""

    def found(self) -> dict[str, Fingerprint]:
        """The fingerprints, once everything has been moved."""
        return {
            meta.key: Fingerprint(meta.dtype, meta.shape, format_lanes(lanes))
            for meta, lanes in zip(self._metas, self._lanes, strict=True)
        }
