"""Inspecting takes work in proportion to the tensors: calls are counted, and no clock is read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import pytest

from core.opening.damaged import open_readable_part
from core.verbs.inspect.summary import summarize
from tests.hf.models import saved

EXPERT = re.compile(r"\.experts\.(\d+)\.")
STACKED = re.compile(r"\.experts\.|\.router\.|\.mlp\.gate\.|\.block_sparse_moe\.gate\.")
PACKED = ("gate_up_proj", "down_proj")


def with_experts(folder: Path, n_experts: int, *, is_quantized: bool = False) -> Path:
    """Give a model another number of experts: all shapes as they would be, and no data."""
    config = json.loads((folder / "config.json").read_text())
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    config |= {name: n_experts for name in names if name in config}
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    shapes: dict[str, tuple[str, list[int]]] = {}
    for key, entry in header.items():
        dtype, shape = entry["dtype"], list(entry["shape"])
        if (match := EXPERT.search(key)) is not None:
            if match[1] == "0":
                shapes |= {
                    EXPERT.sub(f".experts.{number}.", key): (dtype, shape)
                    for number in range(n_experts)
                }
            continue
        if STACKED.search(key):
            shape[0] = n_experts
        if is_quantized and key.endswith(PACKED):
            groups = [shape[0], shape[2], shape[1] // 32]
            shapes |= {f"{key}_blocks": ("U8", [*groups, 16]), f"{key}_scales": ("U8", groups)}
        else:
            shapes[key] = dtype, shape
    if is_quantized:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    write_sparse_file(folder / "model.safetensors", shapes)
    return folder


def write_sparse_file(path: Path, shapes: Mapping[str, tuple[str, list[int]]]) -> None:
    """Write a safetensors file with a header and a hole in place of the data."""
    header: dict[str, object] = {}
    position = 0
    for key, (dtype, shape) in shapes.items():
        n_bytes = 1 if dtype == "U8" else 2 if dtype in ("BF16", "F16") else 4
        for extent in shape:
            n_bytes *= extent
        header[key] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + n_bytes],
        }
        position += n_bytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def count_calls(folder: Path) -> int:
    """Return the number of calls of functions while a checkpoint is inspected."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        checkpoint = open_readable_part(folder)
        summary = summarize(checkpoint)
    finally:
        sys.setprofile(None)
    assert summary.capabilities is not None
    assert any("torch_dist" in item.targets for item in summary.capabilities if item.is_possible)
    return count


@pytest.mark.parametrize(
    ("name", "is_quantized"),
    [
        ("gpt_oss_groups", True),
        ("deepseek_v3", False),
        *(
            pytest.param(name, False, marks=pytest.mark.long)
            for name in ("gpt_oss_groups", "qwen3_moe", "mixtral")
        ),
    ],
)
def test_the_calls_grow_with_the_number_of_experts(
    name: str, is_quantized: bool, tmp_path: Path
) -> None:
    few, many = (
        count_calls(with_experts(saved(name, tmp_path / str(n)), n, is_quantized=is_quantized))
        for n in (32, 128)
    )
    assert many < 4.5 * few
