"""Master weights of which only the low halves are stored, as Transformer Engine's Adam keeps them.

Its kernels need a GPU. What it stores is a function of the master weights and of the bf16 weights
that they round to (``fused_adam.py``), so Megatron's own files are rewritten in place.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine.catalog.tensor import Tensor
from core.errors import UnsupportedError
from core.megatron.optimizer.remainders import check_master_dtypes
from core.opening.open import open_checkpoint
from core.verbs.checks.check import Level, Severity
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.support.edited import found_in

FLAT = "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
BY_NAME = "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable"


def remainders(masters: torch.Tensor) -> torch.Tensor:
    """What is missing from the bf16 weights' bits to those of the fp32 master weights."""
    high = masters.bfloat16().view(torch.int16).int() << 16
    return masters.view(torch.int32) - high


def with_remainders(src: Path, dst: Path) -> Path:
    """A copy of a checkpoint whose master weights are the numbers of the remainders, as float32."""
    shutil.copytree(src, dst)
    for path in dst.rglob("distrib_optim.pt"):
        content = torch.load(path, weights_only=False)
        for buffer in (value for key, value in content.items() if isinstance(key, int)):
            for states in buffer.values():
                states["param"] = remainders(states["param"]).float()
        torch.save(content, path)

    # The chunks of torch_dist are dense.
    opened = open_checkpoint(dst)
    for key in opened.catalog.tensors:
        if not key.startswith("optimizer.state.param."):
            continue
        for fragment in opened.catalog.fragments(key):
            assert fragment.array is not None
            array = fragment.array.locate(opened.store)
            path = next(dst.rglob(array.extent.file))
            stored: np.memmap[tuple[int, ...], np.dtype[np.float32]] = np.memmap(
                path, "<f4", "r+", array.extent.offset, array.shape
            )
            stored[...] = remainders(torch.from_numpy(stored.copy())).float().numpy()
            stored.flush()
    return dst


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("source", "to"),
    [(FLAT, "megatron"), (BY_NAME, "torch_dist"), (BY_NAME, "megatron"), (BY_NAME, "fsdp_dtensor")],
)
def test_remainders_are_refused_by_name(golden: Path, tmp_path: Path, source: str, to: str) -> None:
    src = with_remainders(golden / source, tmp_path / "src")
    job = Job(src=src, dst=tmp_path / "out", to=to, topology=TopologyChange(tp=1))
    with pytest.raises(UnsupportedError, match="stores remainders") as caught:
        run(job)
    assert "--no-optim" in str(caught.value) and "store_param_remainders" in str(caught.value)
    assert not (tmp_path / "out").exists()
    run(replace(job, optim="drop"))


@pytest.mark.parametrize("source", [FLAT, BY_NAME])
def test_validate_names_them_and_reports_no_damage(
    golden: Path, tmp_path: Path, source: str
) -> None:
    src = with_remainders(golden / source, tmp_path / "src")
    findings = found_in(src, Level.HEADERS, least=Severity.NOTE)
    assert {finding.code for finding in findings} == {"CK411"}
    assert all("stores remainders" in finding.message for finding in findings)


def test_integers_are_remainders_and_states_of_other_names_may_be() -> None:
    masters = {"optimizer.state.fp32_param.a": Tensor("float32", (2,))}
    check_master_dtypes(masters | {"optimizer.state.count.a": Tensor("int16", (2,))})
    with pytest.raises(UnsupportedError, match="stores remainders"):
        check_master_dtypes(masters | {"optimizer.state.fp32_param.b": Tensor("int16", (2,))})
