"""Extra states: Megatron's rank files with what Transformer Engine keeps in them, resharded."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CorruptError, UnsupportedError
from core.verbs.convert.run import Job, Report, TopologyChange, run
from tests.megatron.support.rewritten import model_of, rewritten
from tests.support.rank_files import rank_dirs

STATE = "decoder.layers.0.mlp.linear_fc1._extra_state"
RECIPE = pickle.dumps({"recipe": "Float8CurrentScaling"})


def delayed(value: float) -> bytes:
    """What delayed scaling measures, pickled."""
    return pickle.dumps({"scale_fwd": [value], "amax_history_fwd": [[value] * 4]})


def as_tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def resharded(src: Path, dst: Path, to: str = "megatron", **sizes: int) -> Report:
    return run(Job(src=src, dst=dst, to=to, topology=TopologyChange(**sizes), fsync=False))  # type: ignore[arg-type]


def with_state(golden: Path, target: Path, of_rank: dict[str, Any]) -> Path:
    """dense_gqa at TP 2 with a state of one module on every rank."""
    return rewritten(
        golden / "mcore_legacy/dense_gqa/tp2_pp1",
        target,
        lambda folder, name, value: of_rank[folder] if name == STATE else value,
    )


def both(value: Any) -> dict[str, Any]:
    return {"mp_rank_00": value, "mp_rank_01": value}


@pytest.mark.parametrize("data", [b"", RECIPE, delayed(1.5)], ids=["empty", "recipe", "delayed"])
def test_a_tensor_that_all_ranks_share_is_kept(golden: Path, tmp_path: Path, data: bytes) -> None:
    source = with_state(golden, tmp_path / "a", both(as_tensor(data)))
    report = resharded(source, tmp_path / "out", tp=4)
    for folder in rank_dirs(tmp_path / "out"):
        state = model_of(tmp_path / "out", folder)[STATE]
        assert state.dtype == torch.uint8
        assert bytes(state.numpy()) == data
    assert not any(STATE in text for text in report.dropped)


@pytest.mark.first(1)
@pytest.mark.parametrize("data", [b"", RECIPE, delayed(1.5)], ids=["empty", "recipe", "delayed"])
def test_a_stream_that_all_ranks_share_is_kept(golden: Path, tmp_path: Path, data: bytes) -> None:
    source = with_state(golden, tmp_path / "a", {folder: io.BytesIO(data) for folder in both(0)})
    resharded(source, tmp_path / "out", tp=4)
    for folder in rank_dirs(tmp_path / "out"):
        stream = model_of(tmp_path / "out", folder)[STATE]
        assert isinstance(stream, io.BytesIO)
        assert stream.getvalue() == data


@pytest.mark.parametrize(
    "kind",
    [as_tensor, pytest.param(io.BytesIO, marks=pytest.mark.long)],
    ids=["tensor", "stream"],
)
@pytest.mark.parametrize(
    ("first", "other", "why"),
    [
        (delayed(1.5), delayed(2.5), "delayed FP8 scaling.*repeats the measurements"),
        (
            RECIPE,
            pickle.dumps({"recipe": "MXFP8BlockScaling"}),
            "not the same on all ranks.*recreates it",
        ),
        (b"", RECIPE, "not the same on all ranks"),
    ],
    ids=["delayed", "recipe", "one_empty"],
)
def test_states_that_differ_become_empty_with_a_note(
    golden: Path, tmp_path: Path, kind: Any, first: bytes, other: bytes, why: str
) -> None:
    source = with_state(
        golden, tmp_path / "a", {"mp_rank_00": kind(first), "mp_rank_01": kind(other)}
    )
    report = resharded(source, tmp_path / "out", tp=1)
    model = model_of(tmp_path / "out", "mp_rank_00")
    assert model[STATE] is None
    assert list(model) == list(model_of(golden / "mcore_legacy/dense_gqa/tp1_pp1", "mp_rank_00"))
    (note,) = [text for text in report.dropped if STATE in text]
    import re

    assert re.search(why, note)


def test_a_state_on_one_rank_only_becomes_empty(golden: Path, tmp_path: Path) -> None:
    source = with_state(
        golden, tmp_path / "a", {"mp_rank_00": as_tensor(delayed(1)), "mp_rank_01": None}
    )
    report = resharded(source, tmp_path / "out", tp=4)
    assert all(
        model_of(tmp_path / "out", folder)[STATE] is None for folder in rank_dirs(tmp_path / "out")
    )
    assert any(STATE in text for text in report.dropped)


def test_a_state_that_holds_tensors_becomes_empty(golden: Path, tmp_path: Path) -> None:
    source = with_state(golden, tmp_path / "a", both({"scale_fwd": torch.ones(3)}))
    report = resharded(source, tmp_path / "out", tp=1)
    assert model_of(tmp_path / "out", "mp_rank_00")[STATE] is None
    assert any("contains tensors" in text for text in report.dropped)


def test_torch_dist_takes_what_is_kept(golden: Path, tmp_path: Path) -> None:
    source = with_state(golden, tmp_path / "a", both(io.BytesIO(RECIPE)))
    resharded(source, tmp_path / "dist", "torch_dist", tp=2)
    resharded(tmp_path / "dist", tmp_path / "out", tp=1)
    stream = model_of(tmp_path / "out", "mp_rank_00")[STATE]
    assert stream.getvalue() == RECIPE


PACKED = "decoder.layers.1.mlp.experts.linear_fc1._extra_state"


def grouped(golden: Path, target: Path, case: str, state: Any) -> Path:
    """moe_seq with the names of Transformer Engine's grouped experts, and a state for all experts
    of a rank.
    """

    def change(folder: str, name: str, value: Any) -> Any:
        return value

    settings = {
        "moe_grouped_gemm": True,
        "moe_layer_freq": 1,
        "transformer_impl": "transformer_engine",
    }
    source = rewritten(golden / "mcore_legacy/moe_seq" / case, target, change, args=settings)
    for path in rank_dirs(source).values():
        file = path / "model_optim_rng.pt"
        loaded = torch.load(file, weights_only=False)
        entries: dict[str, Any] = {}
        for name, value in loaded["model"].items():
            before, sep, rest = name.partition("local_experts.")
            number, _, field = rest.partition(".")
            if not sep:
                entries[name] = value
            elif field.endswith("_extra_state"):
                entries[f"{before}{field}"] = state if f"{before}{field}" == PACKED else None
            else:
                entries[f"{before}{field}{number}"] = value
        loaded["model"] = entries
        torch.save(loaded, file)
    return source


@pytest.mark.parametrize(
    "make", [lambda: as_tensor(RECIPE), lambda: io.BytesIO(RECIPE)], ids=["tensor", "stream"]
)
def test_what_is_packed_for_a_ranks_experts_stays_only_with_them(
    golden: Path, tmp_path: Path, make: Any
) -> None:
    source = grouped(golden, tmp_path / "a", "tp1_pp1_ep2", make())
    assert not resharded(source, tmp_path / "same", tp=2, ep=2, etp=2).dropped
    assert model_of(tmp_path / "same", "mp_rank_01_001")[PACKED] is not None
    report = resharded(source, tmp_path / "other", tp=1, ep=4)
    model = model_of(tmp_path / "other", "mp_rank_00_003")
    assert model[PACKED] is None
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight0" in model
    (note,) = report.dropped
    assert PACKED in note and "packed for the experts of EP 2" in note


def test_states_of_single_experts_become_one_for_grouped_ones(golden: Path, tmp_path: Path) -> None:
    source = grouped(golden, tmp_path / "a", "tp1_pp1_ep2", None)
    resharded(source, tmp_path / "dist", "torch_dist", tp=1, ep=2)
    resharded(tmp_path / "dist", tmp_path / "out", tp=1, ep=2)
    ours, theirs = (model_of(root, "mp_rank_00_001") for root in (tmp_path / "out", source))
    # Norms have states since Transformer Engine 1.13, and torch_dist has them for all versions.
    assert {name for name in ours if not name.endswith("norm._extra_state")} == set(theirs)
    assert ours[PACKED] is None


AMAX = "decoder.layers.0.self_attention.linear_qkv.weight_quantizer._amax"


def with_entry(golden: Path, target: Path, name: str, value: Any) -> Path:
    return rewritten(
        golden / "mcore_legacy/dense_gqa/tp2_pp1",
        target,
        lambda _, __, old: old,
        more={name: value},
    )


def test_a_maximum_of_a_whole_tensor_is_replicated(golden: Path, tmp_path: Path) -> None:
    source = with_entry(golden, tmp_path / "a", AMAX, torch.tensor(3.5))
    resharded(source, tmp_path / "out", tp=4)
    assert all(
        model_of(tmp_path / "out", folder)[AMAX] == 3.5 for folder in rank_dirs(tmp_path / "out")
    )


def test_maxima_that_differ_are_found(golden: Path, tmp_path: Path) -> None:
    source = rewritten(
        golden / "mcore_legacy/dense_gqa/tp2_pp1",
        tmp_path / "a",
        lambda _, __, old: old,
        more={AMAX: torch.tensor(1.0)},
    )
    path = rank_dirs(source)["mp_rank_01"] / "model_optim_rng.pt"
    loaded = torch.load(path, weights_only=False)
    loaded["model"][AMAX] = torch.tensor(2.0)
    torch.save(loaded, path)
    with pytest.raises(CorruptError, match="_amax"):
        resharded(source, tmp_path / "out", tp=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (AMAX, torch.ones(128, 1), "per-channel scales of a quantized model"),
        (AMAX.replace("_amax", "_scale"), torch.ones(()), r"quantized models \(ModelOpt\)"),
        ("decoder.layers.0.mlp.linear_fc1.weight_scale_inv", torch.ones(2, 1), "scales of blocks"),
    ],
)
def test_what_is_not_determined_is_refused_by_name(
    golden: Path, tmp_path: Path, name: str, value: torch.Tensor, message: str
) -> None:
    source = with_entry(golden, tmp_path / "a", name, value)
    with pytest.raises(UnsupportedError, match=message):
        resharded(source, tmp_path / "out", tp=1)


class Float8Tensor(torch.Tensor):
    """A parameter of a class of its own, as Transformer Engine's are."""


def test_parameters_of_other_classes_are_refused_by_name(golden: Path, tmp_path: Path) -> None:
    weight = "decoder.layers.0.mlp.linear_fc1.weight"

    def change(folder: str, name: str, value: Any) -> Any:
        return value.as_subclass(Float8Tensor) if name == weight else value

    source = rewritten(golden / "mcore_legacy/dense_gqa/tp2_pp1", tmp_path / "a", change)
    with pytest.raises(UnsupportedError, match=r"Float8Tensor.*not a plain tensor") as caught:
        resharded(source, tmp_path / "out", tp=1)
    assert caught.value.key is not None and caught.value.key.endswith(weight)
