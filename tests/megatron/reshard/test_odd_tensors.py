"""Rank files whose tensors torch saved in unusual ways: views, shared and large storages, dtypes,
devices, no elements.

Megatron's own files are saved again with such tensors; what then is resharded must equal Megatron's
file of the wanted layout.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.files.store import LocalStore
from core.formats.megatron import format as megatron
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.support.rewritten import model_of, rewritten
from tests.support.rank_files import MODEL_FILE, assert_same_bits, rank_dirs


def sources(golden: Path) -> Path:
    return golden / "mcore_legacy" / "dense_gqa"


def resharded(src: Path, dst: Path, **sizes: int) -> Path:
    run(Job(src=src, dst=dst, to="megatron", topology=TopologyChange(**sizes), fsync=False))  # type: ignore[arg-type]
    return dst


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, whose storage has the axes in reverse order."""
    axes = tuple(reversed(range(tensor.dim())))
    return tensor.permute(axes).contiguous().permute(axes)


def within(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in the middle of a storage that is four times as large."""
    large = torch.full((4 * tensor.numel() + 7,), 3, dtype=tensor.dtype)
    large[5 : 5 + tensor.numel()] = tensor.flatten()
    return large[5 : 5 + tensor.numel()].view(tensor.shape)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with a gap behind each."""
    large = torch.full((*tensor.shape, 2), 9, dtype=tensor.dtype)
    large[..., 0] = tensor
    return large[..., 0]


def rows_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as columns of a wider array."""
    if tensor.dim() < 2:
        return every_second(tensor)
    large = torch.full((tensor.shape[0], tensor.shape[1] + 11), 9, dtype=tensor.dtype)
    large[:, 3 : 3 + tensor.shape[1]] = tensor
    return large[:, 3 : 3 + tensor.shape[1]]


@pytest.mark.each_value
@pytest.mark.parametrize(
    "make", [transposed, within, every_second, rows_apart], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(
    ("a", "b"), [("tp2_pp1", {"tp": 4}), ("tp4_pp1", {"tp": 1}), ("tp1_pp1", {"tp": 2, "pp": 2})]
)
def test_views_are_read_by_their_strides(
    golden: Path,
    tmp_path: Path,
    make: Callable[[torch.Tensor], torch.Tensor],
    a: str,
    b: dict[str, int],
) -> None:
    def change(folder: str, name: str, value: Any) -> Any:
        return make(value) if isinstance(value, torch.Tensor) else value

    source = rewritten(sources(golden) / a, tmp_path / "a", change)
    out = resharded(source, tmp_path / "out", **b)
    wanted = sources(golden) / f"tp{b['tp']}_pp{b.get('pp', 1)}"
    for folder, path in rank_dirs(wanted).items():
        theirs, ours = model_of(wanted, folder), model_of(out, folder)
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            if isinstance(tensor, torch.Tensor):
                assert_same_bits(ours[name], tensor, f"{folder} {name}")
        assert (rank_dirs(out)[folder] / MODEL_FILE).stat().st_size < 2 * (
            path / MODEL_FILE
        ).stat().st_size


def test_one_storage_for_all_parameters_of_a_rank(golden: Path, tmp_path: Path) -> None:
    storages: dict[str, torch.Tensor] = {}

    def change(folder: str, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if folder not in storages:
            storages[folder] = torch.zeros(1 << 20, dtype=value.dtype)
            storages[folder + " end"] = torch.zeros((), dtype=torch.int64)
        start = int(storages[folder + " end"])
        storages[folder + " end"] += value.numel() + 64
        storages[folder][start : start + value.numel()] = value.flatten()
        return storages[folder][start : start + value.numel()].view(value.shape)

    source = rewritten(sources(golden) / "tp2_pp2", tmp_path / "a", change)
    for path in rank_dirs(source).values():
        with zipfile.ZipFile(path / MODEL_FILE) as archive:
            assert sum("/data/" in name for name in archive.namelist()) == 1
    out = resharded(source, tmp_path / "out", tp=4, pp=1)
    wanted = sources(golden) / "tp4_pp1"
    for folder, path in rank_dirs(wanted).items():
        for name, tensor in model_of(wanted, folder).items():
            if isinstance(tensor, torch.Tensor):
                assert_same_bits(model_of(out, folder)[name], tensor, name)
        assert (rank_dirs(out)[folder] / MODEL_FILE).stat().st_size < 2 * (
            path / MODEL_FILE
        ).stat().st_size


DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def test_every_dtype_is_moved_bit_by_bit(golden: Path, tmp_path: Path) -> None:
    modules = (
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
    )
    weights = [f"decoder.layers.{n}.{module}.weight" for n in range(4) for module in modules]
    dtype_of = dict(zip(weights, DTYPES, strict=False))
    assert len(dtype_of) == len(DTYPES)

    def recast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        size = torch.empty((), dtype=dtype).element_size()
        plain = tensor.contiguous().view(torch.int16).to(torch.int64)
        if dtype == torch.bool:
            return plain % 2 == 1
        data = torch.stack([(plain >> (8 * (n % 2))) & 0x7F for n in range(size)], -1).to(
            torch.uint8
        )
        return data.contiguous().view(dtype).squeeze(-1)

    def change(folder: str, name: str, value: Any) -> Any:
        return recast(value, dtype_of[name]) if name in dtype_of else value

    source = rewritten(sources(golden) / "tp2_pp1", tmp_path / "a", change)
    wanted = rewritten(sources(golden) / "tp4_pp1", tmp_path / "b", change)
    out = resharded(source, tmp_path / "out", tp=4)
    for folder in rank_dirs(wanted):
        for weight, dtype in dtype_of.items():
            ours, theirs = model_of(out, folder)[weight], model_of(wanted, folder)[weight]
            assert ours.dtype == theirs.dtype == dtype
            assert ours.shape == theirs.shape
            assert ours.contiguous().view(torch.uint8).equal(theirs.contiguous().view(torch.uint8))


def test_tensors_of_no_and_of_one_element(golden: Path, tmp_path: Path) -> None:
    state = "decoder.layers.0.self_attention.linear_qkv._extra_state"
    maximum = "decoder.layers.0.self_attention.linear_qkv.input_quantizer._amax"
    empty = "decoder.layers.0.self_attention.q_layernorm.weight"
    more = {maximum: torch.tensor(2.5, dtype=torch.float64)}
    more |= {
        f"decoder.layers.{layer}.self_attention.q_layernorm.weight": torch.empty(0, 3)
        for layer in range(4)
    }

    def change(folder: str, name: str, value: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8) if name == state else value

    source = rewritten(sources(golden) / "tp2_pp1", tmp_path / "a", change, more=more)
    out = resharded(source, tmp_path / "out", tp=1)
    model = model_of(out, "mp_rank_00")
    assert model[state].shape == (0,) and model[state].dtype == torch.uint8
    assert (
        model[maximum].shape == ()
        and model[maximum].item() == 2.5
        and model[maximum].dtype == torch.float64
    )
    assert model[empty].shape == (0, 3)


def test_tensors_of_a_device_are_read_without_it(golden: Path, tmp_path: Path) -> None:
    """torch tags storages with their device: a copy of the file, whose pickle says ``cuda:3``
    instead of ``cpu``.
    """
    source = tmp_path / "a"
    rewritten(sources(golden) / "tp2_pp1", tmp_path / "plain", lambda folder, name, value: value)
    for folder, path in rank_dirs(tmp_path / "plain").items():
        out = source / "iter_0000010" / folder
        out.mkdir(parents=True)
        with (
            zipfile.ZipFile(path / MODEL_FILE) as old,
            zipfile.ZipFile(out / MODEL_FILE, "w") as new,
        ):
            for item in old.infolist():
                data = old.read(item)
                if item.filename.endswith("data.pkl"):
                    assert data.count(b"X\x03\x00\x00\x00cpu") == 1
                    data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3")
                new.writestr(item.filename, data)
    (source / "latest_checkpointed_iteration.txt").write_text("10")
    out = resharded(source, tmp_path / "out", tp=4, pp=1)
    wanted = sources(golden) / "tp4_pp1"
    for folder in rank_dirs(wanted):
        ours = model_of(out, folder)
        for name, tensor in model_of(wanted, folder).items():
            if isinstance(tensor, torch.Tensor):
                assert ours[name].device.type == "cpu"
                assert_same_bits(ours[name], tensor, name)


def test_parameters_and_plain_tensors_are_the_same(golden: Path, tmp_path: Path) -> None:
    def change(folder: str, name: str, value: Any) -> Any:
        return torch.nn.Parameter(value) if isinstance(value, torch.Tensor) else value

    source = rewritten(sources(golden) / "tp2_pp1", tmp_path / "a", change)
    catalog = megatron.read(LocalStore(source / "iter_0000010"))
    assert not catalog.refused
    out = resharded(source, tmp_path / "out", tp=1)
    theirs = model_of(sources(golden) / "tp1_pp1", "mp_rank_00")
    for name, tensor in model_of(out, "mp_rank_00").items():
        if isinstance(tensor, torch.Tensor):
            assert_same_bits(tensor, theirs[name], name)


def test_tensors_that_share_a_storage_get_their_own(golden: Path, tmp_path: Path) -> None:
    """The same tensor under two names, as torch saves shared parameters: one storage, two
    entries.
    """
    first, second = (f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1))
    tensors: dict[str, torch.Tensor] = {}

    def change(folder: str, name: str, value: Any) -> Any:
        if name == first:
            tensors[folder] = value
        return tensors[folder] if name == second else value

    source = rewritten(sources(golden) / "tp2_pp1", tmp_path / "a", change)
    out = resharded(source, tmp_path / "out", tp=4)
    for folder in rank_dirs(out):
        model = model_of(out, folder)
        assert torch.equal(model[first], model[second])
        assert torch.equal(model[first], model_of(sources(golden) / "tp4_pp1", folder)[first])
