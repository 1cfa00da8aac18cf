"""Weights inside objects: pickled modules, numpy arrays, and what no destination takes out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckpt_cli.app import main
from core.errors import UnsafeError, UnsupportedError
from core.opening.open import open_checkpoint
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from tests.support.rank_files import assert_same_bits


class Net(torch.nn.Module):
    """A module with all that a state dict has or leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.tied = torch.nn.Linear(2, 3)
        self.tied.weight = self.first.weight
        self.layers = torch.nn.ModuleList([torch.nn.BatchNorm1d(3), torch.nn.ReLU()])
        self.shared = self.layers
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("left", torch.arange(4), persistent=False)
        self.register_parameter("empty", None)
        self.loose = torch.arange(5)


class Holder:
    """An object of a class of one's own that holds a tensor."""

    def __init__(self) -> None:
        self.shadow = [torch.arange(3.0)]


class Runs(torch.nn.Module):
    """A module with an attribute that would run a command."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.hook = _Command()


class _Command:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("true",)


def convert(src: Path, dst: Path, **options: Any) -> Path:
    """Convert, and return the destination."""
    run(Job(src=src, dst=dst, fsync=False, **options))
    return dst


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda net: net, ""),
        (lambda net: {"epoch": 3, "model": net}, "model."),
        (lambda net: (net, 3), "0."),
        (lambda net: [1, {"m": torch.nn.DataParallel(net)}], "1.m.module."),
    ],
)
def test_a_pickled_module_is_its_state_dict(
    wrap: Callable[[object], object], prefix: str, is_zip: bool, tmp_path: Path
) -> None:
    net = Net()
    torch.save(wrap(net), tmp_path / "model.pt", _use_new_zipfile_serialization=is_zip)
    expected = {prefix + key: tensor for key, tensor in net.state_dict().items()}
    catalog = open_checkpoint(tmp_path / "model.pt").catalog
    assert list(catalog.tensors) == list(expected)
    assert any("pickled module" in note for note in catalog.notes)
    flat = load_file(
        convert(tmp_path / "model.pt", tmp_path / "flat.safetensors", to="safetensors")
    )
    # A tensor that is stored under several names is written once.
    for key, tensor in flat.items():
        assert_same_bits(tensor, expected[key], key)
    assert {t.data_ptr() for t in expected.values()} == {expected[key].data_ptr() for key in flat}


def test_a_module_becomes_a_state_dict_that_its_class_loads(tmp_path: Path) -> None:
    net = Net()
    torch.save(net, tmp_path / "model.pt")
    result = torch.load(convert(tmp_path / "model.pt", tmp_path / "out.pt", to="torch"))
    other = Net()
    other.load_state_dict(result)
    for key, tensor in net.state_dict().items():
        assert_same_bits(other.state_dict()[key], tensor, key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n_shards", [0, 1, 2])
def test_weights_of_hugging_face_may_be_pickled_modules(n_shards: int, tmp_path: Path) -> None:
    """One pytorch_model.bin, or numbered shards; transformers loads the result."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)  # type: ignore[arg-type]
    )
    (source := tmp_path / "run").mkdir()
    model.config.save_pretrained(source)
    parts: list[torch.nn.Module] = [model]
    if n_shards == 2:
        parts = [torch.nn.Module(), torch.nn.Module()]
        parts[0].model, parts[1].lm_head = model.model, model.lm_head
    for number, part in enumerate(parts, 1):
        name = f"-{number:05}-of-{n_shards:05}" if n_shards else ""
        torch.save(part, source / f"pytorch_model{name}.bin")
    other = LlamaForCausalLM.from_pretrained(convert(source, tmp_path / "out", to="hf"))
    for key, tensor in model.state_dict().items():
        assert_same_bits(other.state_dict()[key], tensor, key)


