"""One proof: Megatron trains and saves, this project reshards, Megatron loads strictly and trains
on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from core.megatron.model.pipeline import Pipeline, parse_layout
from core.megatron.model.version import parse_version
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run as convert
from tests.real_megatron.megatron import Form, Megatron, Result
from tests.real_megatron.setting import BATCH, Layout, Run, padded_rows

MORE = 2
"""Steps trained after the checkpoint: the first one's loss tells of the weights, the second one's
of the optimizer.
"""

RANK_FILES = Form()

_FORMATS = {"rank_files": "megatron", "torch_dist": "torch_dist", "zarr": "zarr"}


def change_to(layout: Layout, source: Layout) -> TopologyChange:
    """What a user would ask for."""
    ways = (layout.first, layout.last, layout.counts_embedding, layout.counts_loss, layout.string)
    pipeline = Pipeline(
        first=layout.first,
        last=layout.last,
        counts_embedding=layout.counts_embedding,
        counts_loss=layout.counts_loss,
        layout=None if layout.string is None else parse_layout(layout.string),
    )
    has_experts = layout.ep > 1 or source.ep > 1 or layout.etp is not None or source.etp is not None
    return TopologyChange(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp or 1,
        ep=layout.ep if has_experts else None,
        etp=(layout.etp or layout.tp) if has_experts else None,
        pipeline=pipeline
        if any(way not in (None, False) for way in ways) or layout.pp > 1
        else None,
    )


def prove(
    worker: Megatron,
    run: Run,
    target: Layout,
    folder: Path,
    *,
    source_form: Form = RANK_FILES,
    target_form: Form = RANK_FILES,
    saver: Megatron | None = None,
    optim: bool = True,
    version: str | None = None,
    experts: str | None = None,
) -> None:
    """Saves a run, reshards it, loads it elsewhere, and compares everything.

    Args:
        worker: loads, and saves unless ``saver`` does.
        run: what is trained, and at which layout it is saved.
        target: the layout at which it goes on.
        folder: an empty directory for all of it.
        source_form, target_form: how it is stored, before and after.
        saver: another megatron-core that saves.
        optim: with the optimizer; otherwise only the weights and the losses that they give are
            compared.
        version: of the megatron-core that loads, where it is not that of the one that saves.
        experts: kind of the experts to go on with, where it is another one.
    """
    more = MORE if optim else 1
    wanted = (saver or worker).save(
        run, [(source_form, folder / "saved")], out=folder / "source", more=more
    )
    change = change_to(target, run.layout)
    reshard(
        folder / "saved",
        folder / "resharded",
        target_form,
        change,
        optim=optim,
        version=version,
        experts=experts,
    )
    if experts is not None:
        run = replace(run, model=replace(run.model, grouped=experts == "grouped"))
    resharded = worker.load(
        run.at(target),
        target_form,
        folder / "resharded",
        out=folder / "target",
        more=more,
        optim=optim,
    )
    if not optim:
        wanted, resharded = (
            Result(_weights(result.before), {}, result.losses) for result in (wanted, resharded)
        )
    assert_same(run, target, wanted, resharded, is_same_sum=experts is None)


def _weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if "/" not in key}


def reshard(
    src: Path,
    dst: Path,
    form: Form,
    change: TopologyChange,
    *,
    optim: bool,
    version: str | None = None,
    experts: str | None = None,
) -> None:
    """The library's part; sizes that nobody names stay what they are."""
    convert(
        Job(
            src=src,
            dst=dst,
            to=_FORMATS[form.name],
            topology=change,
            is_reshard=True,
            optim="carry" if optim else "drop",
            megatron_version=None if version is None else parse_version(version),
            experts=experts,
            fsync=False,
        )
    )


def assert_same(
    run: Run, target: Layout, wanted: Result, actual: Result, *, is_same_sum: bool = True
) -> None:
    """All tensors are equal bit for bit when loaded; then losses and tensors stay as close as sums
    allow, which another module may compute in another order (``is_same_sum``).

    The first step's loss comes from the same numbers in the same order, unless TP is another one:
    partial sums of products are then added in another order, in float32 with 24 bits or in bfloat16
    with 8. Gradients are added in another order with other TP, PP (of tied embeddings) and DP
    sizes; they tell in the second step, where in bfloat16 a weight may round to the next number and
    a token go to another expert. What the optimizer remembers was compared bit for bit before.
    """
    rows = None if padded_rows(run) == padded_rows(run.at(target)) else run.model.vocab
    assert_equal(wanted.before, actual.before, rows=rows)
    assert len(wanted.losses) == len(actual.losses)
    is_same_tp = run.layout.tp == target.tp and is_same_sum
    is_bf16 = run.optimizer.is_bf16
    first = 1e-6 if is_same_tp else 0.02 if is_bf16 else 1e-5
    later = 0.02 if is_bf16 else 1e-5
    if rows is None:
        for number, (loss, other) in enumerate(zip(wanted.losses, actual.losses, strict=True)):
            limit = first if number < BATCH else later
            assert abs(loss - other) <= limit * loss, (
                f"loss {number}: {loss} and {other}, more than {limit} off"
            )


def assert_equal(
    wanted: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], *, rows: int | None
) -> None:
    """Two sets of global tensors are the same; of the vocabulary only ``rows`` rows, where they are
    given.
    """
    assert set(wanted) == set(actual), f"only on one side: {sorted(set(wanted) ^ set(actual))[:6]}"
    for key, tensor in wanted.items():
        other = actual[key]
        if rows is not None and _is_vocab(key):
            tensor, other = tensor[:rows], other[:rows]
        assert tensor.shape == other.shape and tensor.dtype == other.dtype, (
            f"{key}: {tensor.shape} and {other.shape}"
        )
        assert torch.equal(tensor, other), (
            f"{key}: {int((tensor != other).sum())} of {tensor.numel()} differ"
        )


def _is_vocab(key: str) -> bool:
    return key.endswith(("word_embeddings.weight", "output_layer.weight"))
