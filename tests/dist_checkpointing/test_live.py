"""Tensors in memory as one end of the engine: several processes write one checkpoint, and read
their parts of it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from core.arrays.box import Box, full_box
from core.dist_checkpointing._live.load import fill
from core.dist_checkpointing._live.save import LiveSave, ProcessContribution
from core.dist_checkpointing._live.tensors import Chunk, LiveTensor
from core.errors import CorruptError, MissingShardError, UsageError
from core.formats.registry import format_called
from core.opening.open import open_checkpoint

SHAPE = (6, 8)
VALUES = np.arange(48, dtype="float32").reshape(SHAPE) + 0.5
FORMATS = ("torch_dist", "dcp", "zarr", "zarr3", "safetensors", "torch")


def held_by(box: Box, flat: tuple[int, int] | None = None, *, key: str = "w") -> LiveTensor:
    """What a process holds of VALUES."""
    region = VALUES[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))].copy()
    data = region if flat is None else region.reshape(-1)[slice(*flat)].copy()
    return LiveTensor(Chunk(key, "float32", SHAPE, box, flat), memoryview(data).cast("B"))


def saved(root: Path, format: str, processes: list[list[LiveTensor]]) -> Path:
    """A checkpoint that several processes wrote at the same time."""
    root.mkdir()
    contributions = [
        ProcessContribution(tuple(tensor.chunk for tensor in tensors)) for tensors in processes
    ]
    work = [
        LiveSave(
            format=format_called(format),
            root=root,
            number=n,
            contributions=contributions,
            tensors=tensors,
        )
        for n, tensors in enumerate(processes)
    ]
    for writer in work:
        writer.laid_out()
    threads = [threading.Thread(target=item.write) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work[0].finish()
    return root


def loaded(
    root: Path, box: Box, flat: tuple[int, int] | None = None, **options: object
) -> np.ndarray:
    """A part of a checkpoint's tensor ``w``."""
    chunk = Chunk("w", "float32", SHAPE, box, flat, **options)  # type: ignore[arg-type]
    data = np.full(chunk.n_elements, -1, "float32")
    opened = open_checkpoint(root)
    fill([LiveTensor(chunk, memoryview(data).cast("B"))], opened.catalog, opened.store)
    opened.store.close()
    return data if flat is not None else data.reshape(box.shape)


ROWS = [
    [held_by(Box((0, 0), (2, 8)))],
    [held_by(Box((2, 0), (2, 8)))],
    [held_by(Box((4, 0), (2, 8)))],
]
COLUMNS = [[held_by(Box((0, 0), (6, 4)))], [held_by(Box((0, 4), (6, 4)))]]
FLAT = [
    [held_by(Box((0, 0), (6, 4)), (0, 7)), held_by(Box((0, 4), (6, 4)))],
    [held_by(Box((0, 0), (6, 4)), (7, 24))],
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("processes", [ROWS, COLUMNS, FLAT], ids=["rows", "columns", "flat"])
def test_what_several_processes_write_is_one_checkpoint(tmp_path, format, processes):
    root = saved(tmp_path / "made", format, processes)
    np.testing.assert_array_equal(loaded(root, full_box(SHAPE)), VALUES)
    np.testing.assert_array_equal(loaded(root, Box((1, 3), (4, 2))), VALUES[1:5, 3:5])
    np.testing.assert_array_equal(
        loaded(root, Box((1, 0), (5, 8)), (3, 37)), VALUES[1:].reshape(-1)[3:37]
    )


def test_every_process_writes_a_file_of_its_own_where_the_format_has_files_by_rank(tmp_path):
    root = saved(tmp_path / "made", "torch_dist", ROWS)
    assert {path.name for path in root.iterdir()} >= {
        "__0_0.distcp",
        "__1_0.distcp",
        "__2_0.distcp",
        ".metadata",
    }


def test_strided_memory_is_written_as_it_reads(tmp_path):
    data = np.asfortranarray(VALUES)
    memory = memoryview(data.T.copy().reshape(-1)).cast("B")
    tensor = LiveTensor(Chunk("w", "float32", SHAPE, full_box(SHAPE)), memory, (1, SHAPE[0]))
    np.testing.assert_array_equal(
        loaded(saved(tmp_path / "made", "dcp", [[tensor]]), full_box(SHAPE)), VALUES
    )


def test_a_flexible_tensor_is_zero_where_the_checkpoint_ends(tmp_path):
    root = saved(tmp_path / "made", "dcp", ROWS)
    opened = open_checkpoint(root)
    for rows in (4, 9):
        data = np.full((rows, 8), -1, "float32")
        chunk = Chunk("w", "float32", (rows, 8), full_box((rows, 8)), flexible=True)
        fill([LiveTensor(chunk, memoryview(data).cast("B"))], opened.catalog, opened.store)
        np.testing.assert_array_equal(data[:6], VALUES[:rows])
        assert not data[6:].any()
    opened.store.close()


def test_another_shape_or_a_missing_tensor_is_refused(tmp_path):
    opened = open_checkpoint(saved(tmp_path / "made", "dcp", ROWS))
    data = np.zeros((9, 8), "float32")
    with pytest.raises(CorruptError, match="shape"):
        fill(
            [
                LiveTensor(
                    Chunk("w", "float32", (9, 8), full_box((9, 8))), memoryview(data).cast("B")
                )
            ],
            opened.catalog,
            opened.store,
        )
    with pytest.raises(MissingShardError, match="no such tensor"):
        fill([held_by(full_box(SHAPE), key="v")], opened.catalog, opened.store)
    opened.store.close()


def test_values_are_cast_to_what_is_asked_for(tmp_path):
    opened = open_checkpoint(saved(tmp_path / "made", "dcp", COLUMNS))
    data = np.zeros(SHAPE, "float64")
    fill(
        [LiveTensor(Chunk("w", "float64", SHAPE, full_box(SHAPE)), memoryview(data).cast("B"))],
        opened.catalog,
        opened.store,
    )
    opened.store.close()
    np.testing.assert_array_equal(data, VALUES)


def test_chunks_that_disagree_are_refused(tmp_path):
    other = LiveTensor(Chunk("w", "float32", (6, 9), Box((0, 8), (6, 1))), memoryview(bytes(24)))
    with pytest.raises(UsageError, match=r"float32 \(6, 8\) and float32 \(6, 9\)"):
        saved(tmp_path / "made", "dcp", [[held_by(full_box(SHAPE)), other]])
