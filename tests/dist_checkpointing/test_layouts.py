"""What a job saved at one tensor × pipeline × data-parallel layout, a job of any other layout
loads, bit for bit.

The jobs hold what Megatron's do: a padded vocabulary, layers stacked along an axis that only the
global tensors have, column- and row-parallel weights, replicated norms, gated weights through a
factory, a distributed optimizer (flattened ranges over the data-parallel ranks, those of the gated
weights through the factory again), objects, common state. Every element of the global tensors tells
its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.dist_checkpointing import serialization
from core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import global_tensor

LAYERS, HIDDEN, VOCAB, GATED = 4, 6, 10, 8
SHAPES = {
    "layers.qkv": (LAYERS, 12, HIDDEN),
    "layers.proj": (LAYERS, HIDDEN, 8),
    "layers.norm": (LAYERS, HIDDEN),
    "layers.fc1": (LAYERS, 2 * GATED, HIDDEN),
    "head": (8, HIDDEN),
}
"""Global tensors without the embedding, whose padding depends on the layout."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups; tensor-parallel ranks are neighbours, pipeline stages lie farthest
    apart.
    """

    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}dp{self.dp}"

    def of(self, rank: int) -> Place:
        """The place of a rank."""
        return Place(self, rank % self.tp, rank // self.tp % self.dp, rank // self.tp // self.dp)

    def data_parallel_group(self, rank: int) -> Any:
        """The process group of the ranks that differ in their data-parallel rank only;
        collective.
        """
        own = None
        for first in range(self.tp * self.dp * self.pp):
            if self.of(first).dp_rank == 0:
                ranks = [first + step * self.tp for step in range(self.dp)]
                group = dist.new_group(ranks)
                own = group if rank in ranks else own
        return own


@dataclass(frozen=True)
class Place:
    """One rank of a layout."""

    layout: Layout
    tp_rank: int
    dp_rank: int
    pp_rank: int

    @property
    def layers(self) -> range:
        n = LAYERS // self.layout.pp
        return range(self.pp_rank * n, (self.pp_rank + 1) * n)


LAYOUTS = {
    1: [Layout(1, 1, 1)],
    2: [Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)],
    4: [Layout(2, 2, 1), Layout(4, 1, 1), Layout(1, 2, 2), Layout(1, 1, 4)],
    8: [Layout(2, 2, 2), Layout(4, 2, 1), Layout(1, 4, 2)],
}
"""World size → layouts."""

Leaf = tuple[tuple[Any, ...], Any, Any]
"""Path in the state dict, the sharded leaf, and the plain value that it stands for."""


def leaves(place: Place, *, is_filled: bool) -> Iterator[Leaf]:
    """What a rank holds."""
    for state, replicas in (("model", place.dp_rank), ("optimizer.exp_avg", None)):
        for layer in place.layers:
            yield _cut(place, state, "layers.qkv", layer, 0, replicas, is_filled)
            yield _cut(place, state, "layers.proj", layer, 1, replicas, is_filled)
            yield _cut(place, state, "layers.norm", layer, None, replicas, is_filled)
            yield _gated(place, state, layer, replicas, is_filled)
        if place.pp_rank == place.layout.pp - 1:
            yield _cut(place, state, "head", None, 0, replicas, is_filled)
    if place.pp_rank == 0:
        yield _embedding(place, is_filled)
    yield (
        ("rng", 0),
        ShardedObject("rng", [3, "x"] if is_filled else None, (1,), (0,), _replica(place)),
        [3, "x"],
    )


def _replica(place: Place) -> tuple[int, int, int]:
    """Of what every rank of the world holds."""
    return place.pp_rank, place.tp_rank, place.dp_rank


def _reference(state: str, key: str) -> torch.Tensor:
    dtype = torch.bfloat16 if state == "model" and key != "layers.norm" else torch.float32
    return global_tensor(f"{state}.{key}", SHAPES[key], dtype)


def _cut(
    place: Place,
    state: str,
    key: str,
    layer: int | None,
    axis: int | None,
    dp_rank: int | None,
    is_filled: bool,
) -> Leaf:
    """A part of a tensor.

    Args:
        layer: of the stacked tensor; None if it is not stacked.
        axis: that tensor-parallel ranks cut, without that of the layers; None if they all have it.
        dp_rank: number of the replica; None if data-parallel ranks cut the flattened tensor.
    """
    stacked = 0 if layer is None else 1
    data = _reference(state, key)
    offsets = []
    if layer is not None:
        data = data[layer]
        offsets.append((0, layer, LAYERS))
    if axis is not None:
        data = data.chunk(place.layout.tp, axis)[place.tp_rank]
        offsets.append((axis + stacked, place.tp_rank, place.layout.tp))
    copies = place.tp_rank if axis is None else 0
    path = (state, *key.split("."), layer)
    if dp_rank is not None:
        values = _given(data, is_filled)
        options = {"replica_id": (0, copies, dp_rank), "prepend_axis_num": stacked}
        return (
            path,
            ShardedTensor.from_rank_offsets(f"{state}.{key}", values, *offsets, **options),
            data,
        )
    flat = _share(data, place)
    part = data.flatten()[flat]
    tensor = ShardedTensor.from_rank_offsets_flat(
        f"{state}.{key}",
        _given(part, is_filled),
        tuple(data.shape),
        *offsets,
        flattened_range=flat,
        replica_id=(0, copies, 0),
        prepend_axis_num=stacked,
    )
    return path, tensor, part


def _given(data: torch.Tensor, is_filled: bool) -> torch.Tensor:
    return data.clone() if is_filled else torch.full_like(data, -1)


def _share(data: torch.Tensor, place: Place) -> slice:
    """What the distributed optimizer keeps of a tensor on a rank: the last shares may be smaller,
    or empty.
    """
    size = -(-data.numel() // place.layout.dp) + 1
    return slice(
        min(size * place.dp_rank, data.numel()), min(size * (place.dp_rank + 1), data.numel())
    )


def _gated(place: Place, state: str, layer: int, dp_rank: int | None, is_filled: bool) -> Leaf:
    """Both halves of a gated weight, cut alike and kept as one tensor."""
    halves = [
        half.chunk(place.layout.tp)[place.tp_rank]
        for half in _reference(state, "layers.fc1")[layer].chunk(2)
    ]
    data = torch.cat(halves)
    flat = None if dp_rank is not None else _share(data, place)
    value = data if flat is None else data.flatten()[flat]
    factory = ShardedTensorFactory(
        f"{state}.layers.fc1",
        _given(value, is_filled),
        _Halves(place, layer),
        torch.cat,
        (0, 0, dp_rank or 0),
        flattened_range=flat,
    )
    return (state, "layers", "fc1", layer), factory, value


@dataclass(frozen=True)
class _Halves:
    """Makes ShardedTensors of the halves of a gated weight."""

    place: Place
    layer: int

    def __call__(
        self, key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None
    ) -> Any:
        tp, tp_rank = self.place.layout.tp, self.place.tp_rank
        options = {"replica_id": replica_id, "prepend_axis_num": 1}
        places = [((0, self.layer, LAYERS), (1, half * tp + tp_rank, 2 * tp)) for half in range(2)]
        if flattened_range is None:
            halves = zip(data.chunk(2), places, strict=True)
            return [
                ShardedTensor.from_rank_offsets(key, part, *offsets, **options)
                for part, offsets in halves
            ]
        shape = (GATED // tp, HIDDEN)
        n = shape[0] * shape[1]
        tensors = []
        for half, offsets in enumerate(places):
            start, stop = (
                min(max(at - half * n, 0), n)
                for at in (flattened_range.start, flattened_range.stop)
            )
            if start < stop:
                first = start + half * n - flattened_range.start
                part, flat = data[first : first + stop - start], slice(start, stop)
                tensors.append(
                    ShardedTensor.from_rank_offsets_flat(
                        key, part, shape, *offsets, flattened_range=flat, **options
                    )
                )
        return tensors


def _embedding(place: Place, is_filled: bool) -> Leaf:
    """Rows of the vocabulary, padded with zeros until tensor-parallel ranks can cut it."""
    step = 2 * place.layout.tp
    rows = -(-VOCAB // step) * step
    full = torch.zeros(rows, HIDDEN)
    full[:VOCAB] = global_tensor("embedding", (VOCAB, HIDDEN))
    data = full.chunk(place.layout.tp)[place.tp_rank]
    tensor = ShardedTensor.from_rank_offsets(
        "embedding",
        _given(data, is_filled),
        (0, place.tp_rank, place.layout.tp),
        replica_id=(0, 0, place.dp_rank),
        allow_shape_mismatch=True,
    )
    return ("model", "embedding"), tensor, data


def trees(place: Place, *, is_filled: bool) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The sharded state dict of a rank, and the plain one that loading must return."""
    common = {"args": {"hidden": HIDDEN, "list": [1, 2.5, None]}, "step": 17}
    sharded: dict[Any, Any] = dict(common) if is_filled else {}
    sharded["local"] = LocalNonpersistentObject(("of", "this", "rank"))
    plain: dict[Any, Any] = {**common, "local": ("of", "this", "rank")}
    for path, leaf, value in leaves(place, is_filled=is_filled):
        if isinstance(value, torch.Tensor) and value.numel() == 0:
            continue
        for tree, item in ((sharded, leaf), (plain, value)):
            for name in path[:-1]:
                tree = tree.setdefault(name, {})
            tree[path[-1]] = item
    return sharded, plain


