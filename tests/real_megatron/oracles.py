"""Makes checkpoints of real megatron-core by which resharding can be judged.

``python -m tests.real_megatron.oracles DIR [NAME …]`` stores every model at several layouts and in
several forms with the same values everywhere: each parameter, master and moment is a function of
its key and global index (``tests.real_megatron.values``). So whatever is made of one case for the
layout of another must equal that other, tensor by tensor, save padding rows of the vocabulary.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.real_megatron.megatron import Form, megatron
from tests.real_megatron.setting import Layout, Model, Optimizer, Run

RANK_FILES = (Form(),)
WITH_GLOBAL = (Form(), Form("torch_dist"))
SHARDED = (Form(), Form("torch_dist", "fully_reshardable"), Form("torch_dist", "dp_reshardable"))

FP32 = Optimizer(kind="fp32")
FLOAT16 = Optimizer()
BUCKETS = Optimizer(kind="distributed", overlap=True, bucket_size=3000)
WIDE_BUCKETS = Optimizer(kind="distributed", overlap=True, bucket_size=40_000)
ONE_BUCKET = Optimizer(kind="distributed")

TIED = Model(is_tied=True, vocab=60, divisible_by=8)
GELU = Model(
    is_tied=True,
    is_gated=False,
    has_bias=True,
    normalization="LayerNorm",
    position="learned_absolute",
)
WIDE = Model(hidden=128, ffn=64)
WIDE_TIED = Model(hidden=128, ffn=64, is_tied=True, vocab=60, divisible_by=8)
WIDE_MOE = Model(hidden=128, ffn=64, experts=4)
"""Every parameter has a multiple of 128 elements: see ``tests.real_megatron.setting.Optimizer``."""
MOE = Model(experts=4)
MOE_SHARED = Model(experts=4, first_dense=1, shared_ffn=16, expert_bias=True, qk_layernorm=True)


@dataclass(frozen=True, slots=True)
class Oracle:
    """One training at several layouts."""

    what: str
    run: Run
    layouts: Sequence[Layout]
    forms: Sequence[Form] = RANK_FILES


ONE, TP2, PP2 = Layout(), Layout(tp=2), Layout(pp=2)

ORACLES = {
    "tied_float16": Oracle(
        "tied embeddings, 60 rows padded to 64 at TP1 and TP2, Float16 optimizer",
        Run(model=TIED),
        (ONE, TP2, PP2, Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=2, vpp=2)),
        WITH_GLOBAL,
    ),
    "dense_fp32": Oracle(
        "GQA, FP32 optimizer", Run(optimizer=FP32), (ONE, TP2, PP2, Layout(tp=2, pp=2)), WITH_GLOBAL
    ),
    "gelu_float16": Oracle(
        "biases, LayerNorm, learned positions, no gate, tied",
        Run(model=GELU),
        (ONE, TP2, PP2),
        WITH_GLOBAL,
    ),
    "moe_float16": Oracle(
        "4 experts, Float16 optimizer; chained where EP is 2 or ETP is not TP",
        Run(model=MOE),
        (
            ONE,
            Layout(ep=2, dp=2),
            Layout(pp=2),
            Layout(pp=2, ep=2, dp=2),
            Layout(tp=2),
            Layout(tp=2, ep=2, etp=1),
        ),
        WITH_GLOBAL,
    ),
    "moe_shared_float16": Oracle(
        "first layer dense, shared expert, expert bias, norms of queries and keys",
        Run(model=MOE_SHARED),
        (ONE, Layout(ep=2, dp=2), Layout(pp=2), Layout(tp=2, ep=2, etp=1)),
        WITH_GLOBAL,
    ),
    "buckets": Oracle(
        "distributed optimizer, overlap_grad_reduce, several buckets (3000 elements), with gaps",
        Run(optimizer=BUCKETS),
        (ONE, TP2, PP2, Layout(dp=2), Layout(pp=2, vpp=2)),
    ),
    "buckets_wide": Oracle(
        "the same without gaps, in torch_dist too",
        Run(model=WIDE, optimizer=WIDE_BUCKETS),
        (ONE, TP2, PP2, Layout(dp=2), Layout(pp=2, vpp=2)),
        SHARDED,
    ),
    "buckets_tied": Oracle(
        "the same with tied embeddings, which have a bucket of their own where PP is 2",
        Run(model=WIDE_TIED, optimizer=WIDE_BUCKETS),
        (ONE, TP2, PP2),
        SHARDED,
    ),
    "one_bucket": Oracle(
        "distributed optimizer without overlap",
        Run(model=WIDE, optimizer=ONE_BUCKET),
        (ONE, TP2, PP2, Layout(dp=2)),
        SHARDED,
    ),
    "moe_buckets": Oracle(
        "4 experts, distributed optimizer with buckets; chained where EP is 2",
        Run(model=WIDE_MOE, optimizer=WIDE_BUCKETS),
        (ONE, Layout(ep=2, dp=2), Layout(pp=2)),
        SHARDED,
    ),
    "uneven_float16": Oracle(
        "5 layers in 3 stages: 1 first, 2 last",
        Run(model=Model(layers=5)),
        (ONE, Layout(pp=3, first=1, last=2), Layout(pp=2, first=2)),
        WITH_GLOBAL,
    ),
    "string_float16": Oracle(
        "layout strings, one with an empty stage",
        Run(),
        (ONE, Layout(pp=2, vpp=2, string="Et|t|tt|L"), Layout(pp=3, string="E|tt|ttL")),
        WITH_GLOBAL,
    ),
    "counted_float16": Oracle(
        "6 layers, embedding and loss count as layers",
        Run(model=Model(layers=6)),
        (
            ONE,
            Layout(pp=2, counts_embedding=True, counts_loss=True),
            Layout(pp=4, counts_embedding=True, counts_loss=True),
        ),
        WITH_GLOBAL,
    ),
    "mtp_float16": Oracle(
        "one multi-token prediction layer", Run(model=Model(mtp=1)), (ONE, TP2, PP2), WITH_GLOBAL
    ),
}
"""Name → training."""


def name_of(layout: Layout) -> str:
    """The folder of a layout: its sizes that are not 1."""
    sizes = (
        ("tp", layout.tp),
        ("pp", layout.pp),
        ("vpp", layout.vpp),
        ("ep", layout.ep),
        ("etp", layout.etp),
    )
    parts = [
        f"{name}{size}"
        for name, size in (*sizes, ("dp", layout.dp))
        if size is not None and name + str(size) != "dp1"
    ]
    if layout.first or layout.last:
        parts.append(f"first{layout.first}_last{layout.last}")
    if layout.string is not None:
        parts.append("string")
    if layout.counts_embedding or layout.counts_loss:
        parts.append("counted")
    return "_".join(parts)


def folder_of(form: Form) -> str:
    """The folder of a form."""
    return form.name if form.sharding is None else f"{form.name}_{form.sharding}"


def make(root: Path, names: Sequence[str]) -> None:
    """Writes the oracles below ``root``: ``<name>/<layout>/<form>``, and ``README`` beside."""
    with megatron() as worker, tempfile.TemporaryDirectory() as scratch:
        for name in names:
            oracle = ORACLES[name]
            for layout in oracle.layouts:
                where = root / name / name_of(layout)
                run = replace(oracle.run, layout=layout)
                saves = [(form, where / folder_of(form)) for form in oracle.forms]
                worker.save(
                    run, saves, out=Path(scratch) / name / name_of(layout), more=0, fill=True
                )
                sys.stdout.write(f"{name}/{name_of(layout)}\n")
                sys.stdout.flush()
            lines = [f"{name}: {ORACLES[name].what}" for name in ORACLES if (root / name).exists()]
            (root / "README").write_text((__doc__ or "") + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2:] or list(ORACLES))
