"""Names of rank directories, trackers and destinations: what is there, what should be, and what is
written.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from math import lcm
from pathlib import Path

import pytest

from ckpt_cli.app import main
from core.megatron.model.args import fields_of
from core.megatron.model.topology import Rank, Topology, rank_dir, rank_dirs
from core.opening.open import open_checkpoint
from tests.support.asked import asked
from tests.support.facets import ranks_of
from tests.support.rank_files import assert_same_weights
from tests.support.rank_files import rank_dirs as found_dirs

DENSE = Path("mcore_legacy/dense_gqa")
EXPERTS = Path("mcore_legacy/moe_seq")


def reshard(src: Path, dst: Path, *options: object) -> int:
    return main(
        ["reshard", str(src), str(dst), "--no-optim", "--no-fsync", "-q", *map(str, options)]
    )


def runs() -> list[dict[str, int | str]]:
    """Runs of all sizes at which every rank has a file of its own, with one, two and three
    copies.
    """
    listed: list[dict[str, int | str]] = []
    orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
    for tp, pp, ep, cp, copies, order in product(
        (1, 2, 4, 6), (1, 2), (1, 2, 4, 8), (1, 2), (1, 2, 3), orders
    ):
        for etp in (size for size in (1, 2, tp) if tp % size == 0):
            world = pp * lcm(tp * cp, etp * ep) * copies
            listed.append(
                {"world": world, "tp": tp, "pp": pp, "ep": ep, "etp": etp, "cp": cp, "order": order}
            )
    return listed


def test_written_and_expected_directories_are_those_of_megatrons_ranks() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    questions = runs()
    script = Path(__file__).parents[2] / "megatron/support/megatron_ranks.py"
    answers = asked(script, question=questions)
    n_runs = n_other_order = 0
    for run, answer in zip(questions, answers, strict=True):
        if answer is None:
            continue  # refused by Megatron: dense and expert ranks would be of different stages
        tp, pp, ep, etp = (int(run[name]) for name in ("tp", "pp", "ep", "etp"))
        topology = Topology(tp=tp, pp=pp, ep=ep, etp=etp if ep > 1 else None)
        names = [rank_dir(topology, Rank(t, p, e)) for t, p, e, _, _ in answer]
        ours = {rank_dir(topology, rank) for rank in topology.ranks()}
        assert ours == set(names), f"what {run} asks for is not what is written for it"
        newer = {
            name for name, (*_, dp, edp) in zip(names, answer, strict=True) if dp == 0 or edp == 0
        }
        older = {name for name, (*_, edp) in zip(names, answer, strict=True) if edp == 0}
        folders = [
            set(names)
            for names in rank_dirs(topology, world_size=int(run["world"]), cp=int(run["cp"]))
        ]
        assert newer == folders[0], run
        assert older in folders or ep == 1, run
        n_runs += 1
        n_other_order += run["order"] == "tp-cp-ep-pp-dp" and ep > 1 and pp > 1
    assert n_runs > 500 and n_other_order > 20


def test_one_name_is_read_by_the_arguments(golden: Path, tmp_path: Path) -> None:
    for source, coords in (
        (DENSE / "tp1_pp2", {"pp": 1, "ep": 0}),
        (EXPERTS / "tp1_pp1_ep2", {"pp": 0, "ep": 1}),
    ):
        checkpoint = open_checkpoint(golden / source)
        ranks = ranks_of(checkpoint.catalog)
        (of_second_rank,) = (
            dict(where) for where, (name, _) in ranks.items() if name == "mp_rank_00_001"
        )
        assert of_second_rank["pp"] == coords["pp"] and of_second_rank.get("ep", 0) == coords["ep"]


def test_names_of_other_sizes_are_listed(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(golden / EXPERTS / "tp1_pp2_ep2", broken)
    folder = broken / "iter_0000010"
    (folder / "mp_rank_00_001_001").rename(folder / "mp_rank_00_002")
    assert reshard(broken, tmp_path / "out", "--ep-new", 1) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert "TP1 PP2 EP2, which means 4 rank directories" in err
    assert "mp_rank_00_001_001 is missing and mp_rank_00_002 is unexpected" in err


def test_dense_shards_that_older_megatron_left_out_are_named(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["--tp-new", 4, "--ep-new", 2, "--etp-new", 1, "--pp-new", 1]
    source = golden / EXPERTS / "tp2_pp1"
    assert reshard(source, tmp_path / "a", *wanted) == 0
    names = ["mp_rank_00_000", "mp_rank_01_001", "mp_rank_02_000", "mp_rank_03_001"]
    assert list(found_dirs(tmp_path / "a")) == names
    assert (
        reshard(tmp_path / "a", tmp_path / "back", "--tp-new", 2, "--ep-new", 1, "--etp-new", 2)
        == 0
    )
    assert_same_weights(tmp_path / "back", source)
    for name in names[2:]:
        shutil.rmtree(tmp_path / "a/iter_0000010" / name)
    assert reshard(tmp_path / "a", tmp_path / "b", "--tp-new", 1) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert "no file contains the shards of TP ranks 2, 3" in err and "newer Megatron-LM" in err


def test_ranks_that_would_share_a_file_are_refused(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reshard(golden / EXPERTS / "tp1_pp1", tmp_path / "a", "--ep-new", 2, "--etp-new", 2) == 4
    assert "several Megatron ranks would write the same file" in " ".join(
        capsys.readouterr().err.split()
    )
    dist = ["--to", "torch_dist", "--ep-new", 2, "--etp-new", 2]
    assert reshard(golden / EXPERTS / "tp1_pp1", tmp_path / "b", *dist) == 0


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("ep", "etp", "names"),
    [
        (4, 1, ["00_000", "00_002", "01_001", "01_003"]),
        (2, 1, ["00_000", "01_001"]),
        (4, 2, ["00_000", "00_001", "00_002", "00_003", "01_000", "01_001", "01_002", "01_003"]),
    ],
)
def test_only_pairs_of_ranks_that_exist_are_written(
    golden: Path, tmp_path: Path, ep: int, etp: int, names: list[str]
) -> None:
    source = golden / EXPERTS / "tp1_pp1_ep4"
    assert reshard(source, tmp_path / "a", "--tp-new", 2, "--ep-new", ep, "--etp-new", etp) == 0
    assert list(found_dirs(tmp_path / "a")) == [f"mp_rank_{name}" for name in names]
    assert (
        reshard(tmp_path / "a", tmp_path / "b", "--tp-new", 1, "--ep-new", 4, "--etp-new", 1) == 0
    )
    assert_same_weights(tmp_path / "b", source)


def test_a_world_that_nobody_tells_is_the_smallest(golden: Path) -> None:
    topology = Topology(tp=4, ep=2, etp=1)
    stated, untold = rank_dirs(topology, world_size=4), rank_dirs(topology)
    assert stated == untold
    assert fields_of(open_checkpoint(golden / DENSE / "tp1_pp1").catalog.args)["world_size"] == 1


# --- trackers ---


def test_a_tracker_without_its_iteration_is_named_and_others_are_offered(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    shutil.copytree(golden / DENSE / "tp1_pp1", root)
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    assert reshard(root, tmp_path / "a", "--tp-new", 2) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert (
        "the tracker names iter_0000020, which is missing" in err
        and f"pass one of the iteration directories: {root}/iter_0000010" in err
    )
    assert reshard(root, tmp_path / "b", "--tp-new", 2, "--iteration", 10) == 0
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert reshard(root, tmp_path / "c", "--tp-new", 2) == 0


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_a_release_stays_a_release(golden: Path, tmp_path: Path, to: str) -> None:
    root = tmp_path / "run"
    shutil.copytree(golden / DENSE / "tp1_pp1", root)
    (root / "iter_0000010").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    assert reshard(root, tmp_path / "a", "--tp-new", 2, "--to", to) == 0
    assert (tmp_path / "a/latest_checkpointed_iteration.txt").read_text() == "release"
    assert open_checkpoint(tmp_path / "a").path.name == "release"
    assert reshard(tmp_path / "a", tmp_path / "b", "--tp-new", 4, "--to", "megatron") == 0
    assert sorted(path.name for path in (tmp_path / "b/release").iterdir()) == [
        f"mp_rank_{n:02d}" for n in range(4)
    ]
    assert reshard(root / "release", tmp_path / "c", "--tp-new", 2) == 0
    assert (tmp_path / "c/release/mp_rank_01/model_optim_rng.pt").exists()


def test_iterations_of_eight_digits_widen_the_name(golden: Path, tmp_path: Path) -> None:
    from core.engine.catalog.catalog import TargetCatalog
    from core.formats.megatron import format as megatron
    from core.megatron.reshard.to_ranks import shard
    from tests.megatron.support.megatron_gold import RULES, global_form

    _, source = global_form(golden, "dense_gqa", "tp1_pp1")
    target: TargetCatalog = shard(replace(source, iteration=12345678), Topology(tp=2), rules=RULES)
    assert {image.path.split("/")[0] for image in megatron.lay_out(target)} == {
        "iter_12345678",
        "latest_checkpointed_iteration.txt",
    }
    root = tmp_path / "run"
    shutil.copytree(golden / DENSE / "tp1_pp1", root)
    (root / "iter_0000010").rename(root / "iter_12345678")
    (root / "latest_checkpointed_iteration.txt").write_text("12345678")
    assert open_checkpoint(root).path.name == "iter_12345678"


# --- destinations ---


def test_source_and_existing_destinations_stay_as_they_are(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(golden / DENSE / "tp2_pp1", root)
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for dst, options in (
        (root, []),
        (root, ["--force"]),
        (root / "iter_0000010", ["--force"]),
        (root / "iter_0000010" / "mp_rank_00", ["--force"]),
        (tmp_path, ["--force"]),
        (other, []),
        (other, ["--force"]),
    ):
        assert reshard(root, dst, "--tp-new", 1, *options) == 2, (dst, options)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert (other / "notes.txt").read_text() == "mine"
    assert "ckpt replaces only checkpoints" in capsys.readouterr().err
