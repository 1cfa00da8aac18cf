"""Slices of lazy tensors: numpy's, and only their bytes are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import core
from core.errors import UnsupportedError
from core.files.store import LocalStore
from tests.support.rounds import rounds

SHAPE = (5, 1, 7)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "model.safetensors"
    tensors = {
        "t": torch.arange(35, dtype=torch.int32).reshape(SHAPE),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "float8": torch.arange(16, dtype=torch.float32).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, path)
    return path


def indices(n: int) -> st.SearchStrategy[object]:
    bound = st.none() | st.integers(-n - 2, n + 2)
    return st.integers(-n, n - 1) | st.builds(slice, bound, bound)


@settings(max_examples=rounds(150))
@given(data=st.data())
def test_a_slice_is_the_slice_of_numpy(data: st.DataObject, file: Path) -> None:
    truth = np.arange(35, dtype=np.int32).reshape(SHAPE)
    n_axes = data.draw(st.integers(0, 3))
    index = [data.draw(indices(n)) for n in SHAPE[:n_axes]]
    if data.draw(st.booleans()):
        index.append(...)
    with core.open(file) as checkpoint:
        tensor = checkpoint["t"][tuple(index)]  # type: ignore[index]
        expected = truth[tuple(index)]  # type: ignore[index]
        assert (tensor.shape, tensor.nbytes) == (expected.shape, expected.nbytes)
        assert np.array_equal(tensor.numpy(), expected)
        assert np.array_equal(tensor.torch().numpy(), expected)
        if tensor.shape and tensor.shape[0] > 1:  # a slice of a slice
            assert np.array_equal(tensor[1:].numpy(), expected[1:])


def test_bfloat16_and_float8_are_read_as_a_type_that_every_program_plots(file: Path) -> None:
    with core.open(file) as checkpoint:
        for name in ("scalar", "float8"):
            array = checkpoint[name].numpy("float32")
            assert array.dtype == np.float32
            assert np.array_equal(array, checkpoint[name].torch().float().numpy())


def test_scalars_empty_and_unusual_types(file: Path) -> None:
    with core.open(file) as checkpoint:
        assert (checkpoint["scalar"].shape, checkpoint["scalar"].torch().item()) == ((), 3.5)
        assert checkpoint["scalar"].numpy().astype(np.float32) == 3.5
        assert checkpoint["empty"].numpy().shape == (0, 3)
        assert checkpoint["empty"].torch().shape == (0, 3)
        assert checkpoint["float8"].torch().dtype == torch.float8_e4m3fn
        assert checkpoint["float8"].numpy().astype(np.float32)[3] == 3
        assert checkpoint["flags"].numpy().tolist() == [True, False]
        assert len(checkpoint["t"]) == 5
        with pytest.raises(TypeError):
            len(checkpoint["scalar"])


@pytest.mark.parametrize("index", [5, (0, 0, 7), (0, 0, 0, 0), (..., 0, ...)])
def test_indices_that_do_not_exist_are_index_errors(index: object, file: Path) -> None:
    with core.open(file) as checkpoint, pytest.raises(IndexError):
        checkpoint["t"][index]  # type: ignore[index]


@pytest.mark.parametrize("index", [slice(0, 5, 2), slice(None, None, -1), [0, 1], "t", None])
def test_other_indices_are_refused(index: object, file: Path) -> None:
    with core.open(file) as checkpoint, pytest.raises(UnsupportedError):
        checkpoint["t"][index]  # type: ignore[index]


def test_an_array_without_a_copy_is_refused(file: Path) -> None:
    with core.open(file) as checkpoint:
        assert np.asarray(checkpoint["t"], dtype=np.float64).dtype == np.float64
        with pytest.raises(ValueError, match="always a copy"):
            checkpoint["t"].__array__(copy=False)


def test_reading_a_slice_reads_its_bytes_alone(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with core.open(golden / "mcore_legacy/dense_gqa/tp4_pp1") as checkpoint:
        rows = checkpoint["decoder.layers.0.mlp.linear_fc1.weight"][0:3]
        assert {dict(place.rank)["tp"] for place in rows.places} == {0}
        lengths: list[int] = []
        read_into = LocalStore.read_into

        def counting(store: LocalStore, name: str, offset: int, buffer: memoryview) -> None:
            lengths.append(len(buffer))
            read_into(store, name, offset, buffer)

        monkeypatch.setattr(LocalStore, "read_into", counting)
        rows.numpy()
        assert sum(lengths) == rows.nbytes
