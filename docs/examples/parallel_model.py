"""A tiny model that is cut over tensor- and pipeline-parallel ranks, in plain torch.

::

    embedding ─▶ layer 0 ─▶ … ─▶ layer n-1 ─▶ norm ─▶ output
                cut into `pp` stages of n/pp layers
    (V/tp, h)    norm ─▶ fc1 (f/tp, h) ─▶ gelu ─▶ fc2 (h, f/tp) ─▶ dropout ─▶ + input     (V/tp, h)

A global weight depends on its key alone, not on the layout, and so does a dropout mask: each layer
has a random number generator of its own, equal on all ranks that hold the layer. Numbers are
float64, so that layouts, which sum in different orders, can be compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from core.dist_checkpointing import ShardedTensor


@dataclass(frozen=True)
class Sizes:
    """Of the global model."""

    vocab: int = 64
    hidden: int = 16
    ffn: int = 32
    layers: int = 4
    dropout: float = 0.1


@dataclass(frozen=True)
class Place:
    """Where a rank is: rank = pp_rank * tp + tp_rank.

    Args:
        tp, pp: sizes of the layout.
        tp_rank, pp_rank: this rank's.
        tp_group: the ranks that share this one's layers.
    """

    tp: int
    pp: int
    tp_rank: int
    pp_rank: int
    tp_group: Any

    @classmethod
    def of_this_rank(cls, tp: int, pp: int) -> Place:
        """Collective: makes the groups of all ranks."""
        groups = [dist.new_group(range(first, first + tp)) for first in range(0, tp * pp, tp)]
        pp_rank, tp_rank = divmod(dist.get_rank(), tp)
        return cls(tp, pp, tp_rank, pp_rank, groups[pp_rank])

    @property
    def is_first(self) -> bool:
        """Whether this is the stage that reads tokens."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that knows the loss."""
        return self.pp_rank == self.pp - 1


@dataclass(frozen=True)
class Weight:
    """A rank's part of a global weight.

    Args:
        key: name in checkpoints. The weights of all layers are one tensor there, whose first axis
            is the layer.
        layer: index and number of layers, None for a weight that is no layer's.
        axis: which axis tensor parallelism cuts, None for a weight that all ranks of the group
            have.
        parameter: this rank's part.
    """

    key: str
    layer: tuple[int, int] | None
    axis: int | None
    parameter: torch.nn.Parameter

    @property
    def name(self) -> str:
        """Unique on this rank."""
        return self.key if self.layer is None else f"{self.key}.{self.layer[0]}"

    def sharded(self, place: Place) -> ShardedTensor:
        """The part as a checkpoint needs to know it."""
        n_prepended = 0 if self.layer is None else 1
        offsets = [] if self.layer is None else [(0, *self.layer)]
        if self.axis is not None:
            offsets.append((self.axis + n_prepended, place.tp_rank, place.tp))
        replica_id = place.tp_rank if self.axis is None else 0
        return ShardedTensor.from_rank_offsets(
            self.key, self.parameter, *offsets, replica_id=replica_id, prepend_axis_num=n_prepended
        )


