"""States that bitsandbytes 0.50.2 wrote: dequantized as it does, and cut where blocks end.

``tests/golden/frameworks/quantized_states.py`` made the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ReplicaMismatchError, UnsupportedError, UsageError
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from tests.support.archives import unpacked

WRAPPER = "__bnb_optimizer_quant_state__"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    return unpacked("quantized_states", folder)


def converted(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    run(Job(src=source, dst=target, to="torch", fsync=False, **options))
    result: dict[str, Any] = torch.load(target)
    return result


def without_odd(golden: Path, target: Path) -> Path:
    """Write the training state without the parameter whose last block is not full."""
    converted(golden / "adamw8bit.pt", target, exclude=("*odd*",))
    return target


def test_the_states_of_bitsandbytes_are_dequantized_as_it_does(
    golden: Path, tmp_path: Path
) -> None:
    result = converted(golden / "adamw8bit.pt", tmp_path / "out.pt", dequantize_optim=True)
    expected = torch.load(golden / "dequantized.pt")
    states = result["optimizer"]["state"]
    assert {f"{name}.{moment}" for name in states for moment in states[name]} == {
        *expected,
        *(f"{name}.step" for name in states),
    }
    for key, tensor in expected.items():
        name, _, moment = key.rpartition(".")
        assert torch.equal(states[name][moment], tensor), key


def test_stacked_layers_keep_the_scale_of_every_state(golden: Path, tmp_path: Path) -> None:
    source = without_odd(golden, tmp_path / "source.pt")
    before = torch.load(source)["optimizer"]["state"]
    stacked = converted(source, tmp_path / "stacked.pt", stack_layers=True)
    state = stacked["optimizer"]["state"]["layers.w.weight"][WRAPPER]
    layers = [before[f"layers.{number}.w.weight"][WRAPPER] for number in range(2)]
    assert torch.equal(state["state1"], torch.stack([layer["state1"] for layer in layers]))
    assert torch.equal(state["absmax2"], torch.cat([layer["absmax2"] for layer in layers]))
    assert torch.equal(state["qmap1"], layers[0]["qmap1"])

    # Dequantized, the stack is what bitsandbytes makes of its layers.
    wide = converted(tmp_path / "stacked.pt", tmp_path / "wide.pt", dequantize_optim=True)
    expected = torch.load(golden / "dequantized.pt")
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(
            wide["optimizer"]["state"]["layers.w.weight"][moment],
            torch.stack([expected[f"layers.{number}.w.weight.{moment}"] for number in range(2)]),
        )

    # Along another axis, the states of a block would not be consecutive.
    for change in ({"stack_layers": True}, {"unstack_layers": ()}):
        file = source if "stack_layers" in change else tmp_path / "stacked.pt"
        with pytest.raises(UnsupportedError, match="not consecutive along axis 1"):
            converted(file, tmp_path / "out.pt", layer_axis=1, **change)

    # Unstacked again, every layer is as before.
    again = converted(tmp_path / "stacked.pt", tmp_path / "again.pt", unstack_layers=())
    for name, item in before.items():
        for key, tensor in item[WRAPPER].items():
            assert torch.equal(again["optimizer"]["state"][name][WRAPPER][key], tensor)


def test_a_block_that_would_cross_the_cut_between_layers_is_refused(
    golden: Path, tmp_path: Path
) -> None:
    content = torch.load(without_odd(golden, tmp_path / "source.pt"))
    model, states = content["model"], content["optimizer"]["state"]
    name = "layers.{}.w.weight"
    for number in range(2):
        key = name.format(number)
        model[key], state = model[key][:63], states[key][WRAPPER]
        state["state1"], state["state2"] = state["state1"][:63], state["state2"][:63]
    torch.save(content, tmp_path / "cut.pt")
    with pytest.raises(UnsupportedError, match="256 consecutive states.* a layer has 4,032") as err:
        converted(tmp_path / "cut.pt", tmp_path / "out.pt", stack_layers=True)
    assert err.value.key == f"optimizer.state.{name.format(0)}.{WRAPPER}.state1"
    assert "--dequantize-optim" in str(err.value.hint)
    wide = converted(
        tmp_path / "cut.pt", tmp_path / "wide.pt", stack_layers=True, dequantize_optim=True
    )
    assert wide["optimizer"]["state"]["layers.w.weight"]["exp_avg"].shape == (2, 63, 64)

    # The same for a stack whose layers end inside of a block.
    stack = {
        "state1": torch.zeros(2, 63, 64, dtype=torch.uint8),
        "absmax1": torch.ones(32),
        "qmap1": torch.zeros(256),
    }
    torch.save(
        {"model": {}, "optimizer": {"state": {"layers.w": {WRAPPER: stack}}}}, tmp_path / "stack.pt"
    )
    with pytest.raises(UnsupportedError, match="a layer has 4,032"):
        converted(tmp_path / "stack.pt", tmp_path / "out.pt", unstack_layers=())
    with pytest.raises(UsageError, match="scales are unstacked together with their codes"):
        converted(tmp_path / "stack.pt", tmp_path / "out.pt", unstack_layers=("*absmax1",))


def test_layers_with_different_tables_are_not_stacked(golden: Path, tmp_path: Path) -> None:
    content = torch.load(without_odd(golden, tmp_path / "source.pt"))
    state = content["optimizer"]["state"]["layers.1.w.weight"][WRAPPER]
    state["qmap1"] = state["qmap1"] * 2
    torch.save(content, tmp_path / "tables.pt")
    with pytest.raises(ReplicaMismatchError):
        converted(tmp_path / "tables.pt", tmp_path / "out.pt", stack_layers=True)


def test_states_follow_their_parameter_under_a_new_name(golden: Path, tmp_path: Path) -> None:
    result = converted(
        without_odd(golden, tmp_path / "source.pt"),
        tmp_path / "out.pt",
        rename=((r"^model\.layers\.0\.w\b", "model.layers.0.q"),),
    )
    assert "layers.0.q.weight" in result["optimizer"]["param_groups"][0]["params"]
    assert WRAPPER in result["optimizer"]["state"]["layers.0.q.weight"]


def test_what_fsdp_gathers_of_the_states_is_not_taken_for_them(
    golden: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="only the first rank's shard") as err:
        converted(golden / "fsdp1_full.pt", tmp_path / "out.pt", dequantize_optim=True)
    assert "0.weight" in str(err.value.key)

    # Without the model, the parameters show it: they share one state.
    content = {"optimizer": torch.load(golden / "fsdp1_full.pt")["optimizer"]}
    torch.save(content, tmp_path / "alone.pt")
    with pytest.raises(UnsupportedError, match="shared with a different parameter"):
        converted(tmp_path / "alone.pt", tmp_path / "out.pt", dequantize_optim=True)


@pytest.mark.parametrize("name", ["ademamix", "lion"])
def test_states_of_other_optimizers_keep_the_names_of_bitsandbytes(
    name: str, golden: Path, tmp_path: Path
) -> None:
    source = torch.load(golden / f"{name}.pt")["optimizer"]
    converted(golden / f"{name}.pt", tmp_path / "out.pt", dequantize_optim=True)
    result = torch.load(tmp_path / "out.pt")["optimizer"]
    assert result["param_groups"] == source["param_groups"]
    codes = source["state"]["weight"][WRAPPER]
    wide = result["state"]["weight"][WRAPPER]
    numbers = ("1", "2") if name == "ademamix" else ("1",)
    assert set(wide) == {f"state{number}" for number in numbers}
    for number in numbers:
        scales = codes[f"absmax{number}"].reshape(-1).repeat_interleave(256)
        values = codes[f"qmap{number}"][codes[f"state{number}"].int()]
        assert torch.equal(wide[f"state{number}"], values * scales.view(values.shape))


def test_moments_of_incomplete_blocks_are_refused_because_kernels_disagree(
    golden: Path, tmp_path: Path
) -> None:
    content = torch.load(golden / "ademamix.pt")
    state = content["optimizer"]["state"]["weight"][WRAPPER]
    for name in ("state1", "state2"):
        state[name] = state[name][..., :-1].contiguous()
    del content["model"]
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(UnsupportedError, match="4032 elements, which is not a multiple") as err:
        converted(tmp_path / "odd.pt", tmp_path / "out.pt", dequantize_optim=True)
    assert err.value.key == f"optimizer.state.weight.{WRAPPER}.state1"
    assert not (tmp_path / "out.pt").exists()
