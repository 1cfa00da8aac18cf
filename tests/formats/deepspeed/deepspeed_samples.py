"""DeepSpeed checkpoints made by hand: parameters cut the slow way, files written by
``torch.save``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core.engine.catalog.catalog import Catalog
from core.files.store import ReadStore
from core.formats.deepspeed.universal import format as deepspeed_universal
from core.opening.objects import loaded
from core.opening.target import source_and_target
from tests.support.materialize import materialized, write_files

STATES = ("exp_avg", "exp_avg_sq")
FIRST = {"fp32": 0.0, "exp_avg": 1e6, "exp_avg_sq": 2e6}
MODEL = "mp_rank_00_model_states.pt"

Edit = Callable[[str, dict[str, Any]], None]
"""Changes the content of a file, given its name, before it is written."""

GROUPS: tuple[Mapping[str, tuple[int, ...]], ...] = (
    {"embed": (7, 5), "deep": (2, 3, 4), "scalar": (), "wide": (3, 11)},
    {"bias": (5,), "one": (1,), "norm": (13,)},
)


def values(name: str, shape: Sequence[int], state: str = "fp32") -> torch.Tensor:
    """The elements of a parameter: a function of its name, the state and the index."""
    n = int(torch.Size(shape).numel())
    start = sum(ord(letter) * 97**place for place, letter in enumerate(name[:3])) % 100_003
    return (torch.arange(n, dtype=torch.float32) + start * 0.25 + FIRST[state]).reshape(
        tuple(shape)
    )


@dataclass
class Zero:
    """A run.

    Args:
        stage: of ZeRO.
        n_ranks: data-parallel ranks.
        groups: parameters of each group.
        frozen: parameters that are not trained; stored as bfloat16.
        buffers: as stored.
        shared: name → owner.
        gap: elements of padding behind every parameter (ZeRO-1 and 2).
        has_slices: whether files say where each parameter lies.
        pads: whether the padding at the end is stored with the masters.
        sub_groups: ZeRO-3: elements of each flat group on a rank; None for one flat group per
            group.
        step: of the optimizer.
    """

    stage: int
    n_ranks: int
    groups: Sequence[Mapping[str, tuple[int, ...]]] = GROUPS
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    gap: int = 0
    has_slices: bool = True
    pads: bool = False
    sub_groups: Sequence[int] | None = None
    step: object = field(default_factory=lambda: torch.tensor(4.0))

    def write(self, folder: Path, edit: Edit | None = None) -> Path:
        """Writes the files of all ranks."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            if edit is not None:
                edit(name, content)
            torch.save(content, folder / name)
        return folder

    def files(self) -> dict[str, dict[str, Any]]:
        """Name → content."""
        files: dict[str, dict[str, Any]] = {}
        for rank in range(self.n_ranks):
            files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = self.optim(rank)
            if self.stage == 3:
                files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = self.model(rank)
        if self.stage < 3:
            files[MODEL] = self.model(0)
        return files

    def model(self, rank: int) -> dict[str, Any]:
        """The content of a model file."""
        module: OrderedDict[str, torch.Tensor] = OrderedDict(self.buffers)
        fragments = OrderedDict()
        for name, shape in {
            **{k: v for g in self.groups for k, v in g.items()},
            **self.frozen,
        }.items():
            full = values(name, shape).bfloat16()
            module[name] = torch.empty(0, dtype=torch.bfloat16) if self.stage == 3 else full
            if name in self.frozen:
                fragments[name] = self._parts(full)[rank] if self.stage == 3 else full
        for name, owner in self.shared.items():
            module[name] = module[owner]
        return {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [
                OrderedDict((k, torch.Size(v)) for k, v in group.items()) for group in self.groups
            ],
            "frozen_param_shapes": OrderedDict((k, torch.Size(v)) for k, v in self.frozen.items())
            or None,
            "frozen_param_fragments": fragments or None,
            "shared_params": dict(self.shared),
            "lr_scheduler": {"last_epoch": 3},
            "skipped_steps": 0,
            "global_steps": 4,
            "dp_world_size": self.n_ranks,
            "mp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": self.stage}},
            "ds_version": "0.19.8",
            "rng": torch.arange(6, dtype=torch.uint8),
            "nested": {"seeds": [1, 2], "state": torch.tensor([3, 4])},
        }

    def optim(self, rank: int) -> dict[str, Any]:
        """The content of an optimizer file."""
        cut = self._cut_3 if self.stage == 3 else self._cut_12
        fp32, slices = cut(rank, "fp32")
        states = {state: cut(rank, state)[0] for state in STATES}
        base = {
            "state": {
                number: {"step": self.step, **{state: states[state][number] for state in STATES}}
                for number in range(len(fp32))
            },
            "param_groups": [
                {"lr": 0.5 + number, "betas": (0.9, 0.95), "params": [number]}
                for number in range(len(fp32))
            ],
        }
        root: dict[str, Any] = {"zero_stage": self.stage, "overflow": False, "ds_version": "0.19.8"}
        if self.stage == 3:
            return {
                "optimizer_state_dict": {
                    **root,
                    "partition_count": self.n_ranks,
                    "optimizer_state_dict": base,
                    "fp32_flat_groups": fp32,
                }
            }
        root |= {
            "partition_count": [self.n_ranks] * len(fp32),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [
                part if self.pads else self._without_padding(part, number, rank)
                for number, part in enumerate(fp32)
            ],
            "group_paddings": [0] * len(fp32),
        }
        if self.gap:
            root["param_alignment_paddings"] = [[self.gap] * len(group) for group in self.groups]
        if self.has_slices:
            root["param_slice_mappings"] = slices
        return {"optimizer_state_dict": root}

    def _flat(
        self, group: Mapping[str, tuple[int, ...]], state: str
    ) -> tuple[torch.Tensor, dict[str, tuple[int, int]]]:
        """A group's parameters one after the other, padded; and name → (first, end)."""
        parts, places, end = [], {}, 0
        for name, shape in group.items():
            part = values(name, shape, state).flatten()
            places[name] = (end, end + len(part))
            parts += [part, torch.full((self.gap,), -1.0)]
            end += len(part) + self.gap
        step = 2 * self.n_ranks
        parts.append(torch.full((-end % step,), -2.0))
        return torch.cat(parts), places

    def _cut_12(self, rank: int, state: str) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        flats, slices = [], []
        for group in self.groups:
            flat, places = self._flat(group, state)
            n = len(flat) // self.n_ranks
            own_range = range(rank * n, (rank + 1) * n)
            flats.append(flat[own_range.start : own_range.stop].clone())
            cuts: OrderedDict[str, Any] = OrderedDict()
            for name, (first, end) in places.items():
                start, stop = max(first, own_range.start), min(end, own_range.stop)
                if start < stop:
                    cuts[name] = {"start": start - own_range.start, "numel": stop - start}
            slices.append(cuts)
        return flats, slices

    def _without_padding(self, part: torch.Tensor, number: int, rank: int) -> torch.Tensor:
        """What DeepSpeed keeps of a part: the padding at the end of the group is cut off."""
        end = max(end for _, end in self._flat(self.groups[number], "fp32")[1].values()) + self.gap
        return part[: max(0, min(len(part), end - rank * len(part)))].clone()

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        n = -(-tensor.numel() // self.n_ranks)
        padded = torch.cat(
            [
                tensor.flatten(),
                torch.full((n * self.n_ranks - tensor.numel(),), -3.0, dtype=tensor.dtype),
            ]
        )
        return [padded[rank * n : (rank + 1) * n].clone() for rank in range(self.n_ranks)]

    def _cut_3(self, rank: int, state: str) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        flats = [
            torch.cat(
                [self._parts(values(name, shape, state))[rank] for name, shape in group.items()]
            )
            for group in self.groups
        ]
        if self.sub_groups is not None:
            flats = [part.clone() for part in torch.cat(flats).split(list(self.sub_groups))]
        return flats, []


def written(catalog: Catalog, store: ReadStore, folder: Path) -> Path:
    """A universal checkpoint made of a catalog."""
    source, target = source_and_target(loaded(catalog, store), deepspeed_universal.FORMAT)
    images = deepspeed_universal.lay_out(target)
    return write_files(materialized(images, target=target, source=source, store=store), folder)
