"""Weights of torchao 0.18.0 become what its own ``dequantize()`` makes of them, bit for bit.

``tests/golden/frameworks/quantized_states.py`` made the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CorruptError, UnsupportedError
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from tests.support.archives import unpacked


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchao")
    return unpacked("quantized_states", folder) / "torchao"


def converted(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    run(Job(src=source, dst=target, to="torch", fsync=False, **options))
    result: dict[str, Any] = torch.load(target, weights_only=False)
    return result


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float8_e5m2", "float32"),
        ("int8_fp16", "float16"),
        ("int8_group_fp32", "float32"),
        ("intx3_group", "bfloat16"),
    ],
)
def test_the_weights_are_those_of_torchao_in_their_own_dtype(
    name: str, dtype: str, golden: Path, tmp_path: Path
) -> None:
    parts = converted(golden / f"{name}.pt", tmp_path / "parts.pt")
    assert parts["0.weight"]["dtype"] == dtype
    result = converted(golden / f"{name}.pt", tmp_path / "wide.pt", dequantize=dtype)
    expected = torch.load(golden / f"{name}.wide.pt")
    assert list(result) == ["0.weight", "0.bias", "1.weight"]
    assert result["0.weight"].dtype == expected.dtype
    assert torch.equal(result["0.weight"], expected)
    assert torch.equal(result["1.weight"], parts["1.weight"])


def test_parts_in_another_format_are_dequantized_the_same(golden: Path, tmp_path: Path) -> None:
    run(Job(src=golden / "intx3_group.pt", dst=tmp_path / "dcp", to="dcp", fsync=False))
    result = converted(tmp_path / "dcp", tmp_path / "wide.pt", dequantize="bfloat16")
    assert torch.equal(result["0.weight"], torch.load(golden / "intx3_group.wide.pt"))


def test_parts_under_dotted_keys_are_dequantized_the_same(golden: Path, tmp_path: Path) -> None:
    parts = converted(golden / "intx3_group.pt", tmp_path / "parts.pt")
    weight = parts.pop("0.weight")
    flat = {f"0.weight.{name}": part for name, part in weight.items()}
    torch.save({**flat, **parts}, tmp_path / "flat.pt")
    result = converted(tmp_path / "flat.pt", tmp_path / "wide.pt", dequantize="bfloat16")
    assert list(result) == ["0.weight", *parts]
    assert torch.equal(result["0.weight"], torch.load(golden / "intx3_group.wide.pt"))


def test_parts_that_do_not_fit_and_weights_that_need_more_are_refused(
    golden: Path, tmp_path: Path
) -> None:
    content = converted(golden / "int8_fp16.pt", tmp_path / "parts.pt")
    good = content["0.weight"]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"block_size": [1, 7]}, CorruptError, "does not evenly divide codes"),
        ({"block_size": [96]}, CorruptError, "does not fit codes"),
        ({"scale": torch.ones(3)}, CorruptError, "40 blocks, but the scales are float32"),
        (
            {"zero_point": torch.ones(3, dtype=torch.int8)},
            CorruptError,
            "the zero points have shape",
        ),
        (
            {"zero_point": good["zero_point"].float()},
            UnsupportedError,
            "float32 zero points are not supported",
        ),
        ({"act_pre_scale": torch.ones(96)}, UnsupportedError, "scaled by act_pre_scale"),
    ]
    for number, (change, error, message) in enumerate(cases):
        torch.save({**content, "0.weight": {**good, **change}}, tmp_path / f"{number}.pt")
        with pytest.raises(error, match=message) as caught:
            converted(tmp_path / f"{number}.pt", tmp_path / "out.pt", dequantize="fp16")
        assert caught.value.key == "0.weight"  # type: ignore[attr-defined]
    assert not (tmp_path / "out.pt").exists()
