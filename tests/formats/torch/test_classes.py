"""A torch file keeps the classes of its objects through a conversion; --weights-only sets them
aside.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.errors import UnsafeError, UsageError
from core.formats.torch.weights_only import ASIDE_KEY
from core.verbs.convert.job import Report
from core.verbs.convert.run import Job, run


class Config:
    """A class of the training script, which no package has."""

    def __init__(self, width: int) -> None:
        self.width = width


def converted(src: Path, dst: Path, to: str = "torch", **options: Any) -> Report:
    return run(Job(src=src, dst=dst, to=to, fsync=False, **options))


def training_state() -> dict[str, Any]:
    """What a training loop in plain PyTorch saves."""
    return {
        "model": {"w": torch.ones(2, 3)},
        "np_rng": np.random.RandomState(7).get_state(),
        "py_rng": random.Random(7).getstate(),
        "best": np.float64(0.5),
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("runs/1")),
        "counts": collections.defaultdict(int, a=1),
        "history": [np.float32(1.5), np.float32(2.5)],
        "mask": np.arange(6).reshape(2, 3),
        "begun": datetime.datetime(2026, 1, 2, 3, 4),
        "config": Config(64),
    }


REFUSED = ("np_rng", "best", "args", "counts", "history", "mask", "begun", "config")


def test_objects_of_a_torch_file_stay_what_they_were_and_are_named(tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "a.pt")
    report = converted(tmp_path / "a.pt", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=False)
    assert list(loaded) == list(state)
    np.random.RandomState(0).set_state(loaded["np_rng"])
    random.Random(0).setstate(loaded["py_rng"])
    assert type(loaded["best"]) is np.float64 and loaded["best"] == 0.5
    assert loaded["args"] == state["args"] and loaded["counts"] == state["counts"]
    assert loaded["counts"].default_factory is int
    assert loaded["history"] == state["history"] and loaded["begun"] == state["begun"]
    assert np.array_equal(loaded["mask"], state["mask"]) and loaded["config"].width == 64
    (note,) = report.notes
    assert (
        all(name in note for name in REFUSED)
        and "numpy.ndarray" in note
        and "argparse.Namespace" in note
    )
    assert "py_rng" not in note, "plain tuples are accepted"
    assert "weights_only=False" not in note


def test_weights_only_sets_objects_aside_and_names_them(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "a.pt")
    report = converted(tmp_path / "a.pt", tmp_path / "b.pt", weights_only=True)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert list(loaded) == ["model", "py_rng", "counts", ASIDE_KEY] and loaded["counts"] == {"a": 1}
    (note,) = report.notes
    assert "set aside" in note and all(name in note for name in REFUSED)


def test_a_file_that_loads_with_weights_only_still_does_after_a_conversion(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.pt", weights_only=True)
    report = converted(tmp_path / "b.pt", tmp_path / "c.pt")
    assert (tmp_path / "c.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert any("set aside" in note for note in report.notes)
    plain = {
        "w": torch.ones(2),
        "size": torch.Size((2,)),
        "kind": torch.float16,
        "device": torch.device("cpu"),
    }
    torch.save(plain, tmp_path / "plain.pt")
    assert converted(tmp_path / "plain.pt", tmp_path / "same.pt").notes == ()
    assert torch.load(tmp_path / "same.pt", weights_only=True)["size"] == torch.Size((2,))


def test_objects_of_dcp_stay_what_they_were(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "args": argparse.Namespace(lr=0.1), "best": np.float64(0.5)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    report = converted(tmp_path / "a", tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=False)["args"] == argparse.Namespace(lr=0.1)
    assert "args (argparse.Namespace)" in report.notes[0]
    converted(tmp_path / "a", tmp_path / "c.pt", weights_only=True)
    assert list(torch.load(tmp_path / "c.pt", weights_only=True)) == ["w", ASIDE_KEY]


def test_objects_in_a_common_state_stay_what_they_were(tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b", "torch_dist")
    common = torch.load(tmp_path / "b" / "common.pt", weights_only=False)
    assert (
        common["args"] == state["args"]
        and type(common["best"]) is np.float64
        and common["config"].width == 64
    )


def test_a_dcp_names_what_it_sets_aside(golden: Path, tmp_path: Path) -> None:
    """torch imports the classes that a DCP's objects name, so Megatron's cannot be loaded without
    Megatron.
    """
    report = converted(golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "b", "dcp")
    (note,) = [note for note in report.notes if "set aside" in note]
    assert "needs megatron, " in note and note.endswith(": args (argparse.Namespace)")


def test_megatrons_arguments_are_set_aside_and_named(golden: Path, tmp_path: Path) -> None:
    report = converted(golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "b.pt")
    assert ASIDE_KEY in torch.load(tmp_path / "b.pt", weights_only=True)
    assert any("set aside" in note and "args (argparse.Namespace)" in note for note in report.notes)


@pytest.mark.parametrize(
    "root",
    [
        torch.ones(2),
        [torch.ones(2), 5],
        (torch.ones(2), {"a": torch.zeros(3)}),
        5,
        [],
        np.arange(3),
        Config(3),
    ],
    ids=["tensor", "list", "tuple", "int", "empty list", "array", "object"],
)
def test_the_root_keeps_its_type(root: object, tmp_path: Path) -> None:
    torch.save(root, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=False)
    assert type(loaded) is type(root)
    if isinstance(root, (list, tuple)) and root:
        assert torch.equal(loaded[0], root[0])


def test_an_object_that_would_run_code_is_refused_all_the_same(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            import os

            return os.system, ("true",)

    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "a.pt")
    for options in ({}, {"weights_only": True}):
        with pytest.raises(UnsafeError):
            converted(tmp_path / "a.pt", tmp_path / "b.pt", **options)


def test_weights_only_is_refused_where_no_torch_file_is_written(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="--weights-only has no effect"):
        converted(tmp_path / "a.pt", tmp_path / "b", "dcp", weights_only=True)


def lightning_file() -> dict[str, Any]:
    """A checkpoint with the entries of Lightning 2.6, whose ``save_hyperparameters`` collected
    numpy scalars.
    """
    return {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": collections.OrderedDict(
            {"net.weight": torch.ones(2, 4), "net.bias": torch.zeros(2)}
        ),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {},
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [{"params": [0, 1]}]}
        ],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": np.int64(4), "dropout": np.float64(0.5)},
    }


def test_hyper_parameters_of_lightning_stay_numpy_scalars(tmp_path: Path) -> None:
    torch.save(lightning_file(), tmp_path / "last.ckpt")
    report = converted(tmp_path / "last.ckpt", tmp_path / "out.ckpt")
    hyper_parameters = torch.load(tmp_path / "out.ckpt", weights_only=False)["hyper_parameters"]
    assert (
        hyper_parameters == {"width": 4, "dropout": 0.5}
        and type(hyper_parameters["dropout"]) is np.float64
    )
    assert any("hyper_parameters.dropout" in note for note in report.notes)


def test_a_pickle_with_kept_objects_is_read_by_this_project_as_before(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.pt")
    converted(tmp_path / "b.pt", tmp_path / "c.pt")
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "b.pt", weights_only=True)
