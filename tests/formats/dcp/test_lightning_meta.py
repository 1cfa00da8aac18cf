"""Lightning's meta.pt beside a DCP checkpoint: its entries are read, and written to a meta.pt
again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from core.errors import TruncatedError, UnsafeError, UsageError
from core.opening.open import open_checkpoint
from core.verbs.checks.check import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.broken import cut

SOURCE = "lightning/model_parallel_dp2.ckpt"
ENTRIES = [
    "callbacks",
    "epoch",
    "global_step",
    "hparams_name",
    "hyper_parameters",
    "loops",
    "lr_schedulers",
]


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    """A writable copy."""
    return Path(shutil.copytree(golden / SOURCE, tmp_path / "step.ckpt"))


def assert_same(ours: Any, theirs: Any) -> None:
    """The same tree: types, keys, values, tensors bit for bit."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for item, other in zip(ours, theirs, strict=True):
            assert_same(item, other)
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def consolidated(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """What Lightning's ``_load_distributed_checkpoint`` gives: DCP, then the entries of meta.pt."""
    dcp_to_torch_save(folder, tmp_path / "dcp.pt")
    state: dict[str, Any] = torch.load(tmp_path / "dcp.pt", weights_only=True)
    return state | torch.load(folder / "meta.pt", weights_only=True)


def as_trainer_file(state: dict[str, Any]) -> dict[str, Any]:
    """Rename entries as Lightning's ``_format_checkpoint`` does, which knows only ``model``."""
    numbers = range(sum(name.startswith("optimizer_") for name in state))
    states = [state.pop(f"optimizer_{number}") for number in numbers]
    weights = state.pop("model" if "model" in state else "state_dict")
    return {**state, "state_dict": weights, "optimizer_states": states}


def test_one_file_holds_what_lightnings_own_tool_puts_into_it(golden: Path, tmp_path: Path) -> None:
    run(Job(src=golden / SOURCE, dst=tmp_path / "out.pt", to="torch", fsync=False))
    state = torch.load(golden / "oracle/lightning/consolidated.pt", weights_only=True)
    theirs = as_trainer_file(state)
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), theirs)
    assert theirs["hyper_parameters"] == {"width": 16, "dropout": 0.5}


def test_dcp_has_its_meta_again_so_that_lightnings_tool_works_on_it(
    golden: Path, tmp_path: Path
) -> None:
    report = run(Job(src=golden / SOURCE, dst=tmp_path / "out", to="dcp", fsync=False))
    assert report.dropped == ()
    theirs = torch.load(golden / "oracle/lightning/consolidated.pt", weights_only=True)
    assert_same(consolidated(tmp_path / "out", tmp_path), theirs)
    metas = [
        torch.load(path / "meta.pt", weights_only=True)
        for path in (tmp_path / "out", golden / SOURCE)
    ]
    assert_same(*metas)
    assert validate(tmp_path / "out", level=Level.DEEP).worst in (None, Severity.NOTE)


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_entries_survive_any_format(golden: Path, tmp_path: Path, to: str) -> None:
    run(Job(src=golden / SOURCE, dst=tmp_path / "there", to=to, fsync=False))
    run(Job(src=tmp_path / "there", dst=tmp_path / "back.pt", to="torch", fsync=False))
    theirs = torch.load(golden / "oracle/lightning/consolidated.pt", weights_only=True)
    if to == "torch":
        theirs = as_trainer_file(theirs)
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), theirs)


def test_the_step_is_the_iteration(golden: Path) -> None:
    assert open_checkpoint(golden / SOURCE).iteration == 2


def test_entries_are_left_out_and_renamed_like_others(golden: Path, tmp_path: Path) -> None:
    exclude = ("callbacks*", "loops*")
    run(Job(src=golden / SOURCE, dst=tmp_path / "out", to="dcp", exclude=exclude, fsync=False))
    meta = torch.load(tmp_path / "out/meta.pt", weights_only=True)
    assert not {"callbacks", "loops"} & meta.keys()
    assert meta["hyper_parameters"]["dropout"] == 0.5
    run(
        Job(
            src=golden / SOURCE,
            dst=tmp_path / "model",
            to="dcp",
            include=("state_dict.*",),
            fsync=False,
        )
    )
    assert not (tmp_path / "model/meta.pt").exists()


def test_links_keep_meta_as_it_is(golden: Path, copy: Path, tmp_path: Path) -> None:
    run(
        Job(
            src=copy,
            dst=tmp_path / "linked",
            metadata_only=True,
            exclude=("optimizer_0*",),
            fsync=False,
        )
    )
    assert os.path.samefile(tmp_path / "linked/meta.pt", copy / "meta.pt")
    assert sorted(consolidated(tmp_path / "linked", tmp_path)) == sorted(
        [*ENTRIES, "pytorch-lightning_version", "state_dict"]
    )
    with pytest.raises(UsageError, match=r"links meta\.pt unchanged"):
        run(
            Job(
                src=copy,
                dst=tmp_path / "other",
                metadata_only=True,
                exclude=("callbacks*",),
                fsync=False,
            )
        )


def test_a_damaged_meta_is_found_and_not_passed_over(copy: Path, tmp_path: Path) -> None:
    cut(copy / "meta.pt")
    errors = [finding for finding in validate(copy).findings if finding.severity == Severity.ERROR]
    assert [(error.code, error.file) for error in errors] == [("CK103", "meta.pt")]
    with pytest.raises(TruncatedError):
        run(Job(src=copy, dst=tmp_path / "out", to="torch", fsync=False))


class _Call:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_a_call_in_meta_is_refused(copy: Path, tmp_path: Path) -> None:
    torch.save({"epoch": _Call()}, copy / "meta.pt")
    for to in ("dcp", "torch"):
        with pytest.raises(UnsafeError):
            run(Job(src=copy, dst=tmp_path / to, to=to, fsync=False))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"state_dict": 1}, "has an entry 'state_dict'"),
        ([1, 2], "not a dict"),
        ({1: 2}, "not a dict"),
    ],
)
def test_a_meta_that_is_not_lightnings_is_left_alone_and_listed(
    copy: Path, tmp_path: Path, content: object, why: str
) -> None:
    torch.save(content, copy / "meta.pt")
    report = run(Job(src=copy, dst=tmp_path / "out", to="dcp", fsync=False))
    assert any(why in note for note in report.notes)
    assert report.dropped == ("other files in the directory: meta.pt",)


def test_a_text_called_meta_is_left_alone(copy: Path, tmp_path: Path) -> None:
    (copy / "meta.pt").write_text("notes of mine")
    report = run(Job(src=copy, dst=tmp_path / "out", to="dcp", fsync=False))
    assert report.dropped == ("other files in the directory: meta.pt",)


def test_a_best_value_that_is_infinite_at_the_start_is_no_error(golden: Path) -> None:
    findings = [
        finding
        for finding in validate(golden / SOURCE, level=Level.DEEP).findings
        if finding.code == "CK711"
    ]
    assert [finding.severity for finding in findings] == [Severity.NOTE]