class Stage(torch.nn.Module):
    """The layers of one pipeline stage, one tensor-parallel rank's part of them."""

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        self.weights: dict[str, Weight] = {}
        per_stage = sizes.layers // place.pp
        self.layers = range(place.pp_rank * per_stage, (place.pp_rank + 1) * per_stage)
        self.generators = {layer: torch.Generator().manual_seed(layer) for layer in self.layers}
        if place.is_first:
            self._add("embedding.weight", (sizes.vocab, sizes.hidden), axis=0)
        for layer in self.layers:
            self._add("layers.norm.weight", (sizes.hidden,), layer=layer)
            self._add("layers.fc1.weight", (sizes.ffn, sizes.hidden), axis=0, layer=layer)
            self._add("layers.fc1.bias", (sizes.ffn,), axis=0, layer=layer)
            self._add("layers.fc2.weight", (sizes.hidden, sizes.ffn), axis=1, layer=layer)
            self._add("layers.fc2.bias", (sizes.hidden,), layer=layer)
        if place.is_last:
            self._add("norm.weight", (sizes.hidden,))
            self._add("output.weight", (sizes.vocab, sizes.hidden), axis=0)

    def _add(
        self, key: str, shape: tuple[int, ...], *, axis: int | None = None, layer: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{key}.{layer}".encode()))
        data = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        if key.endswith("norm.weight"):
            data = torch.ones(shape, dtype=torch.float64)
        if axis is not None:
            data = data.chunk(self.place.tp, axis)[self.place.tp_rank].clone()
        stacked = None if layer is None else (layer, self.sizes.layers)
        weight = Weight(key, stacked, axis, torch.nn.Parameter(data))
        self.weights[weight.name] = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (batch,) on the first stage, activations (batch, hidden) on the others →
        activations, or logits.
        """
        if self.place.is_first:
            x = self._embedded(x)
        for layer in self.layers:
            x = x + self._layer(x, layer)
        return self._logits(x) if self.place.is_last else x

    def _of(self, key: str, layer: int | None = None) -> torch.nn.Parameter:
        return self.weights[key if layer is None else f"{key}.{layer}"].parameter

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self._of("embedding.weight")
        rows = tokens - self.place.tp_rank * len(weight)
        is_here = (rows >= 0) & (rows < len(weight))
        return _Sum.apply(
            weight[rows.clamp(0, len(weight) - 1)] * is_here[:, None], self.place.tp_group
        )

    def _layer(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        x = functional.layer_norm(x, x.shape[-1:], self._of("layers.norm.weight", layer))
        x = _Fan.apply(x, self.place.tp_group)
        x = functional.gelu(
            functional.linear(
                x, self._of("layers.fc1.weight", layer), self._of("layers.fc1.bias", layer)
            )
        )
        x = _Sum.apply(
            functional.linear(x, self._of("layers.fc2.weight", layer)), self.place.tp_group
        )
        x = x + self._of("layers.fc2.bias", layer)
        is_kept = (
            torch.rand(x.shape, generator=self.generators[layer], dtype=x.dtype)
            >= self.sizes.dropout
        )
        return x * is_kept / (1 - self.sizes.dropout)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.layer_norm(x, x.shape[-1:], self._of("norm.weight"))
        x = _Fan.apply(x, self.place.tp_group)
        return _Gather.apply(functional.linear(x, self._of("output.weight")), self.place)


class _Fan(torch.autograd.Function):
    """What all ranks of a group go on with: its gradients are added up."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, context.group), None


class _Sum(torch.autograd.Function):
    """The sum of all ranks' partial results."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """All ranks' columns side by side."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, place: Place) -> torch.Tensor:
        context.place = place
        parts = [torch.empty_like(x) for _ in range(place.tp)]
        dist.all_gather(parts, x.contiguous(), group=place.tp_group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(context.place.tp, -1)[context.place.tp_rank].contiguous(), None


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def train_step(stage: Stage, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Forward and backward of all micro-batches, one stage after the other; gradients add up in the
    weights.

    Args:
        micro_batches: tokens and targets, each (batch,).

    Returns:
        The loss, on every rank.
    """
    place = stage.place
    before, after = dist.get_rank() - place.tp, dist.get_rank() + place.tp
    loss = torch.zeros(1, dtype=torch.float64)
    passed = list(_forward(stage, micro_batches, before, after))
    for x, y in passed:
        if place.is_last:
            y.backward()
            loss += y.detach()
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, after)
            y.backward(gradient)
        if not place.is_first:
            dist.send(x.grad, before)
    dist.broadcast(loss, place.tp * (place.pp - 1))
    return loss.item()


def _forward(
    stage: Stage, micro_batches: list[tuple[torch.Tensor, torch.Tensor]], before: int, after: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What goes into the stage and what comes out of it, for each micro-batch."""
    for tokens, targets in micro_batches:
        x = tokens
        if not stage.place.is_first:
            x = torch.empty(len(tokens), stage.sizes.hidden, dtype=torch.float64)
            dist.recv(x, before)
            x.requires_grad_()
        y = stage(x)
        if stage.place.is_last:
            y = functional.cross_entropy(y, targets) / len(micro_batches)
        else:
            dist.send(y.detach(), after)
        yield x, y
