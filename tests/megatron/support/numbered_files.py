"""Rank files of the synthetic models as a run with a Float16 or FP32 optimizer saves them: real
ones, of torch.save.

Groups, numbers and masters are made rank by rank as Megatron makes them; no code is shared with
``core``.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.megatron.model.topology import Rank, Topology, rank_dir
from tests.megatron.support.synthetic import Model
from tests.support.rank_files import MODEL_FILE, assert_same_bits, load_rank_file, rank_dirs

MOMENTS = {"exp_avg": 3.0, "exp_avg_sq": 0.5}
"""State → what the master is multiplied with."""
Key = tuple[bool, bool]
"""(no weight decay, of a distributed expert)."""


@dataclass(frozen=True)
class Style:
    """How a run's optimizer looks.

    Args:
        order: ``sorted`` as since core 0.16; ``seen``: a rank's own groups first, then those of
            others; ``own``: no others, as before 0.14.
        has_masters: a Float16Optimizer, of a bf16 model.
        steps: parameters count their steps themselves, as torch's Adam does.
        native: ends of names of parameters that are fp32 in a bf16 model.
        frozen: beginnings of names of parameters that are not trained.
        exempts: ``vectors``, or ``qk_norms`` for those but the norms of queries and keys.
        has_scaler: fp16 training's loss scale.
        is_trained: at least one step was made.
    """

    order: str = "sorted"
    has_masters: bool = True
    steps: bool = False
    native: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    exempts: str = "vectors"
    has_scaler: bool = False
    is_trained: bool = True
    is_grouped: bool = False
    """Experts are legacy grouped ones: all of a rank in one ``weight1`` and one ``weight2``."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings of the groups."""


def master(array: np.ndarray) -> torch.Tensor:
    """The fp32 parameter of a synthetic tensor; not every bit of it is in its bf16 weight."""
    values = torch.from_numpy(np.ascontiguousarray(array))
    return values * 1.0078125 + (values != 0) * 0.00390625


def weight(name: str, array: np.ndarray, style: Style) -> torch.Tensor:
    """What the model's state dict holds."""
    if array.dtype == np.uint8:
        return torch.from_numpy(array.copy())
    is_half = style.has_masters and not name.endswith((*style.native, "expert_bias"))
    return master(array).to(torch.bfloat16 if is_half else torch.float32)


def key_of(name: str, array: np.ndarray, topology: Topology, style: Style) -> Key:
    """The group of a parameter."""
    is_exempt = array.ndim == 1 or name.endswith(".bias")
    if style.exempts == "qk_norms" and ("q_layernorm." in name or "k_layernorm." in name):
        is_exempt = False
    return is_exempt, topology.ep > 1 and ".experts." in name


def held_by(
    model: Model, rank: Rank, topology: Topology, style: Style
) -> dict[str, dict[str, np.ndarray]]:
    """Model chunk → what a rank's file holds of it."""
    chunks = model.held(rank, topology)
    return (
        {chunk: grouped(arrays) for chunk, arrays in chunks.items()} if style.is_grouped else chunks
    )


