"""core.megatron.optimizer.flat.write: distrib_optim.pt as Megatron would have saved it."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.facets import RankFacts
from core.errors import UnsupportedError
from core.files.store import MemoryStore
from core.formats.megatron import format as megatron
from core.megatron.model.args import fields_of
from core.megatron.model.topology import Topology, rank_dir
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.unshard import unshard
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.optimizer.flat.test_read import DENSE, EXPERTS, TIED, assert_states
from tests.megatron.support.flat_files import STATES, Run, members, with_optimizer
from tests.megatron.support.megatron_gold import RULES, filled
from tests.megatron.support.synthetic import Model
from tests.support.facets import facet_of, ranks_of
from tests.support.rank_files import (
    MODEL_FILE,
    assert_same_bits,
    assert_same_weights,
    load_rank_file,
    rank_dirs,
)

FILE = "distrib_optim.pt"
SOURCES = [
    ("mcore_legacy", "tp1_pp1_dp2_distopt"),
    ("mcore_legacy", "tp2_pp1_dp2_distopt"),
    ("mcore_torch_dist", "tp2_pp1_dp2_distopt_dpreshardable"),
    ("mcore_torch_dist", "tp2_pp1_dp2_distopt_fullyreshardable"),
    ("mcore0121_torch_dist", "tp2_pp1_dp2_distopt_dp_zero_gather_scatter"),
    ("mcore0121_torch_dist", "tp2_pp1_dp2_distopt_fully_sharded_model_space"),
    ("mcore0121_zarr", "tp2_pp1_dp2_distopt_fully_sharded_model_space"),
]


def assert_same_tree(actual: Any, wanted: Any, name: str) -> None:
    """Equal keys, in one order, values and tensors."""
    assert type(actual) is type(wanted), name
    if isinstance(wanted, torch.Tensor):
        assert_same_bits(actual, wanted, name)
    elif isinstance(wanted, dict):
        assert list(actual) == list(wanted), name
        for key in wanted:
            assert_same_tree(actual[key], wanted[key], f"{name}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(actual) == len(wanted), name
        for number, (item, other) in enumerate(zip(actual, wanted, strict=True)):
            assert_same_tree(item, other, f"{name}.{number}")
    else:
        assert actual == wanted, name


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("family", "source"), SOURCES, ids=["-".join(source) for source in SOURCES]
)
@pytest.mark.parametrize("target", ["tp1_pp1_dp2_distopt", "tp2_pp1_dp2_distopt"])
def test_files_equal_those_that_megatron_saved(
    golden: Path, tmp_path: Path, family: str, source: str, target: str
) -> None:
    change = TopologyChange(tp=int(target[2]), pp=1, vpp=1)
    src = golden / family / "dense_gqa" / source
    run(
        Job(
            src=src,
            dst=tmp_path / "out",
            to="megatron",
            topology=change,
            is_reshard=True,
            fsync=False,
        )
    )
    wanted = golden / "mcore_legacy" / "dense_gqa" / target
    assert_same_weights(tmp_path / "out", wanted)
    for name, path in rank_dirs(wanted).items():
        rank_path = rank_dirs(tmp_path / "out")[name]
        assert zipfile.ZipFile(rank_path / FILE).testzip() is None
        assert_same_tree(torch.load(rank_path / FILE), torch.load(path / FILE), name)
        ours, theirs = (
            load_rank_file(folder / MODEL_FILE)["optimizer"] for folder in (rank_path, path)
        )
        if family == "mcore_legacy":
            assert_same_tree(ours, theirs, name)
        groups = [
            [group["wd_mult"] for group in content["optimizer"]["param_groups"]]
            for content in (ours, theirs)
        ]
        assert groups == [[1.0, 0.0], [1.0, 0.0]]
        assert list(ours) == list(theirs)


def written(target: TargetCatalog, source: Catalog, store: MemoryStore) -> MemoryStore:
    """The iteration's files of a rank catalog that is to be written."""
    arrays = {name: data.tobytes() for name, data in filled(target, source, store).items()}  # type: ignore[arg-type]
    contents: dict[str, bytes | bytearray] = {}
    for image in megatron.lay_out(target):
        content = bytearray(image.size)
        for placed in image.arrays:
            content[placed.offset : placed.offset + placed.array.n_bytes] = arrays[
                placed.array.name
            ]
        for offset, data in image.literals(lambda name: zlib.crc32(arrays[name])):
            content[offset : offset + len(data)] = data
        contents[image.path.partition("/")[2] or image.path] = content
    return MemoryStore(contents)


CHANGES = [
    (DENSE, Topology(2, 2), Topology(1, 2, vpp=2)),
    (DENSE, Topology(1, 1), Topology(3, 4)),
    (TIED, Topology(1, 2), Topology(2, 1)),
    (TIED, Topology(1, 1), Topology(1, 4)),
    (EXPERTS, Topology(1, 1), Topology(1, 1, ep=2)),
    (EXPERTS, Topology(1, 1, ep=2), Topology(1, 1)),
    (EXPERTS, Topology(2, 2, ep=2, etp=1), Topology(1, 1, ep=4)),
    (EXPERTS, Topology(1, 1, ep=4), Topology(2, 2, ep=2, etp=1)),
    (EXPERTS, Topology(1, 1, ep=4), Topology(3, 1, ep=2, etp=1)),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "before", "after"), CHANGES)
