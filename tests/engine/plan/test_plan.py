"""What a plan proves before anything moves."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from core.arrays.box import Box, full_box
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import ArrayT, Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor, whole_fragment
from core.engine.plan.plan import make_plan
from core.errors import (
    CapacityError,
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsafeError,
    UnsupportedError,
)
from tests.support.boxes import Cut, Model, one, pieces
from tests.support.fragments import replace_fragments, with_fragments
from tests.support.ties import tied

SHAPE = (12, 8)
MIB = 1 << 20


def catalogs(source_cut: Cut, target_cut: Cut) -> tuple[Catalog, TargetCatalog, list[FileImage]]:
    source = Model({"w": SHAPE}, {"w": source_cut}).source()
    target, images = Model({"w": SHAPE}, {"w": target_cut}).target()
    return source, target, images


def without(catalog: Catalog[ArrayT], *numbers: int) -> Catalog[ArrayT]:
    """The catalog with some fragments of every tensor missing."""
    return replace_fragments(
        catalog, lambda key: [f for n, f in enumerate(catalog.fragments(key)) if n not in numbers]
    )


def with_fragment(
    catalog: Catalog[ArrayT], change: Callable[[Fragment[ArrayT]], Fragment[ArrayT]]
) -> Catalog[ArrayT]:
    """The catalog with the last fragment of every tensor changed."""
    return replace_fragments(
        catalog, lambda key: [*catalog.fragments(key)[:-1], change(catalog.fragments(key)[-1])]
    )


def refused(
    error: type[CheckpointingException],
    text: str,
    source: Catalog,
    target: TargetCatalog,
    images: list[FileImage],
) -> CheckpointingException:
    with pytest.raises(error, match=text) as caught:
        make_plan(source, target, images)
    return caught.value


def test_totals_count_bytes_fragments_and_transfers() -> None:
    source, target, images = catalogs(pieces("w", SHAPE, 1, 4), pieces("w", SHAPE, 1, 2))
    plan = make_plan(source, target, images, threads=3)
    assert (plan.read_bytes, plan.write_bytes) == (12 * 8 * 4, 12 * 8 * 4)
    assert plan.file_bytes == sum(image.size for image in images)
    assert (plan.n_fragments, plan.n_copies) == (4, 0)
    assert len(plan.match("w").pairs) == 4
    assert list(plan.keys()) == ["w"]
    assert plan.memory_bytes > 3 * plan.buffer_bytes


def test_transfers_between_a_and_b_shards_are_a_plus_b_minus_their_gcd() -> None:
    source = Model({"w": (24, 4)}, {"w": pieces("w", (24, 4), 0, 8)}).source()
    target, images = Model({"w": (24, 4)}, {"w": pieces("w", (24, 4), 0, 6)}).target()
    assert len(make_plan(source, target, images).match("w").pairs) == 8 + 6 - 2


def test_replicas_are_planned_as_copies_to_compare() -> None:
    plan = make_plan(*catalogs(pieces("w", SHAPE, 0, 2, copies=3), one("w", SHAPE)))
    assert plan.n_copies == 4
    assert plan.read_bytes == 3 * 12 * 8 * 4


def test_a_missing_shard_names_the_tensor_and_the_region() -> None:
    source, target, images = catalogs(pieces("w", SHAPE, 0, 4), pieces("w", SHAPE, 1, 2))
    err = refused(
        MissingShardError,
        r"\[6:9, 0:4\] of the tensor \(shape \(12, 8\)\)",
        without(source, 2),
        target,
        images,
    )
    assert err.key == "w"


def test_a_missing_tensor_is_named() -> None:
    source, target, images = catalogs(one("w", SHAPE), one("w", SHAPE))
    err = refused(MissingShardError, "no such tensor", replace(source, tensors={}), target, images)
    assert err.key == "w"


def test_a_source_box_out_of_bounds_is_refused() -> None:
    source, target, images = catalogs(pieces("w", SHAPE, 0, 2), one("w", SHAPE))
    moved = with_fragment(source, lambda f: replace(f, box=f.box.shift((1, 0))))
    refused(CorruptError, "is out of bounds for shape", moved, target, images)
    array_moved = with_fragment(source, lambda f: replace(f, at=(1, 0)))
    refused(CorruptError, "does not fit at", array_moved, target, images)


def test_shapes_must_agree_unless_the_target_is_flexible() -> None:
    source, target, images = catalogs(one("w", SHAPE), one("w", SHAPE))
    taller = replace(source, tensors={"w": replace(source.tensors["w"], shape=(13, 8))})
    refused(CorruptError, "source has shape", taller, target, images)
    flexible = replace(target, tensors={"w": replace(target.tensors["w"], flexible=True)})
    make_plan(taller, flexible, images)


def test_a_region_that_would_be_written_nowhere_is_refused() -> None:
    source, target, images = catalogs(one("w", SHAPE), pieces("w", SHAPE, 0, 2))
    images = [FileImage("out", 1000, images[0].arrays[:1])]
    err = refused(
        CorruptError, r"\[6:12, 0:8\] would not be written", source, without(target, 1), images
    )
    assert err.key == "w"


def test_a_hole_in_a_target_array_is_refused() -> None:
    cut = Cut([("big", (12, 9), [(full_box(SHAPE), (0, 0))])])
    refused(
        CorruptError,
        r"\[0:12, 8:9\] of array 'big' would not be written",
        *catalogs(one("w", SHAPE), cut),
    )


def test_an_array_that_nothing_fills_is_refused() -> None:
    source, target, images = catalogs(one("w", SHAPE), one("w", SHAPE))
    images.append(FileImage("more", 64, [PlacedArray(0, PlannedArray("lonely", "int32", (4,)))]))
    refused(CorruptError, "would not be written", source, target, images)


@pytest.mark.parametrize("at", [(0, 0), (3, 0)])
def test_double_writes_are_refused(at: tuple[int, int]) -> None:
    half = Box((0, 0), (6, 8))
    cut = Cut(
        [
            ("a", (12, 8), [(half, (0, 0)), (Box((6, 0), (6, 8)), at)]),
            ("b", (12, 8), [(full_box(SHAPE), (0, 0))]),
        ]
    )
    err = refused(CorruptError, "twice|would not be written", *catalogs(one("w", SHAPE), cut))
    assert err.key == "w"


def test_two_tensors_cannot_fill_one_array() -> None:
    tensors = {"a": SHAPE, "b": SHAPE}
    source = Model(tensors, {key: one(key, SHAPE) for key in tensors}).source()
    cut = Cut([("same", SHAPE, [(full_box(SHAPE), (0, 0))])])
    target, images = Model(tensors, {"a": cut, "b": cut}).target()
    err = refused(CorruptError, "already complete", source, target, images[:1])
    assert err.key == "b"


def test_arrays_must_be_placed_once_and_inside_their_file() -> None:
    source, target, images = catalogs(one("w", SHAPE), one("w", SHAPE))
    array = images[0].arrays[0].array
    refused(
        CorruptError, "is not placed in any output file", source, target, [FileImage("out", 10)]
    )
    refused(
        CorruptError, "are free", source, target, [FileImage("out", 383, [PlacedArray(0, array)])]
    )
    twice = [
        FileImage("a", 384, [PlacedArray(0, array)]),
        FileImage("b", 384, [PlacedArray(0, array)]),
    ]
    refused(CorruptError, "has two positions", source, target, twice)
    near = [PlacedArray(0, array), PlacedArray(383, PlannedArray("x", "int32", (1,)))]
    refused(CorruptError, "are free", source, target, [FileImage("out", 999, near)])
    refused(
        UnsafeError,
        "path inside",
        source,
        target,
        [FileImage("../out", 384, [PlacedArray(0, array)])],
    )
    refused(CorruptError, "the same path", source, target, [FileImage("a", 0), FileImage("a", 0)])


def test_an_alias_without_bytes_of_its_own_is_passed_over() -> None:
    tensors = {"w": SHAPE, "tied": SHAPE}
    source = Model(tensors, {key: one(key, SHAPE) for key in tensors}).source()
    target, images = Model(tensors, {key: one(key, SHAPE) for key in tensors}).target()
    images = [replace(images[0], arrays=images[0].arrays[:1])]
    refused(CorruptError, "is not placed in any output file", source, target, images)
    plan = make_plan(source, tied(target, {"tied": "w"}), images)
    assert list(plan.keys()) == ["w"]


def test_dtypes_of_one_tensor_must_agree() -> None:
    source, target, images = catalogs(pieces("w", SHAPE, 0, 2), one("w", SHAPE))
    other = with_fragment(source, lambda f: replace(f, array=replace(f.array, dtype="float32")))  # type: ignore[type-var]
    refused(CorruptError, "partly as int32 and partly as float32", other, target, images)
    wrong = with_fragment(target, lambda f: replace(f, array=replace(f.array, dtype="float32")))  # type: ignore[type-var]
    refused(CorruptError, "is float32, not int32", source, wrong, images)


def test_casts_that_lose_values_are_unsupported() -> None:
    source, target, images = catalogs(one("w", SHAPE), one("w", SHAPE))
    floats = with_fragment(source, lambda f: replace(f, array=replace(f.array, dtype="float32")))  # type: ignore[type-var]
    refused(UnsupportedError, "casting float32 to int32 is not supported", floats, target, images)


def test_the_memory_need_is_stated_and_kept() -> None:
    parts = catalogs(one("w", SHAPE), one("w", SHAPE))
    roomy = make_plan(*parts, threads=2, memory_bytes=512 * MIB)
    tight = make_plan(*parts, threads=2, memory_bytes=60 * MIB)
    assert tight.memory_bytes <= 60 * MIB < roomy.memory_bytes
    assert tight.buffer_bytes < roomy.buffer_bytes
    with pytest.raises(CapacityError, match="2 threads and 1 array need") as error:
        make_plan(*parts, threads=2, memory_bytes=40 * MIB)
    assert "fewer threads" not in str(error.value)


def test_fewer_threads_are_proposed_only_where_they_suffice() -> None:
    parts = catalogs(one("w", SHAPE), one("w", SHAPE))
    with pytest.raises(CapacityError, match="fewer threads"):
        make_plan(*parts, threads=64, memory_bytes=64 * MIB)
    assert make_plan(*parts, threads=1, memory_bytes=64 * MIB).memory_bytes <= 64 * MIB


def test_the_memory_of_many_small_pieces_is_counted() -> None:
    n_pieces = 5_000
    array = StoredArray("w", "int32", (1,), Extent("f", 0))
    pieces = [
        Fragment(Box((i,), (1,)), replace(array, name=f"w@{i}"), (0,)) for i in range(n_pieces)
    ]
    tensors = {"w": Tensor("int32", (n_pieces,))}
    source = Catalog("fake", None, with_fragments(tensors, lambda key: pieces))
    one_array = PlannedArray("w", "int32", (n_pieces,))
    target = Catalog(
        "fake", None, with_fragments(tensors, lambda key: (whole_fragment(one_array),))
    )
    images = [FileImage("out", one_array.n_bytes, (PlacedArray(0, one_array),))]
    few = make_plan(*catalogs(one("w", SHAPE), one("w", SHAPE)), threads=1)
    tracemalloc.start()
    many = make_plan(source, target, images, threads=1)
    work = many.match("w")
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(work.pairs) == n_pieces
    assert many.memory_bytes - few.memory_bytes > used
    with pytest.raises(
        CapacityError, match="1 thread and 1 array from 5,000 source fragments need"
    ):
        make_plan(source, target, images, threads=1, memory_bytes=16 * MIB)
