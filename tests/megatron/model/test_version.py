"""Optimizer files for a megatron-core that is not the source's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from core.engine.catalog.optimizer_keys import Optimizer, ParamGroup
from core.errors import UnsupportedError, UsageError
from core.megatron.model.topology import Topology
from core.megatron.model.version import parse_version
from core.megatron.optimizer.target_groups import TargetGroups, target_groups
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.megatron.support.reshard_targets import target_of
from tests.megatron.support.synthetic import Model

DENSE = Model()
WD = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
NO_WD = {**WD, "wd_mult": 0.0}
NEW_WD, NEW_NO_WD = {**WD, "default_config": True}, {**NO_WD, "default_config": True}


def groups_for(
    version: str | None, *groups: tuple[Mapping[str, object], tuple[str, ...]]
) -> TargetGroups:
    optimizer = Optimizer(
        "float16", tuple(ParamGroup(settings, names) for settings, names in groups)
    )
    names = {name: 2 for _, params in groups for name in params}
    args = DENSE.args(Topology())
    asked = None if version is None else parse_version(version)
    return target_groups(target_of(optimizer, args, topology=Topology(), version=asked), names)


@pytest.mark.parametrize(
    ("version", "as_needed", "norms_only"),
    [
        (None, [0, 1], [0, 1]),
        ("0.12", [0, 1], [0]),
        ("0.14.0", [0, 1], [0, 1]),
        ("0.16.1", [1, 0], [1, 0]),
    ],
)
def test_a_stage_lists_the_groups_that_the_version_lists(
    version: str | None, as_needed: list[int], norms_only: list[int]
) -> None:
    group_order = groups_for(version, (NO_WD, ("norm",)), (WD, ("matrix",)))
    number = {settings["wd_mult"]: i for i, settings in enumerate(group_order.settings)}
    numbers = [number[0.0], number[1.0]]  # of norms, of matrices
    assert group_order.order(["norm", "matrix"]) == [numbers[i] for i in as_needed]
    assert group_order.order(["norm"]) == [numbers[i] for i in norms_only]
    is_new = version == "0.16.1"
    assert group_order.order(["matrix", "norm"]) == [numbers[1], numbers[0]]
    assert [settings.get("default_config") for settings in group_order.settings] == [
        True if is_new else None
    ] * 2


def test_groups_of_new_files_lose_what_old_versions_do_not_have() -> None:
    group_order = groups_for("0.12", (NEW_WD, ("matrix",)), (NEW_NO_WD, ("norm",)))
    assert list(group_order.settings) == [WD, NO_WD]
    assert group_order.order(["norm", "matrix"]) == [1, 0]
    group_order = groups_for("0.16", (NEW_WD, ("matrix",)), (NEW_NO_WD, ("norm",)))
    assert list(group_order.settings) == [NEW_WD, NEW_NO_WD]


def test_groups_that_a_version_describes_otherwise_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="have their own learning rate"):
        groups_for("0.16", (WD, ("a",)), ({**WD, "is_decoupled_lr": True}, ("b",)))
    with pytest.raises(UnsupportedError, match="have their own learning rate"):
        groups_for(
            "0.15", (NEW_WD, ("a",)), ({**NEW_WD, "default_config": False, "max_lr": 1.0}, ("b",))
        )
    with pytest.raises(UnsupportedError, match="lack lr_mult and is_decoupled_lr"):
        groups_for("0.16", ({"wd_mult": 1.0, "is_expert_parallel": False}, ("a",)))
    with pytest.raises(UnsupportedError, match="their order in megatron-core 0.16 is unknown"):
        groups_for("0.16", (WD, ("a",)), ({**WD, "eps": 1.0}, ("b",)))


def test_sizes_that_a_version_cannot_run_are_refused() -> None:
    for version in ("0.12", "0.15"):
        with pytest.raises(UnsupportedError, match="has only 2 query groups"):
            parse_version(version).check_sizes(tp=4, n_groups=2, has_layout=False)
        parse_version(version).check_sizes(tp=2, n_groups=2, has_layout=False)
    parse_version("0.16").check_sizes(tp=4, n_groups=2, has_layout=True)
    with pytest.raises(UnsupportedError, match="does not support pipeline_model_parallel_layout"):
        parse_version("0.12").check_sizes(tp=1, n_groups=2, has_layout=True)


@pytest.mark.parametrize("text", ["", "16", "0.16rc", "v0.16", "0.11", "0.16.1.2"])
def test_what_is_no_known_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--megatron-version"):
        parse_version(text)


def test_the_version_is_refused_where_it_decides_nothing(golden: Path, tmp_path: Path) -> None:
    version, src = parse_version("0.16"), golden / "mcore_legacy" / "dense_gqa" / "tp1_pp1"
    with pytest.raises(UsageError, match="--megatron-version has no effect"):
        run(
            Job(
                src=src,
                dst=tmp_path / "out",
                to="torch_dist",
                topology=TopologyChange(tp=1),
                megatron_version=version,
                fsync=False,
            )
        )
