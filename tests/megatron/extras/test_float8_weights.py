"""Float8 weights of Transformer Engine in rank files, whose class is not installed."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UnsupportedError, UsageError
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.support.edited import edit_rank
from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class DType:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return DType, (self.number,)


class Float8Tensor:
    def __init__(self, *parts: object) -> None:
        self.parts = parts

    @classmethod
    def _make_in_reduce_ex(cls, *parts: object) -> Float8Tensor:
        return cls(*parts)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return type(self)._make_in_reduce_ex, self.parts


class MXFP8Tensor(Float8Tensor):
    pass


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the names under which Transformer Engine pickles its classes."""
    name = "transformer_engine.pytorch.tensor.float8_tensor"
    for module, classes in (
        (name, (Float8Tensor, MXFP8Tensor)),
        ("transformer_engine_torch", (DType,)),
    ):
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        for item in classes:
            setattr(sys.modules[module], item.__name__, item)
            monkeypatch.setattr(item, "__module__", module)


def quantize(
    golden: Path,
    root: Path,
    case: str = "tp2_pp1",
    kind: type[Float8Tensor] = Float8Tensor,
    codes: torch.dtype = E4M3,
    number: int = 7,
    has_shape: bool = True,
) -> dict[str, dict[str, torch.Tensor]]:
    """Make the linear layers of rank files float8. Returns rank directory → name → its value."""
    shutil.copytree(golden / "mcore_legacy/dense_gqa" / case, root)
    values: dict[str, dict[str, torch.Tensor]] = {}
    for folder, path in rank_dirs(root).items():

        def change(loaded: dict[str, Any], folder: str = folder) -> None:
            for name, weight in list(loaded["model"].items()):
                if torch.is_tensor(weight) and weight.dim() == 2 and ".layers." in name:
                    scale = 64 / weight.abs().max().float()
                    data = (weight.float() * scale).to(codes)
                    inverse = (1 / scale).reshape(1)
                    parts = (data.view(torch.uint8), DType(number), inverse, torch.bfloat16)
                    shape = (weight.shape,) if has_shape else ()
                    loaded["model"][name] = kind(*parts, *shape)
                    value = (data.float() * inverse).bfloat16()
                    values.setdefault(folder, {})[name] = value

        edit_rank(path, change)
    return values


def convert(source: Path, target: Path, **options: Any) -> Any:
    return run(Job(src=source, dst=target, fsync=False, **options))


FORMS = [(E4M3, 7, True), (E5M2, 8, True), (E4M3, 6, False), (E5M2, 7, False)]


@pytest.mark.parametrize(("codes", "number", "has_shape"), FORMS)
def test_float8_weights_of_ranks_are_dequantized(
    golden: Path, tmp_path: Path, codes: torch.dtype, number: int, has_shape: bool
) -> None:
    values = quantize(golden, tmp_path / "a", codes=codes, number=number, has_shape=has_shape)
    convert(
        tmp_path / "a",
        tmp_path / "b",
        dequantize="bf16",
        topology=TopologyChange(tp=2),
        to="megatron",
    )
    for folder, path in rank_dirs(tmp_path / "b").items():
        model = load_rank_file(path / MODEL_FILE)["model"]
        assert values[folder]
        for name, value in values[folder].items():
            assert torch.equal(model[name], value), name
            assert model[name].dtype == torch.bfloat16


def test_shards_with_scales_of_their_own_are_joined(golden: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    values = quantize(golden, tmp_path / "a")
    result = convert(tmp_path / "a", tmp_path / "b", dequantize="fp32", to="safetensors")
    assert any(
        "Transformer Engine float8 tensors are dequantized to float32" in note
        for note in result.notes
    )
    (path,) = (tmp_path / "b").rglob("*.safetensors")
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    shards = [values[folder][name] for folder in sorted(values)]
    assert torch.equal(load_file(path)[name].bfloat16(), torch.cat(shards, 1))


def test_a_float8_tensor_is_named_with_the_option_for_it(golden: Path, tmp_path: Path) -> None:
    quantize(golden, tmp_path / "a")
    with pytest.raises(UnsupportedError, match=r"is a .*\.Float8Tensor, not") as caught:
        convert(tmp_path / "a", tmp_path / "b", to="safetensors")
    assert "--dequantize" in str(caught.value.hint)


def test_scales_of_blocks_are_refused_by_name(golden: Path, tmp_path: Path) -> None:
    quantize(golden, tmp_path / "a", kind=MXFP8Tensor)
    with pytest.raises(UnsupportedError, match="MXFP8Tensor, not a plain tensor") as caught:
        convert(tmp_path / "a", tmp_path / "b", dequantize="bf16", to="safetensors")
    assert "--dequantize" not in str(caught.value.hint)


def test_without_float8_weights_the_option_is_refused(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp1", tmp_path / "a")
    with pytest.raises(UsageError, match="no float8"):
        convert(tmp_path / "a", tmp_path / "b", dequantize="bf16", to="safetensors")


def test_inspect_offers_what_dequantizing_makes_possible(golden: Path, tmp_path: Path) -> None:
    from core.opening.open import open_checkpoint
    from core.verbs.inspect.summary import summarize

    quantize(golden, tmp_path / "a")
    source = open_checkpoint(tmp_path / "a")
    try:
        capabilities = summarize(source).capabilities
    finally:
        source.store.close()

    assert capabilities
    for capability in capabilities:
        assert capability.is_possible, capability
        assert "--dequantize bf16" in str(capability.why)
