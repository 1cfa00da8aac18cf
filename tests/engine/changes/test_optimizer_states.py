"""Optimizer states of 8 and 4 bits become float32.

bitsandbytes 0.50.2 and torchao 0.18.0 themselves give the same numbers
(``functional.dequantize_blockwise``, ``OptimState4bit.dequantize`` …); here their formulas do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CorruptError, UnsupportedError, UsageError
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from tests.support.archives import unpacked

SHAPES = {"wide": (300, 1030), "odd": (70, 61), "small": (7,)}
BLOCK_OF = {"wide": 256, "odd": 2048}


def by_bitsandbytes(state: dict[str, torch.Tensor], number: int, block: int) -> torch.Tensor:
    """The product of ``dequantize_blockwise`` of bitsandbytes 0.50.2."""
    codes, scales = state[f"state{number}"], state[f"absmax{number}"]
    scale = scales.repeat_interleave(block)[: codes.numel()].view(codes.shape)
    return state[f"qmap{number}"][codes.int()] * scale


def adam8bit() -> dict[str, Any]:
    """A state dict of ``Adam8bit``, whose small parameters have float32 states."""
    generator = torch.Generator().manual_seed(3)
    states: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        state = states[name] = {"step": torch.tensor(3.0)}
        for number in (1, 2):
            if name not in BLOCK_OF:
                state[f"state{number}"] = torch.randn(shape, generator=generator)
                continue
            n = torch.Size(shape).numel()
            codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            state[f"state{number}"] = codes
            state[f"absmax{number}"] = torch.rand(-(-n // BLOCK_OF[name]), generator=generator)
            state[f"qmap{number}"] = torch.linspace(-1, 1, 256)
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(SHAPES)}]
    return {"optimizer": {"state": states, "param_groups": groups}}


def converted(folder: Path, content: object, to: str = "torch") -> Path:
    torch.save(content, folder / "a.pt")
    target = folder / "out.pt"
    run(Job(src=folder / "a.pt", dst=target, to=to, dequantize_optim=True, fsync=False))
    return target


def test_states_of_bitsandbytes_are_those_of_adam_bit_for_bit(tmp_path: Path) -> None:
    source = adam8bit()
    result = torch.load(converted(tmp_path, source))
    assert result["optimizer"]["param_groups"] == source["optimizer"]["param_groups"]
    for name, state in source["optimizer"]["state"].items():
        states = result["optimizer"]["state"][name]
        assert list(states) == ["step", "exp_avg", "exp_avg_sq"]
        for number, moment in ((1, "exp_avg"), (2, "exp_avg_sq")):
            wide = (
                by_bitsandbytes(state, number, BLOCK_OF[name])
                if name in BLOCK_OF
                else state[f"state{number}"]
            )
            assert torch.equal(states[moment], wide)


@pytest.mark.parametrize("case", ["opt8", "opt4", "optfp8"])
def test_states_of_torchao_are_dequantized_bit_for_bit(case: str, tmp_path: Path) -> None:
    unpacked("torchao", tmp_path)
    parts = torch.load(tmp_path / f"{case}.parts.pt")
    target = tmp_path / "out.pt"
    source = tmp_path / f"{case}.pt"
    run(Job(src=source, dst=target, to="torch", dequantize_optim=True, fsync=False))
    states = torch.load(target)["optimizer"]["state"]
    n_checked = 0
    for key in parts:
        prefix = key.removesuffix(".codes")
        if prefix == key:
            continue
        number, moment = prefix.split(".")[-2:]
        codes, scale = parts[key], parts[f"{prefix}.scale"]
        if case == "opt4":
            codes = torch.stack([codes >> 4, codes & 15], dim=-1)
        wide = codes.float() if case == "optfp8" else parts[f"{prefix}.qmap"][codes.int()]
        wide = wide.view(len(scale), -1) * scale.view(-1, 1)
        state = states[int(number)][moment]
        assert torch.equal(state, wide.view(state.shape))
        n_checked += 1
    assert n_checked == 4


def flattened(content: object, path: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {path: content}
    return {
        key: value
        for name, item in content.items()
        for key, value in flattened(item, f"{path}.{name}" if path else str(name)).items()
    }


@pytest.mark.parametrize("case", ["bitsandbytes", "opt8", "opt4", "optfp8"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_states_under_dotted_keys_are_those_of_nested_ones(
    case: str, depth: int, tmp_path: Path
) -> None:
    content = adam8bit()
    if case != "bitsandbytes":
        source, parts = unpacked("torchao", tmp_path) / f"{case}.pt", tmp_path / "parts.pt"
        run(Job(src=source, dst=parts, to="torch", fsync=False))
        content = torch.load(parts)
    states = content["optimizer"]["state"]
    (tmp_path / "nested").mkdir()
    nested = torch.load(converted(tmp_path / "nested", {"optimizer": {"state": states}}))

    flat: dict[str, Any] = [
        flattened({"optimizer": {"state": states}}),
        {"optimizer": flattened({"state": states})},
        {"optimizer": {"state": flattened(states)}},
    ][depth]
    result = torch.load(converted(tmp_path, flat))
    for _ in range(depth):
        (result,), (nested,) = result.values(), nested.values()
    expected = flattened(nested)
    assert list(result) == list(expected)
    for key, state in expected.items():
        assert torch.equal(torch.as_tensor(result[key]), torch.as_tensor(state))


def test_what_is_not_two_blockwise_states_is_refused_by_name(tmp_path: Path) -> None:
    source = adam8bit()
    del source["optimizer"]["state"]["odd"]["absmax2"]
    with pytest.raises(UnsupportedError, match="codes with absmax2 and qmap2") as caught:
        converted(tmp_path, source)
    assert caught.value.key == "optimizer.state.odd.state2"

    source = adam8bit()
    source["optimizer"]["state"]["odd"]["state2"] = torch.zeros(7, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="no supported optimizer has states of shapes"):
        converted(tmp_path, source)

    source = adam8bit()
    source["optimizer"]["state"]["odd"]["absmax1"] = torch.ones(10)
    with pytest.raises(CorruptError, match="10 scales for 4270 states do not match any block size"):
        converted(tmp_path, source)

    with pytest.raises(UsageError, match="the checkpoint has no 8-bit or 4-bit optimizer state"):
        converted(tmp_path, {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}})
    assert not (tmp_path / "out.pt").exists()
