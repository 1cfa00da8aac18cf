"""Compute the fingerprints of a destination while a copy writes it.

Before the copy, the reader of the format reads the planned destination
(``core.engine.catalog.planned_store``), whose canonical form assigns every byte that will be
written to a tensor. After the copy, the real destination is read. Tensors that the two place
differently, and tensors that no array of the destination contains unchanged (because they are
computed from others), are then read back. So the fingerprints are those of the real destination,
even if it does not match the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from core.arrays.dtypes import itemsize
from core.engine.calibration.choice import choose_device
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.planned_store import PlannedStore
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment
from core.engine.device.device import FINGERPRINT, Device
from core.engine.fingerprint.definition import Fingerprint
from core.engine.fingerprint.kernel import Products, fastest_products
from core.engine.plan.plan import Plan
from core.engine.plan.positions import Places
from core.errors import CheckpointingException
from core.files.store import ReadStore
from core.formats.registry import sniffed
from core.megatron.rules.rules import Rules
from core.opening.canonical import canonical, canonical_of
from core.opening.locate import TRACKER
from core.opening.open import open_checkpoint
from core.progress import OnProgress, Phase, begin_phase
from core.publish.manifest.fingerprint_feeds import Feeds
from core.publish.manifest.fingerprint_read import read_fingerprints


class CopyFingerprints:
    """The fingerprints of the tensors that a copy writes (a ``copy.options.WriteObserver``).

    Args:
        plan: the plan of the copy.
        entry: name of the destination, if it is a single file.
        rules: the layout rules.
        products: from ``core.engine.fingerprint.kernel.fastest_products``.
        device: may compute the fingerprints of tensors that are read back.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        entry: str | None,
        rules: Rules,
        products: Products,
        device: Device | None = None,
    ) -> None:
        self._rules = rules
        self._device = device
        self._planned: Catalog | None = None
        self._feeds: Feeds | None = None
        self._arrays: list[tuple[str, int] | None] = []
        # In a training root, the checkpoint is the directory of the iteration.
        paths = [image.path for image in plan.images]
        prefix = ""
        if TRACKER in paths:
            prefix = next((path.partition("/")[0] + "/" for path in paths if "/" in path), "")
        # Read the planned destination. That can fail: it may link to files that do not exist yet.
        # Then all tensors are read back.
        store = PlannedStore(plan.images, prefix=prefix, entry=entry)
        try:
            planned = sniffed(store).read(store)
            self._planned = _locate_arrays(canonical_of(planned, store, rules=rules).catalog, store)
        except CheckpointingException:
            return
        # Arrays have numbers in the copy; keep (name, bytes of an element) of those to feed.
        arrays = _planned_arrays(plan, prefix)
        self._feeds = Feeds(self._planned, arrays.values(), products)
        self._arrays = [
            (name, itemsize(arrays[name].dtype))
            if name in arrays and self._feeds.sees(name)
            else None
            for name in plan.places.names()
        ]

    def feed(self, number: int, offset: int, data: memoryview) -> None:
        """Add elements of an array, which begin ``offset`` bytes from its start."""
        array = self._arrays[number] if self._arrays else None
        if array is not None and self._feeds is not None:
            name, size = array
            self._feeds.feed(name, offset // size, data)

    def pass_over(self, number: int, offset: int, n_bytes: int) -> None:
        """Add a range of an array whose elements are all zero."""
        array = self._arrays[number] if self._arrays else None
        if array is not None and self._feeds is not None:
            name, size = array
            self._feeds.pass_over(name, offset // size, n_bytes // size)

    def finish(
        self,
        written: Path,
        *,
        threads: int,
        memory_bytes: int | None,
        progress: OnProgress | None = None,
    ) -> tuple[dict[str, Fingerprint], int]:
        """Return the fingerprints of the written destination.

        Args:
            written: current path of the destination; all its files are complete.
            threads, memory_bytes: resources for reading tensors back.
            progress: called with the number of bytes that have been read back.

        Returns:
            The fingerprints by canonical key, and the number of tensors that were read back.

        Raises:
            CheckpointingException: the destination cannot be read.
        """
        # Keep the fingerprints of tensors in their planned positions; read all others back.
        begin_phase(progress, Phase.FINGERPRINTING)
        computed = {} if self._feeds is None else self._feeds.fingerprints()
        opened = open_checkpoint(written)
        try:
            real = canonical(opened, rules=self._rules).catalog
            bound = _locate_arrays(real, opened.store)
            confirmed = {key: computed[key] for key in computed if self._is_as_planned(bound, key)}
            remaining = [key for key in real.tensors if key not in confirmed]
            fingerprints = confirmed
            if remaining:
                fingerprints = confirmed | read_fingerprints(
                    real,
                    opened.store,
                    remaining,
                    threads=threads,
                    memory_bytes=memory_bytes,
                    progress=progress,
                    device=self._device,
                )
        finally:
            opened.store.close()
        return {key: fingerprints[key] for key in real.tensors}, len(remaining)

    def _is_as_planned(self, real: Catalog, key: str) -> bool:
        """Return whether a tensor has the planned form, boxes and positions in the destination."""
        assert self._planned is not None
        if real.tensors.get(key) != self._planned.tensors[key]:
            return False
        fragments, planned = real.fragments(key), self._planned.fragments(key)
        return len(fragments) == len(planned) and all(
            (a.box, a.at, _position(a.array)) == (b.box, b.at, _position(b.array))
            for a, b in zip(fragments, planned, strict=True)
        )


@contextmanager
def observe_copy(
    plan: Plan, *, entry: str | None, rules: Rules, device: Device | None = None
) -> Iterator[CopyFingerprints]:
    """Yield an observer for the copy of a plan, which has to be executed in the block.

    Args:
        plan, entry, rules: as for ``CopyFingerprints``.
        device: may compute the fingerprints.
    """
    device = choose_device(device, [FINGERPRINT], threads=plan.threads)
    with fastest_products(plan.write_bytes, device) as products:
        yield CopyFingerprints(plan, entry=entry, rules=rules, products=products, device=device)


def _planned_arrays(plan: Plan, prefix: str) -> dict[str, StoredArray]:
    """Return name → array for the arrays that the plan fills, with their planned positions.

    Args:
        prefix: the checkpoint's directory in the destination, removed from the file names.
    """
    places: Places = plan.places
    arrays: dict[str, StoredArray] = {}
    for key in iter(plan.keys()):
        for fragment in plan.target.fragments(key):
            array = fragment.array
            number = None if array is None else places.number_of(array.name)
            if array is None or number is None or array.name in arrays:
                continue
            extent = Extent(places.file_of(number).removeprefix(prefix), places.offset_of(number))
            arrays[array.name] = array.at(extent)
    return arrays


def _locate_arrays(catalog: Catalog, store: ReadStore) -> Catalog:
    """Bind the late-bound arrays of a catalog to their positions, as far as these can be found."""
    bind: Callable[[StoredArray], StoredArray] = lru_cache(maxsize=1024)(
        lambda array: array.locate(store)
    )

    def placed(fragment: Fragment) -> Fragment:
        array = fragment.array
        if array is None or not array.extent.is_late:
            return fragment
        try:
            return replace(fragment, array=bind(array))
        except CheckpointingException:
            return fragment  # reading the tensor reports the problem

    return catalog.map_tensors(lambda _, tensor: tensor.with_fragments(placed))


def _position(array: StoredArray | None) -> object:
    """Return form and position of an array, without its CRC, which is not known in advance."""
    if array is None or array.extent is None:
        return None
    return array.dtype, array.shape, replace(array.extent, crc=None)