def differences(first: Any, other: Any, path: str = "") -> list[str]:
    """Where two trees are not of the same bits."""
    if isinstance(first, dict) and isinstance(other, dict):
        texts = [f"{path}.{key} is in one only" for key in first.keys() ^ other.keys()]
        return texts + [
            text
            for key in first.keys() & other.keys()
            for text in differences(first[key], other[key], f"{path}.{key}")
        ]
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        is_same = first.dtype == other.dtype and first.shape == other.shape
        return (
            []
            if is_same
            and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (first, other)))
            else [path]
        )
    return [] if type(first) is type(other) and first == other else [path]


def _save_all(rank: int, world: int, folder: str, backend: str) -> None:
    for layout in LAYOUTS[world]:
        strategy = get_default_save_sharded_strategy(backend, 1)
        if layout.dp > 1:
            strategy = FullyParallelSaveStrategyWrapper(strategy, layout.data_parallel_group(rank))
        target = Path(folder, str(layout))
        if rank == 0:
            target.mkdir()
        if world > 1:
            dist.barrier()
        serialization.save(trees(layout.of(rank), is_filled=True)[0], target, strategy)


def _load_all(rank: int, world: int, folder: str, step: int) -> list[str]:
    """Load what was saved at other layouts.

    Args:
        step: many ranks take long: of several layouts, each loads every ``step``-th one, the next
            layout others.
    """
    texts = []
    for number, layout in enumerate(LAYOUTS[world]):
        group = layout.data_parallel_group(rank) if layout.dp > 1 else None
        for source in sorted(Path(folder).iterdir())[number % step :: step]:
            wanted, expected = trees(layout.of(rank), is_filled=False)
            strategy = get_default_load_sharded_strategy(source)
            if group is not None:
                strategy = FullyParallelLoadStrategyWrapper(strategy, group)
            loaded = serialization.load(wanted, source, strategy, strict="raise_all")
            texts += [f"{source.name} → {layout}: {text}" for text in differences(loaded, expected)]
    return texts