@pytest.mark.parametrize("run_", [Run(), Run(bucket_size=500)])
def test_buffers_are_those_of_a_run_at_the_new_sizes(
    model: Model, before: Topology, after: Topology, run_: Run
) -> None:
    store, catalog = with_optimizer(model, before, run_)
    source = unshard(catalog, rules=RULES, store=store)
    target = shard(source, after, rules=RULES)
    saved_store = written(target, source, store)
    again = megatron.read(saved_store)
    assert_states(model, saved_store, unshard(again, rules=RULES, store=saved_store))
    holders: dict[object, set[str]] = {}
    for rank in after.ranks():
        folder = rank_dir(after, rank)
        if not saved_store.exists(f"{folder}/{FILE}"):
            continue
        content = torch.load(_file(saved_store, f"{folder}/{FILE}"))
        ours = content if isinstance(content, list) else [content]
        wanted = members(model, rank, after, run_)
        assert len(ours) == len(wanted)
        for number, (member, buffers) in enumerate(zip(ours, wanted, strict=True)):
            if member is None:
                continue
            key = (number, rank.pp, (rank.etp, rank.ep) if number else rank.tp)
            holders.setdefault(key, set()).add(folder)
            assert list(member) == ["buckets_coalesced", *range(len(buffers))]
            for n, buckets in enumerate(buffers):
                ((dtypes, entry),) = member[n].items()
                assert dtypes == (torch.float32, torch.float32)
                flat = np.nan_to_num(np.concatenate(buckets))
                assert entry.pop("numel_unpadded") == flat.size
                for state, tensor in entry.items():
                    assert (tensor.numpy() == flat * np.float32(STATES[state])).all(), (
                        folder,
                        number,
                        n,
                        state,
                    )
    n_expert = after.pp * after.ep * after.expert_tp if after.ep > 1 else 0
    assert len(holders) == after.pp * after.tp + n_expert
    assert all(len(folders) == 1 for folders in holders.values())
    for _, root in ranks_of(again).values():
        entry = root["optimizer"]
        entries = entry if isinstance(entry, list) else [entry]
        assert len(entries) == (2 if after.ep > 1 else 1)
        flags = [
            [group["is_expert_parallel"] for group in entry_of_rank["optimizer"]["param_groups"]]
            for entry_of_rank in entries
        ]
        assert flags[0] == [False, False] and flags[1:] in ([], [[True]])
        for rank_content in entries:
            scale = again.fragments(rank_content["grad_scaler"]["scale"].key)[0].array
            assert scale is not None
            assert np.frombuffer(
                saved_store.read(scale.extent.file, scale.extent.offset, 4), np.float32
            ) == [1024]
            assert rank_content["grad_scaler"]["growth_tracker"] == 3


def _file(store: MemoryStore, name: str) -> Any:
    import io

    data = bytes(store.contents[name])
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    return io.BytesIO(data)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (
            {"overlap_grad_reduce": None, "ddp_bucket_size": 100},
            "do not specify whether the optimizer's buffers are",
        ),
        (
            {"overlap_param_gather_with_optimizer_step": True},
            "overlap_param_gather_with_optimizer_step",
        ),
        ({"use_megatron_fsdp": True}, "Megatron-FSDP"),
    ],
)
def test_targets_whose_buffers_are_not_determined_are_refused(
    args: dict[str, object], match: str
) -> None:
    store, catalog = with_optimizer(DENSE, Topology(1, 1), Run())
    source = unshard(catalog, rules=RULES, store=store)
    fields_of(source.args).update(args)
    with pytest.raises(UnsupportedError, match=match):
        shard(source, Topology(2, 1), rules=RULES)


def test_unsaid_buckets_do_not_matter_where_there_would_be_one_anyway() -> None:
    store, catalog = with_optimizer(
        DENSE, Topology(1, 1), Run(), args={"overlap_grad_reduce": None}
    )
    source = unshard(catalog, rules=RULES, store=store)
    assert facet_of(shard(source, Topology(2, 1), rules=RULES), RankFacts).optim_files


def test_states_without_a_place_are_refused() -> None:
    store, catalog = with_optimizer(DENSE, Topology(1, 1), Run())
    source = unshard(catalog, rules=RULES, store=store)
    key = "optimizer.state.exp_avg.output_layer.weight"
    narrow = replace(
        source, tensors={**source.tensors, key: replace(source.tensors[key], dtype="bfloat16")}
    )
    with pytest.raises(UnsupportedError, match="the state is bfloat16"):
        shard(narrow, Topology(2, 1), rules=RULES)
