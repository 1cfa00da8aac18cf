"""The engine from catalog to bytes, in memory: every way of cutting a tensor into every other."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.arrays.box import Box, full_box
from core.arrays.checksum import digest_of
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import CopyResult, execute
from core.engine.plan.plan import make_plan
from core.errors import CapacityError, CorruptError, ReplicaMismatchError, TruncatedError
from core.files.store import MemoryStore
from tests.support.boxes import DTYPE, Cut, Model, expected, one, pieces, values, written
from tests.support.fragments import replace_fragments, with_fragments
from tests.support.late_items import ItemAt
from tests.support.rounds import rounds

SHAPE = (24, 36)


def moved(
    source: Catalog,
    store: MemoryStore,
    target: TargetCatalog,
    images: list[FileImage],
    *,
    threads: int = 2,
    buffer_bytes: int = 6000,
    item_bytes: int = 4000,
    **options: object,
) -> tuple[dict[str, np.ndarray], CopyResult]:
    """Plans and copies in small pieces; returns the written arrays and checks every checksum."""
    plan = make_plan(source, target, images, threads=threads)
    stage = MemoryStore()
    copying = CopyOptions(buffer_bytes=buffer_bytes, item_bytes=item_bytes, **options)  # type: ignore[arg-type]
    result = execute(plan, store, stage, copying)
    arrays = written(stage, images)
    for name, array in arrays.items():
        assert result.crc_of(name) == (
            zlib.crc32(array.tobytes()) if options.get("crc", True) else 0
        )
        assert result.digest_of(name) == (
            digest_of(array.tobytes()).hex() if options.get("digest", True) else None
        )
    if not {"journal", "before_item", "watch", "progress"} & options.keys():
        blind = _WriteOnlyStage()
        again = execute(plan, store, blind, copying)
        for name, array in written(blind, images).items():
            assert arrays[name].tobytes() == array.tobytes(), name
        assert (again.crcs, again.digests) == (result.crcs, result.digests)
        assert not blind.held
    return arrays, result


class _WriteOnlyStage(MemoryStore):
    """A stage like that of an object store: nothing can be read back, except what is held."""

    is_readable = False

    def __init__(self) -> None:
        super().__init__()
        self.held: set[tuple[str, int, int]] = set()

    def create(self, name: str, n_bytes: int) -> None:
        super().create(name, n_bytes)
        self.write(name, 0, b"\xaa" * n_bytes)  # zeros have to be declared

    def zero(self, name: str, offset: int, n_bytes: int) -> None:
        self.write(name, offset, bytes(n_bytes))

    def hold(self, name: str, offset: int, n_bytes: int) -> None:
        self.held.add((name, offset, n_bytes))

    def release(self, name: str, offset: int, n_bytes: int) -> None:
        self.held.discard((name, offset, n_bytes))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        assert any(
            file == name and start <= offset and end <= start + n for file, start, n in self.held
        )
        super().read_into(name, offset, buffer)


def check(
    shape: tuple[int, ...], source_cut: Cut, target_cut: Cut, *, order: str = "C", **options: object
) -> CopyResult:
    source_model = Model({"w": shape}, {"w": source_cut})
    target_model = Model({"w": shape}, {"w": target_cut})
    source = source_model.source(order=order)
    target, images = target_model.target()
    arrays, result = moved(source, source_model.store, target, images, **options)  # type: ignore[arg-type]
    for name, array in expected(target_model).items():
        assert np.array_equal(arrays[name], array), name
    return result


CUTS = [
    ("whole", one("w", SHAPE)),
    ("rows4", pieces("w", SHAPE, 0, 4)),
    ("rows6", pieces("w", SHAPE, 0, 6)),
    ("columns4", pieces("w", SHAPE, 1, 4)),
    ("columns6", pieces("w", SHAPE, 1, 6)),
    ("gated rows", pieces("w", SHAPE, 0, 4, segments=2)),
    ("gated columns", pieces("w", SHAPE, 1, 3, segments=3)),
    ("replicated columns", pieces("w", SHAPE, 1, 2, copies=3)),
]


@pytest.mark.each_value
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("source", "target"), list(product(CUTS, CUTS)), ids=lambda cut: cut[0])
def test_any_cut_becomes_any_other(
    source: tuple[str, Cut], target: tuple[str, Cut], order: str
) -> None:
    check(SHAPE, source[1], target[1], order=order)


@settings(max_examples=rounds(150), deadline=None)
@given(data=st.data())
def test_random_shapes_cuts_buffers_and_item_sizes(data: st.DataObject) -> None:
    extents = st.lists(st.sampled_from([1, 6, 12, 24, 60]), min_size=1, max_size=4)
    shape = data.draw(extents.map(tuple).filter(lambda extent_list: prod(extent_list) <= 5000))

    def cut() -> Cut:
        axis = data.draw(st.integers(0, len(shape) - 1))
        n = data.draw(st.sampled_from([1, 2, 3, 6])) if shape[axis] > 1 else 1
        segments = data.draw(st.sampled_from([1, 2])) if shape[axis] % (2 * n) == 0 else 1
        return pieces("w", shape, axis, n, segments=segments, copies=data.draw(st.integers(1, 2)))

    check(
        shape,
        cut(),
        cut(),
        order=data.draw(st.sampled_from("CF")),
        threads=data.draw(st.integers(1, 3)),
        buffer_bytes=data.draw(st.sampled_from([300, 5000, 1 << 20])),
        item_bytes=data.draw(st.sampled_from([100, 3000, 1 << 25])),
    )


def test_digests_do_not_depend_on_how_blocks_are_shared_between_items() -> None:
    shape = (3, 1100, 300)  # 3.8 MB: four blocks, whose borders lie inside rows
    for item_bytes in (70_000, 1_500_000, 1 << 25):
        for cut in (pieces("w", shape, 0, 3), pieces("w", shape, 1, 4), pieces("w", shape, 2, 3)):
            check(shape, cut, one("w", shape), buffer_bytes=3 << 20, item_bytes=item_bytes)


@pytest.mark.parametrize(("crc", "digest"), [(False, True), (True, False), (False, False)])
def test_checksums_can_be_switched_off(crc: bool, digest: bool) -> None:
    check(SHAPE, pieces("w", SHAPE, 1, 4), one("w", SHAPE), crc=crc, digest=digest)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    check(shape, one("w", shape), one("w", shape))


def test_layers_of_a_stacked_array_become_tensors_and_the_other_way_round() -> None:
    layers, shape = 5, (6, 8)
    keys = [f"layers.{n}.w" for n in range(layers)]
    tensors = dict.fromkeys(keys, shape)
    stacked = {
        key: Cut([("stack", (layers, *shape), [(full_box(shape), (n, 0, 0))])])
        for n, key in enumerate(keys)
    }
    single = {key: one(key, shape) for key in keys}
    for source_cuts, target_cuts in ((stacked, single), (single, stacked), (stacked, stacked)):
        source_model, target_model = (
            Model(tensors, dict(source_cuts)),
            Model(tensors, dict(target_cuts)),
        )
        source = source_model.source()
        target, images = target_model.target()
        if target_cuts is stacked:
            images = images[:1]
        arrays, _ = moved(source, source_model.store, target, images)
        for name, array in expected(target_model).items():
            assert np.array_equal(arrays[name], array)


def test_columns_of_several_tensors_share_an_array() -> None:
    tensors = {"a": (10, 3), "b": (10, 5)}
    cuts = {
        "a": Cut([("both", (10, 8), [(full_box((10, 3)), (0, 0))])]),
        "b": Cut([("both", (10, 8), [(full_box((10, 5)), (0, 3))])]),
    }
    single = {key: one(key, shape) for key, shape in tensors.items()}
    for source_cuts, target_cuts in ((cuts, single), (single, cuts)):
        source_model, target_model = Model(tensors, source_cuts), Model(tensors, target_cuts)
        source = source_model.source()
        target, images = target_model.target()
        arrays, _ = moved(
            source, source_model.store, target, images[:1] if target_cuts is cuts else images
        )
        for name, array in expected(target_model).items():
            assert np.array_equal(arrays[name], array)


def test_an_array_with_fewer_axes_holds_a_fragment_with_leading_ones() -> None:
    tensors = {"w": (4, 6)}
    rows = Cut([(f"row{n}", (6,), [(Box((n, 0), (1, 6)), (0,))]) for n in range(4)])
    for source_cut, target_cut in ((rows, one("w", (4, 6))), (one("w", (4, 6)), rows)):
        source_model, target_model = (
            Model(tensors, {"w": source_cut}),
            Model(tensors, {"w": target_cut}),
        )
        source = source_model.source()
        target, images = target_model.target()
        arrays, _ = moved(source, source_model.store, target, images)
        for name, array in expected(target_model).items():
            assert np.array_equal(arrays[name], array)


def test_many_tiny_chunks_are_woven_into_rows() -> None:
    shape = (40, 40)
    grid = Cut(
        [
            (f"{i},{j}", (2, 4), [(Box((i, j), (2, 4)), (0, 0))])
            for i in range(0, 40, 2)
            for j in range(0, 40, 4)
        ]
    )
    check(shape, grid, one("w", shape), buffer_bytes=3000, item_bytes=1000)
    check(shape, one("w", shape), grid, buffer_bytes=3000, item_bytes=1000)
    check(shape, grid, grid)


def test_sources_that_overlap_in_part_are_compared_and_used() -> None:
    shape = (10, 4)
    overlapping = Cut(
        [
            ("top", (7, 4), [(Box((0, 0), (7, 4)), (0, 0))]),
            ("bottom", (6, 4), [(Box((4, 0), (6, 4)), (0, 0))]),
        ]
    )
    check(shape, overlapping, pieces("w", shape, 0, 2))


def test_targets_that_overlap_in_part_are_all_written() -> None:
    shape = (12, 8)
    both = Cut(
        [
            *one("w", shape).parts,
            *pieces("w", shape, 1, 2).parts,
            *pieces("w", shape, 1, 4, copies=2).parts[2:],
        ]
    )
    check(shape, pieces("w", shape, 0, 3), both)
    check(shape, pieces("w", shape, 1, 8), both)


def test_an_expanded_source_with_stride_zero_is_repeated() -> None:
    store = MemoryStore({"f": values("w", (5,)).tobytes()})
    array = StoredArray("w", DTYPE, (3, 5), Extent("f", 0, (0, 1)))
    source = Catalog(
        "fake",
        None,
        with_fragments(
            {"w": Tensor(DTYPE, (3, 5))}, lambda key: [Fragment(full_box((3, 5)), array, (0, 0))]
        ),
    )
    target, images = Model({"w": (3, 5)}, {"w": one("w", (3, 5))}).target()
    arrays, _ = moved(source, store, target, images)
    assert np.array_equal(
        arrays["w/all"].view(np.int32), np.broadcast_to(values("w", (5,)), (3, 5))
    )


@pytest.mark.parametrize("cut", [pieces("w", (16, 8), 0, 4), pieces("w", (16, 8), 1, 2)])
def test_zeros_by_rule_pad_the_target(cut: Cut) -> None:
    source_model = Model({"w": (13, 8)}, {"w": one("w", (13, 8))})
    target_model = Model({"w": (16, 8)}, {"w": cut})
    source = source_model.source()
    target, images = target_model.target()
    target = replace(target, tensors={"w": replace(target.tensors["w"], flexible=True)})
    arrays, _ = moved(source, source_model.store, target, images)
    padded = np.zeros((16, 8), np.int32)
    padded[:13] = values("w", (13, 8))
    for name, array in expected(target_model, {"w": padded}).items():
        assert np.array_equal(arrays[name], array)


def test_late_bound_arrays_are_bound_when_they_are_copied() -> None:
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 1, 4)})
    source = model.source(order="F")
    located: list[str] = []

    def late(key: str) -> list[Fragment]:
        return [
            replace(
                f,
                array=replace(
                    f.array,
                    extent=Extent(
                        f.array.extent.file, 0, item=ItemAt(f.array.extent, note=located.append)
                    ),
                ),
            )
            for f in source.fragments(key)
            if f.array is not None
        ]

    target_model = Model({"w": SHAPE}, {"w": one("w", SHAPE)})
    target, images = target_model.target()
    arrays, _ = moved(replace_fragments(source, late), model.store, target, images)
    assert np.array_equal(arrays["w/all"], expected(target_model)["w/all"])
    assert set(located) == {f.array.name for f in source.fragments("w") if f.array is not None}


@pytest.mark.parametrize("target_cut", [one("w", SHAPE), pieces("w", SHAPE, 1, 3)])
@pytest.mark.parametrize("source_cut", [pieces("w", SHAPE, 0, 2), pieces("w", SHAPE, 1, 2)])
def test_casts_happen_on_the_way(source_cut: Cut, target_cut: Cut) -> None:
    import torch

    data = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    source_model = Model({"w": SHAPE}, {"w": source_cut})
    source = source_model.source(data={"w": data.numpy()}, dtype="float32")
    target_model = Model({"w": SHAPE}, {"w": target_cut})
    target, images = target_model.target(dtype="bfloat16")
    arrays, _ = moved(source, source_model.store, target, images)
    wanted = data.to(torch.bfloat16).view(torch.uint16).numpy()
    for name, array in expected(target_model, {"w": wanted}).items():
        assert np.array_equal(arrays[name], array)


def with_crcs(source: Catalog, store: MemoryStore, *, damage: int = 0) -> Catalog:
    """The catalog with the CRC-32 of every array stated."""

    def fragments_of(key: str) -> Iterable[Fragment]:
        for fragment in source.fragments(key):
            array = fragment.array
            assert array is not None
            data = store.read(array.extent.file, array.extent.offset, array.n_bytes)
            extent = replace(array.extent, crc=zlib.crc32(data) ^ damage)
            yield replace(fragment, array=replace(array, extent=extent))

    return replace_fragments(source, lambda key: list(fragments_of(key)))


@pytest.mark.parametrize(
    "target_cut", [one("w", SHAPE), pieces("w", SHAPE, 0, 3), pieces("w", SHAPE, 1, 3)]
)
@pytest.mark.parametrize(
    "source_cut",
    [pieces("w", SHAPE, 0, 2), pieces("w", SHAPE, 1, 2), pieces("w", SHAPE, 1, 2, segments=3)],
)
def test_stated_crcs_of_the_source_are_checked(source_cut: Cut, target_cut: Cut) -> None:
    model = Model({"w": SHAPE}, {"w": source_cut})
    source = model.source()
    target, images = Model({"w": SHAPE}, {"w": target_cut}).target()
    moved(with_crcs(source, model.store), model.store, target, images)
    with pytest.raises(CorruptError, match="the file records") as caught:
        moved(with_crcs(source, model.store, damage=1), model.store, target, images)
    assert caught.value.file is not None and caught.value.file.startswith("source")


@pytest.mark.parametrize("axis", [0, 1])
def test_replicas_that_differ_name_both_files_and_the_element(axis: int) -> None:
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, axis, 3, copies=2)})
    source = model.source(files=2)
    last = source.fragments("w")[-1].array
    assert last is not None
    model.store.contents[last.extent.file][last.extent.offset + last.n_bytes - 1] ^= 0x40
    target, images = Model({"w": SHAPE}, {"w": one("w", SHAPE)}).target()
    with pytest.raises(ReplicaMismatchError, match=r"\(23, 35\)") as caught:
        moved(source, model.store, target, images)
    assert caught.value.key == "w"
    assert "source0" in str(caught.value) and "source1" in str(caught.value)


def test_a_source_that_is_too_short_stops_everything() -> None:
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 1, 2)})
    source = model.source()
    del model.store.contents["source1"][-5:]
    target, images = Model({"w": SHAPE}, {"w": one("w", SHAPE)}).target()
    with pytest.raises(TruncatedError):
        moved(source, model.store, target, images)


class FullStore(MemoryStore):
    """A stage whose disk fills up."""

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        raise CapacityError("cannot write: no space left on device", file=name)


def test_the_first_error_of_a_thread_is_raised() -> None:
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 1, 2)})
    source = model.source()
    target, images = Model({"w": SHAPE}, {"w": one("w", SHAPE)}).target()
    plan = make_plan(source, target, images, threads=3)
    with pytest.raises(CapacityError, match="no space left"):
        execute(plan, model.store, FullStore(), CopyOptions(item_bytes=100, buffer_bytes=300))


def test_an_interrupt_in_the_progress_callback_stops_the_copy() -> None:
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 0, 2)})
    source = model.source()
    target, images = Model({"w": SHAPE}, {"w": one("w", SHAPE)}).target()

    def progress(n_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(
            make_plan(source, target, images),
            model.store,
            MemoryStore(),
            CopyOptions(progress=progress),
        )


def test_progress_adds_up_to_the_bytes_of_the_target() -> None:
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 1, 2)})
    source = model.source()
    target, images = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 0, 2, copies=2)}).target()
    plan = make_plan(source, target, images, threads=1)
    written_bytes: list[int] = []
    result = execute(plan, model.store, MemoryStore(), CopyOptions(progress=written_bytes.append))
    assert sum(written_bytes) == plan.write_bytes == result.written_bytes == 2 * 24 * 36 * 4
    assert result.read_bytes == 2 * plan.read_bytes  # each copy of the target is interleaved again
