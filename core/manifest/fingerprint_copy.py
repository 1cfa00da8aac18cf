"""Fingerprints of what a copy writes, made while it is written.

Which canonical tensor a byte of the destination will belong to is asked of the readers: they read the destination that
is planned (``core.catalog.planned_store``), and its canonical form says it. Once it is written it is read again,
really. What the two do not agree on, and what no array of the destination holds as it is (tensors that are computed
from others), is then read back: so the fingerprints are those that reading the destination gives, whatever the plan had
promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from core.arrays.dtypes import itemsize
from core.calibration.choice import choose_device
from core.catalog.catalog import Catalog, Fragment
from core.catalog.file_image import FileImage
from core.catalog.planned_store import PlannedStore
from core.catalog.stored import Extent, StoredArray
from core.device.device import FINGERPRINT, Device
from core.errors import CheckpointingException
from core.files.store import ReadStore
from core.fingerprint.definition import Fingerprint
from core.fingerprint.kernel import Products, fastest_products
from core.formats.registry import sniffed
from core.manifest.fingerprint_feeds import Feeds
from core.manifest.fingerprint_read import read_fingerprints
from core.megatron.reshard.reshard import Rules
from core.opening.canonical import canonical, canonical_of
from core.opening.open import TRACKER, open_checkpoint
from core.plan.plan import Plan
from core.plan.positions import Places


class CopyFingerprints:
    """Sees what a copy writes; see ``core.copy.options.WriteObserver``.

    Args:
        plan: of the copy.
        entry: name of the destination, if it is one file.
        rules: the layout's table.
        products: from ``core.fingerprint.kernel.fastest_products``.
        device: on which those that are read back may be made.
    """

    def __init__(
        self, plan: Plan, *, entry: str | None, rules: Rules, products: Products, device: Device | None = None
    ) -> None:
        self._rules = rules
        self._device = device
        self._planned: Catalog | None = None
        self._feeds: Feeds | None = None
        self._arrays: list[tuple[str, int] | None] = []
        prefix = _prefix_of(plan.images)
        store = PlannedStore(plan.images, prefix=prefix, entry=entry)
        try:
            found = sniffed(store).read(store)
            self._planned = _bound(canonical_of(found, store, rules=rules).catalog, store)
        except CheckpointingException:
            return  # it cannot be read before it is written, with links to other files for instance
        arrays = _arrays_of(plan, prefix)
        self._feeds = Feeds(self._planned, arrays.values(), products)
        self._arrays = [
            (name, itemsize(arrays[name].dtype)) if name in arrays and self._feeds.sees(name) else None
            for name in plan.places.names()
        ]

    def feed(self, number: int, offset: int, data: memoryview) -> None:
        """See ``core.copy.options.WriteObserver``."""
        known = self._arrays[number] if self._arrays else None
        if known is not None and self._feeds is not None:
            self._feeds.feed(known[0], offset // known[1], data)

    def pass_over(self, number: int, offset: int, n_bytes: int) -> None:
        """See ``core.copy.options.WriteObserver``."""
        known = self._arrays[number] if self._arrays else None
        if known is not None and self._feeds is not None:
            self._feeds.pass_over(known[0], offset // known[1], n_bytes // known[1])

    def finish(self, written: Path, *, threads: int, memory_bytes: int | None) -> tuple[dict[str, Fingerprint], int]:
        """The fingerprints of what has been written, and how many tensors were read back for them.

        Args:
            written: where the destination is now; all its files are complete.
            threads, memory_bytes: for reading back.

        Raises:
            CheckpointingException: it cannot be read.
        """
        made = {} if self._feeds is None else self._feeds.found()
        opened = open_checkpoint(written)
        try:
            real = canonical(opened, rules=self._rules).catalog
            bound = _bound(real, opened.store)
            kept = {key: found for key, found in made.items() if self._is_as_planned(bound, key)}
            rest = [key for key in real.tensors if key not in kept]
            read = (
                read_fingerprints(
                    real, opened.store, rest, threads=threads, memory_bytes=memory_bytes, device=self._device
                )
                if rest
                else {}
            )
        finally:
            opened.store.close()
        return {key: kept[key] if key in kept else read[key] for key in real.tensors}, len(rest)

    def _is_as_planned(self, real: Catalog, key: str) -> bool:
        assert self._planned is not None
        return real.tensors.get(key) == self._planned.tensors[key] and _lie_alike(
            real.fragments(key), self._planned.fragments(key)
        )


@contextmanager
def watched(plan: Plan, *, entry: str | None, rules: Rules, device: Device | None = None) -> Iterator[CopyFingerprints]:
    """Makes fingerprints of what is copied in the block.

    Args:
        plan, entry, rules: see ``CopyFingerprints``.
        device: on which they may be made.
    """
    device = choose_device(device, [FINGERPRINT], threads=plan.threads)
    with fastest_products(plan.write_bytes, device) as products:
        yield CopyFingerprints(plan, entry=entry, rules=rules, products=products, device=device)


def _prefix_of(images: Sequence[FileImage]) -> str:
    """The directory of the checkpoint in a destination that is a training root, with its slash; else nothing."""
    if not any(image.path == TRACKER for image in images):
        return ""
    return next((image.path.partition("/")[0] + "/" for image in images if "/" in image.path), "")


def _arrays_of(plan: Plan, prefix: str) -> dict[str, StoredArray]:
    """The arrays that the plan fills, at their places."""
    places: Places = plan.places
    found: dict[str, StoredArray] = {}
    for key in iter(plan.keys()):
        for fragment in plan.target.fragments(key):
            array = fragment.array
            number = None if array is None else places.number_of(array.name)
            if array is None or number is None or array.name in found:
                continue
            extent = Extent(places.file_of(number).removeprefix(prefix), places.offset_of(number))
            found[array.name] = replace(array, extent=extent)
    return found


def _bound(catalog: Catalog, store: ReadStore) -> Catalog:
    """The catalog with every array where it lies; what cannot be found stays as it is."""
    bind: Callable[[StoredArray], StoredArray] = lru_cache(maxsize=1024)(lambda array: catalog.bind(store, array))

    def placed(fragment: Fragment) -> Fragment:
        array = fragment.array
        if array is None or array.extent is None or not array.extent.is_late:
            return fragment
        try:
            return replace(fragment, array=bind(array))
        except CheckpointingException:
            return fragment

    return replace(catalog, fragments_of=lambda key: tuple(placed(fragment) for fragment in catalog.fragments_of(key)))


def _lie_alike(some: Sequence[Fragment], others: Sequence[Fragment]) -> bool:
    """Whether fragments are of the same boxes, and lie at the same places; CRCs do not matter."""
    return len(some) == len(others) and all(
        (one.box, one.at, _place(one.array)) == (other.box, other.at, _place(other.array))
        for one, other in zip(some, others, strict=True)
    )


def _place(array: StoredArray | None) -> object:
    if array is None or array.extent is None:
        return None
    return array.dtype, array.shape, replace(array.extent, crc=None)