@pytest.mark.dist
@pytest.mark.parametrize(
    ("backend", "most_ranks"),
    [
        ("torch_dist", 4),
        pytest.param("torch_dist", 8, marks=pytest.mark.long),
        ("zarr", 2),
        pytest.param("zarr", 4, marks=pytest.mark.long),
    ],
)
def test_what_was_saved_at_any_layout_is_loaded_at_any_other_and_as_a_whole(
    tmp_path, backend, most_ranks, request
):
    step = 2 if request.config.getoption("--long") else 4
    worlds = [world for world in LAYOUTS if world <= most_ranks]
    for world in worlds:
        run_ranks(world, _save_all, str(tmp_path), backend)
    for source in sorted(tmp_path.iterdir()):
        assert whole_differences(source) == [], source.name
    for world in worlds:
        steps = step if world > 2 else 1
        assert run_ranks(world, _load_all, str(tmp_path), steps) == [[]] * world


def whole_differences(source: Path) -> list[str]:
    """Where a checkpoint's global tensors are not what they should be."""
    expected = {
        f"{state}.{key}": _reference(state, key)
        for state in ("model", "optimizer.exp_avg")
        for key in SHAPES
    }
    tensors = serialization.load_plain_tensors(source)
    rows = tensors.pop("embedding")
    padding = rows[VOCAB:]
    expected["rows"], tensors["rows"] = global_tensor("embedding", (VOCAB, HIDDEN)), rows[:VOCAB]
    expected["padding"], tensors["padding"] = torch.zeros_like(padding), padding
    return differences(tensors, expected)


def test_a_difference_of_one_bit_would_be_seen():
    loaded = trees(Layout(2, 1, 1).of(1), is_filled=True)[1]
    expected = trees(Layout(2, 1, 1).of(1), is_filled=True)[1]
    assert differences(loaded, expected) == []
    loaded["model"]["layers"]["qkv"][3].view(torch.uint8)[5, 11] ^= 1
    assert differences(loaded, expected) == [".model.layers.qkv.3"]
