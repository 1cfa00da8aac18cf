"""Reading the destination again: what was written is what the source holds, as the destination's
own readers see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.errors import CapacityError, CorruptError
from core.formats.megatron import format as megatron
from core.progress import Phase, Progress
from core.publish.stage.files import StageStore
from core.verbs.convert.run import Job, TopologyChange, run

GOLD = "mcore_legacy/dense_gqa/tp2_pp2"


def _job(golden: Path, tmp_path: Path, **options: object) -> Job:
    change = TopologyChange(tp=4, pp=1)
    job = Job(
        src=golden / GOLD,
        dst=tmp_path / "out",
        topology=change,
        is_reshard=True,
        fsync=False,
        verify=True,
    )
    return replace(job, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["megatron", "torch_dist", "zarr"])
def test_every_byte_of_the_tensors_is_compared(golden: Path, tmp_path: Path, to: str) -> None:
    progress: list[Progress] = []
    report = run(_job(golden, tmp_path, to=to), progress=progress.append)
    norms = 4 * 2 * 64 + 64
    n_elements = 2 * 512 * 64 + 4 * (128 * 64 + 128 + 64 * 64 + 192 * 64 + 64 * 96) + norms
    assert report.bytes_verified == 2 * (n_elements + (3 * norms if to == "megatron" else 0))
    assert [p.done for p in progress if p.phase == Phase.VERIFYING][-1] == report.bytes_verified


def test_a_bit_that_flips_on_the_disk_is_found_and_nothing_becomes_visible(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StageStore.write
    flipped: list[str] = []

    def flipping(self: StageStore, name: str, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if not flipped and len(view) == 64 * 48 * 2:  # a shard of fc2
            flipped.append(name)
            write(self, name, offset, bytes([view[0] ^ 1]) + bytes(view[1:]))
        else:
            write(self, name, offset, data)

    monkeypatch.setattr(StageStore, "write", flipping)
    with pytest.raises(CorruptError, match=r"in the source .*Nothing was published") as caught:
        run(_job(golden, tmp_path, topology=TopologyChange(tp=2, pp=1), threads=1))
    assert flipped and flipped[0].endswith(str(caught.value.file))
    assert not list(tmp_path.iterdir())


def _with_two_swapped(
    lay_out: Callable[[TargetCatalog], list[FileImage]],
) -> Callable[[TargetCatalog], list[FileImage]]:
    """A layout that puts the input norms of layers 0 and 1 into each other's places."""

    def lay_out_swapped(target: TargetCatalog) -> list[FileImage]:
        images = []
        for image in lay_out(target):
            names = [placed.array.name for placed in image.arrays]
            first, second = (
                next(
                    (
                        n
                        for n, name in enumerate(names)
                        if f"layers.{layer}.input_layernorm" in name
                    ),
                    None,
                )
                for layer in (0, 1)
            )
            arrays = list(image.arrays)
            if first is not None and second is not None:
                earlier, other = arrays[first], arrays[second]
                arrays[first] = PlacedArray(earlier.offset, other.array)
                arrays[second] = PlacedArray(other.offset, earlier.array)
            images.append(replace(image, arrays=arrays))
        return images

    return lay_out_swapped


def test_tensors_in_each_others_places_are_found(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(megatron.FORMAT, lay_out=_with_two_swapped(megatron.lay_out))  # type: ignore[arg-type]
    monkeypatch.setattr("core.verbs.convert.prepare.format_called", lambda name: wrong)
    run(_job(golden, tmp_path, to="megatron", dst=tmp_path / "unseen", verify=False))
    with pytest.raises(CorruptError, match="in the source"):
        run(_job(golden, tmp_path, to="megatron"))


def test_memory_for_it_is_asked_for_before_anything_is_written(
    golden: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CapacityError, match=r"--verify needs \d+ MiB of memory, .* --memory to at least 51MiB"
    ):
        run(_job(golden, tmp_path, memory_bytes=(50 << 20) + 700_000))
    assert not list(tmp_path.iterdir())
