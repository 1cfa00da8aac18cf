"""``--metadata-only``: a new directory of hard links, which other software loads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from core.errors import CheckpointingException, UnsupportedError, UsageError
from core.opening.open import open_checkpoint
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, TopologyChange, run

DIST = "mcore_torch_dist/dense_gqa/tp2_pp2_optim"
DCP = "torch_dcp/fsdp2_dp4"


def _same_file(path: Path, other: Path) -> bool:
    return path.stat().st_ino == other.stat().st_ino


def test_another_layout_of_torch_dist_is_links_alone(golden: Path, tmp_path: Path) -> None:
    src = golden / DIST / "iter_0000010"
    job = Job(
        src=golden / DIST,
        dst=tmp_path / "out",
        topology=TopologyChange(tp=4),
        is_reshard=True,
        beside_bytes=1 << 20,  # as with several workers
    )
    with prepare(job := Job(**{**_fields(job), "metadata_only": True})) as prepared:
        assert prepared.plan.read_bytes == 0
    report = run(job)
    folder = tmp_path / "out" / "iter_0000010"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in src.iterdir()
    )
    assert all(_same_file(path, src / path.name) for path in folder.iterdir())
    assert (report.bytes_read, report.bytes_written) == (0, 2)  # the tracker
    assert any("loads at any parallel sizes" in note for note in report.notes)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert report.n_tensors == len(checkpoint.catalog.tensors)
    checkpoint.store.close()


def _fields(job: Job) -> dict[str, object]:
    return {name: getattr(job, name) for name in Job.__dataclass_fields__}


def test_some_entries_of_dcp_under_new_names_are_what_torch_loads(
    golden: Path, tmp_path: Path
) -> None:
    report = run(
        Job(
            src=golden / DCP,
            dst=tmp_path / "out",
            metadata_only=True,
            optim="drop",
            rename=((r"^app\.model\.", "m."),),
        )
    )
    assert any(line.startswith("optimizer (") for line in report.dropped)
    dcp_to_torch_save(golden / DCP, tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=False)["app"]["model"]
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    names = [key for key in metadata.state_dict_metadata if key.startswith("m.")]
    assert {name.removeprefix("m.") for name in names} == set(everything)
    assert not any("exp_avg" in key for key in metadata.state_dict_metadata)
    state = {name: torch.zeros_like(everything[name.removeprefix("m.")]) for name in names}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    for name, tensor in state.items():
        assert torch.equal(tensor, everything[name.removeprefix("m.")]), name
    files = [path for path in (tmp_path / "out").iterdir() if path.suffix == ".distcp"]
    assert files
    assert all(_same_file(path, golden / DCP / path.name) for path in files)


@pytest.mark.parametrize(
    ("case", "options", "error", "message"),
    [
        (
            DCP,
            {"dtype": ((None, "float32"),)},
            UsageError,
            "--dtype has no effect: --metadata-only does not",
        ),
        (DCP, {"verify": True}, UsageError, "--verify has no effect: --metadata-only does not"),
        (DIST, {"optim": "drop"}, UsageError, "--no-optim has no effect: --metadata-only does not"),
        (
            DIST,
            {"on_replica_mismatch": "first"},
            UsageError,
            "--on-replica-mismatch has no effect: --metadata-only does not",
        ),
        (
            DIST,
            {"drop_unknown": True},
            UsageError,
            "--drop-unknown has no effect: --metadata-only does not",
        ),
        (
            DIST,
            {"rules": Path("rules.toml")},
            UsageError,
            "--rules has no effect: --metadata-only does not",
        ),
        (
            DIST,
            {"topology": TopologyChange(source={"tp": 4})},
            UsageError,
            "--tp 4 does not match the checkpoint",
        ),
        (DIST, {"topology": TopologyChange(tp=3)}, CheckpointingException, "3"),
        (
            DIST,
            {"topology": TopologyChange(pp=3)},
            CheckpointingException,
            "cannot be divided evenly among 3 pipeline stages",
        ),
        (
            DCP,
            {"topology": TopologyChange(tp=2)},
            UsageError,
            "--tp-new has no effect: --metadata-only does not",
        ),
        (
            DCP,
            {"drop_unknown": True},
            UsageError,
            "--drop-unknown has no effect: --metadata-only does not",
        ),
        (DIST, {"to": "dcp"}, UnsupportedError, "requires SRC and DST to have the same format"),
        ("mcore_legacy/dense_gqa/tp1_pp1", {}, UnsupportedError, "but SRC is megatron"),
        (
            "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
            {"topology": TopologyChange(tp=1)},
            UnsupportedError,
            "loads only at the sizes",
        ),
    ],
)
def test_what_needs_new_data_is_refused(
    golden: Path,
    tmp_path: Path,
    case: str,
    options: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        run(Job(src=golden / case, dst=tmp_path / "out", metadata_only=True, **options))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_another_file_system_is_told_apart(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UnsupportedError, match=r"cannot create a hard link.*omit --metadata-only"):
        run(Job(src=golden / DCP, dst=tmp_path / "out", metadata_only=True))
    assert not list(tmp_path.iterdir())