def grouped(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Single experts as legacy grouped ones: each transposed, then one after the other."""
    entries: dict[str, np.ndarray] = {}
    packed: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        before, dot, rest = name.partition("local_experts.")
        if not dot:
            entries[name] = array
            continue
        weight = before + ("weight1" if "linear_fc1" in rest else "weight2")
        packed.setdefault(weight, []).append(array.T)
        entries.setdefault(before + "weight1", array)
        entries.setdefault(before + "weight2", array)
    for name, parts in packed.items():
        rows, columns = parts[0].shape
        shape = (rows, -1) if name.endswith("1") else (-1, columns)
        entries[name] = np.stack(parts).reshape(shape)
    return entries


def trained(
    model: Model, rank: Rank, topology: Topology, style: Style
) -> list[tuple[str, np.ndarray]]:
    """A rank's parameters, in the order of its file."""
    return [
        (name, array)
        for chunk in held_by(model, rank, topology, style).values()
        for name, array in chunk.items()
        if not name.endswith(("_extra_state", "expert_bias"))
        and not (style.frozen and name.startswith(style.frozen))
    ]


def keys_of(model: Model, rank: Rank, topology: Topology, style: Style) -> list[Key]:
    """The groups of a rank, in order."""
    own = dict.fromkeys(
        key_of(*param, topology, style) for param in trained(model, rank, topology, style)
    )
    if style.order == "own":
        return list(own)
    for other in topology.ranks():
        own |= dict.fromkeys(
            key_of(*param, topology, style) for param in trained(model, other, topology, style)
        )
    return sorted(own) if style.order == "sorted" else list(own)


def optimizer(model: Model, rank: Rank, topology: Topology, style: Style) -> Any:
    """The entry of a rank's file."""
    keys = keys_of(model, rank, topology, style)
    trained_params = trained(model, rank, topology, style)
    members = []
    for is_expert in (False, True):
        own_keys = [key for key in keys if key[1] == is_expert]
        if not own_keys:
            continue
        state: dict[int, Any] = {}
        groups, masters = [], []
        for key in own_keys:
            params = [param for param in trained_params if key_of(*param, topology, style) == key]
            first = len(state)
            half = []
            for name, array in params:
                entry = {"step": torch.tensor(5.0)} if style.steps else {}
                state[len(state)] = {
                    **entry,
                    **{state: master(array) * factor for state, factor in MOMENTS.items()},
                }
                if weight(name, array, style).dtype == torch.bfloat16:
                    half.append(master(array))
            masters.append(half)
            groups.append({**settings(key, style), "params": list(range(first, len(state)))})
        inner = {"state": state if style.is_trained else {}, "param_groups": groups}
        if not style.has_masters:
            members.append(inner)
            continue
        scaler = (
            {"grad_scaler": {"scale": torch.tensor([1024.0]), "growth_tracker": 3}}
            if style.has_scaler
            else {}
        )
        members.append({"optimizer": inner, **scaler, "fp32_from_fp16_params": masters})
    return members[0] if len(members) == 1 else members


def settings(key: Key, style: Style) -> dict[str, Any]:
    """Those of a group."""
    new = {"default_config": True} if style.order == "sorted" else {}
    wd_mult = 0.0 if key[0] else 1.0
    return {
        "is_expert_parallel": key[1],
        **new,
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": 1e-4,
        "min_lr": 1e-5,
        "lr": 5e-5,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1 * wd_mult,
        **({} if style.steps else {"step": 5}),
        **style.changes,
    }


def save(model: Model, topology: Topology, root: Path, style: Style | None = None) -> Path:
    """Writes a checkpoint."""
    style = style or Style()
    args = model.args(topology)
    args["virtual_pipeline_model_parallel_size"] = topology.vpp if topology.vpp > 1 else None
    if style.exempts == "qk_norms":
        args["apply_wd_to_qk_layernorm"] = True
    for rank in topology.ranks():
        content: dict[str, Any] = {
            "args": Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": 7,
        }
        for chunk, arrays in held_by(model, rank, topology, style).items():
            content[chunk] = OrderedDict(
                (name, weight(name, array, style)) for name, array in arrays.items()
            )
        content["optimizer"] = optimizer(model, rank, topology, style)
        folder = root / "iter_0000007" / rank_dir(topology, rank)
        folder.mkdir(parents=True)
        torch.save(content, folder / MODEL_FILE)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def change(root: Path, folder: str, edit: Any) -> None:
    """Edits one rank's optimizer in place.

    Args:
        edit: takes the file's content.
    """
    path = rank_dirs(root)[folder] / MODEL_FILE
    content = load_rank_file(path)
    edit(content)
    torch.save(content, path)


def assert_same_optimizer(found_root: Path, wanted_root: Path) -> None:
    """Every rank's optimizer is the same tree: keys, order, numbers, settings, and every tensor bit
    for bit.
    """
    our_dirs, wanted = rank_dirs(found_root), rank_dirs(wanted_root)
    assert list(our_dirs) == list(wanted)
    for name in wanted:
        ours, theirs = (
            load_rank_file(root[name] / MODEL_FILE)["optimizer"] for root in (our_dirs, wanted)
        )
        assert_same_tree(ours, theirs, name)


def assert_same_tree(ours: Any, theirs: Any, path: str) -> None:
    """Equal containers, values and tensors."""
    if isinstance(theirs, torch.Tensor):
        assert_same_bits(ours, theirs, path)
        assert ours.requires_grad == theirs.requires_grad, path
        return
    assert type(ours) is type(theirs), path
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key in theirs:
            assert_same_tree(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for number, (item, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_tree(item, other, f"{path}.{number}")
    else:
        assert ours == theirs, path