def test_modules_without_tensors_and_without_an_end_stay_objects(tmp_path: Path) -> None:
    endless = torch.nn.Module()
    endless.register_parameter("w", torch.nn.Parameter(torch.ones(1)))
    endless._modules["self"] = endless
    doubled = torch.nn.Linear(1, 1)
    for _ in range(40):
        doubled = torch.nn.Sequential(doubled, doubled)
    value = {"w": torch.ones(2), "relu": torch.nn.ReLU(), "endless": endless, "doubled": doubled}
    torch.save(value, tmp_path / "model.pt")
    catalog = open_checkpoint(tmp_path / "model.pt").catalog
    assert list(catalog.tensors) == ["w"]
    assert {"relu", "endless", "doubled"} <= set(catalog.objects)


def test_what_a_module_would_run_is_refused_though_it_is_left_out(tmp_path: Path) -> None:
    torch.save(Runs(), tmp_path / "model.pt")
    assert set(open_checkpoint(tmp_path / "model.pt").catalog.tensors) == {
        "layer.weight",
        "layer.bias",
    }
    with pytest.raises(UnsafeError, match="system"):
        convert(tmp_path / "model.pt", tmp_path / "out.safetensors", to="safetensors")


ARRAYS = {
    "plain": np.arange(6, dtype="f4").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.arange(3).astype(">i4"),
    "half": np.arange(3).astype("f2"),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), "i8"),
    "point": np.array(3, "u1"),
    "scalar": np.float64(2.5),
    "strided": np.arange(10, dtype="i2")[::3],
}


@pytest.mark.parametrize("protocol", [2, 5])
def test_numpy_arrays_become_tensors_where_only_tensors_are_stored(
    protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"model": {**ARRAYS, "text": np.array(["a"])}}
    torch.save(value, tmp_path / "arrays.pt", pickle_protocol=protocol)
    assert main(["convert", str(tmp_path / "arrays.pt"), str(tmp_path / "out.safetensors")]) == 0
    output = capsys.readouterr().out
    assert "these NumPy arrays become tensors: model.plain" in output
    assert "not carried  model.text" in output
    result = load_file(tmp_path / "out.safetensors")
    assert set(result) == {f"model.{name}" for name in ARRAYS}
    for name, array in ARRAYS.items():
        native = np.asarray(array)
        expected = torch.from_numpy(native.astype(native.dtype.newbyteorder("=")).copy())
        assert_same_bits(result[f"model.{name}"], expected.contiguous(), name)


def test_numpy_arrays_in_a_directory_without_files_of_its_own_become_tensors(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "saved" / "pytorch_model_fsdp_0"
    state = {"model": {"w": torch.ones(2), "a": ARRAYS["plain"]}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    result = load_file(convert(tmp_path / "saved", tmp_path / "out.safetensors", to="safetensors"))
    assert np.array_equal(result["model.a"].numpy(), ARRAYS["plain"])


def test_numpy_arrays_stay_arrays_where_objects_are_stored(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "a": ARRAYS["plain"]}, tmp_path / "arrays.pt")
    result = convert(tmp_path / "arrays.pt", tmp_path / "out.pt", to="torch")
    array = torch.load(result, weights_only=False)["a"]
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, ARRAYS["plain"])


@pytest.mark.parametrize("to", ["safetensors", "dcp", "orbax", "zarr", "zarr3", "torch_dist"])
@pytest.mark.parametrize("drop_unknown", [False, True])
def test_a_result_without_any_of_the_tensors_is_refused_for_every_target(
    to: str, drop_unknown: bool, tmp_path: Path
) -> None:
    torch.save({"epoch": 1, "ema": Holder()}, tmp_path / "ema.pt")
    with pytest.raises(UnsupportedError) as failure:
        convert(tmp_path / "ema.pt", tmp_path / "out", to=to, drop_unknown=drop_unknown)
    assert failure.value.hint is not None
    assert "--to torch" in failure.value.hint
    # The hint leads on: the torch file holds the tensors.
    result = convert(tmp_path / "ema.pt", tmp_path / "kept.pt", to="torch")
    assert_same_bits(
        torch.load(result, weights_only=False)["ema"].shadow[0], torch.arange(3.0), "shadow"
    )


def test_a_file_without_tensors_is_converted(tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    assert convert(tmp_path / "none.pt", tmp_path / "out", to="safetensors").is_dir()
