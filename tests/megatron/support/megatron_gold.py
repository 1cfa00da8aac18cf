"""Golden Megatron checkpoints for the tests of layouts: reading them, and the oracle beside
them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from safetensors import safe_open

from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.files.store import LocalStore
from core.formats.dcp import torch_dist
from core.formats.megatron import format as megatron
from core.megatron.model.topology import Topology
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.objects import loaded
from tests.support.materialize import Bytes, array_bytes, tensor_bytes

RULES = load_rules()

DENSE = {
    "dense_gqa": ("tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp2", "tp4_pp1"),
    "dense_gelu": ("tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp2", "tp4_pp1"),
}
VIRTUAL = ("tp1_pp2_vpp2", "tp2_pp2_vpp2")
EXPERTS = {
    "moe_seq": (
        "tp1_pp1",
        "tp1_pp1_ep2",
        "tp1_pp1_ep4",
        "tp1_pp2_ep2",
        "tp2_pp1",
        "tp2_pp1_ep2",
        "tp2_pp1_ep2_etp1",
    ),
}
GROUPED = ("tp1_pp1", "tp2_pp1_ep2")
"""Layouts of moe_grouped: the weights of moe_seq as legacy grouped experts."""
VOCAB = {"dense_gqa": 300, "dense_gelu": 600, "moe_seq": 256}


def topology(case: str) -> Topology:
    """The sizes that a case's name states."""
    return Topology(
        **{name: int(size) for name, size in re.findall(r"(?:^|_)(tp|pp|vpp|ep|etp)(\d+)", case)}
    )


@cache
def rank_files(golden: Path, model: str, case: str) -> tuple[LocalStore, Catalog]:
    """Store and rank catalog of a case."""
    family = "mcore0121_legacy" if model == "moe_grouped" else "mcore_legacy"
    store = LocalStore(golden / family / model / case / "iter_0000010")
    return store, megatron.read(store)


@cache
def dist_files(golden: Path, family: str, model: str, case: str) -> tuple[LocalStore, Catalog]:
    """Store and catalog of a torch_dist case, its objects loaded."""
    store = LocalStore(golden / family / model / case / "iter_0000010")
    return store, loaded(torch_dist.read(store), store)


@cache
def global_form(
    golden: Path, model: str, case: str, **options: object
) -> tuple[LocalStore, Catalog]:
    """Store and global catalog of a case."""
    store, catalog = rank_files(golden, model, case)
    return store, unshard(catalog, rules=RULES, **options)  # type: ignore[arg-type]


def mapping(golden: Path, case: str) -> list[dict[str, object]]:
    """What Megatron recorded of every rank's tensors, one row per piece."""
    record = json.loads((golden / "oracle" / "mapping" / f"mcore_legacy__{case}.json").read_text())
    return [
        {**row, "dir": str(rank["file"]).split("/")[1], "tp": rank["tp"]}
        for rank in record["ranks"]
        for row in rank["tensors"]
    ]


@cache
def oracle(golden: Path, model: str) -> dict[str, Bytes]:
    """The true global tensors under their fused names."""
    with safe_open(golden / "oracle" / model / "global.safetensors", framework="pt") as file:
        return {key: _bytes(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118


def _bytes(tensor: object) -> Bytes:
    import torch

    assert isinstance(tensor, torch.Tensor)
    data: Bytes = (
        tensor.contiguous().view(torch.uint8).numpy().reshape(*tensor.shape, tensor.element_size())
    )
    return data


def fused(name: str) -> str:
    """A global name as the oracle has it."""
    layer = RULES.layer_of(name)
    fused_name = name if layer is None else str(replace(layer, sub=RULES.fused(layer.sub)))
    return fused_name.replace(".local_experts.", ".")


def filled(target: TargetCatalog, source: Catalog, store: LocalStore) -> dict[str, Bytes]:
    """The arrays of a target catalog, by the slow way: every region has exactly one source, or is
    zero by rule.
    """
    arrays: dict[str, Bytes] = {}
    masks: dict[str, np.ndarray] = {}
    for key, tensor in target.all_tensors():
        have = tensor_bytes(source, store, key)
        values = np.zeros((*tensor.shape, have.shape[-1]), np.uint8)
        covered = np.zeros(tensor.shape, bool)
        common = tuple(slice(0, min(a, b)) for a, b in zip(tensor.shape, have.shape, strict=False))
        values[common] = have[common]
        covered[common] = True
        assert covered.all() != tensor.flexible, f"{key} has elements without a source, or padding"
        for fragment in target.fragments(key):
            array = fragment.array
            assert array is not None
            data = arrays.setdefault(array.name, np.zeros((*array.shape, have.shape[-1]), np.uint8))
            mask = masks.setdefault(array.name, np.zeros(array.shape, bool))
            box = fragment.box
            region = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            place = tuple(slice(o, o + n) for o, n in zip(fragment.at, box.shape, strict=True))
            assert not mask[place].any(), f"{array.name} is written twice"
            data[place] = values[region]
            mask[place] = True
    for name, mask in masks.items():
        assert mask.all(), f"{name} is not filled"
    return arrays


def stored(catalog: Catalog, store: LocalStore) -> dict[str, Bytes]:
    """Every array of a checkpoint."""
    arrays = {}
    for fragment in catalog.all_fragments():
        assert fragment.array is not None
        arrays[fragment.array.name] = array_bytes(catalog, store, fragment.array)
    return arrays
