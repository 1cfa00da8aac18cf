"""Adapters of Megatron-Bridge as directories of peft, against Bridge's own export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from core.errors import UnsupportedError
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.support.megatron_lora import FORMS
from tests.support.rank_files import assert_same_bits

WEIGHTS = "adapter_model.safetensors"


def assert_same_adapter(actual: Path, wanted: Path) -> None:
    """Equal tensors, and equal entries of the configuration except for empty ones."""
    tensors, expected = load_file(actual / WEIGHTS), load_file(wanted / WEIGHTS)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(tensors[name], tensor, name)
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (actual, wanted)]
    first, second = ({name: value for name, value in c.items() if value} for c in configs)
    second.pop("init_lora_weights")  # true, which is peft's default
    assert {name: first[name] for name in second} == second


@pytest.mark.parametrize("form", FORMS)
def test_the_export_equals_that_of_megatron_bridge(
    form: str, adapters: Path, tmp_path: Path
) -> None:
    run(Job(src=adapters / form, dst=tmp_path / "out", to="hf", fsync=False))
    assert_same_adapter(tmp_path / "out", adapters / f"{form}_peft")


def test_adapters_may_be_resharded_before(adapters: Path, tmp_path: Path) -> None:
    # The order of canonical gate and up rows in torch_dist is that of TP 2.
    ranks = tmp_path / "ranks"
    topology = TopologyChange(tp=1, pp=1)
    run(Job(src=adapters / "canonical", dst=ranks, to="megatron", topology=topology, fsync=False))
    run(Job(src=ranks, dst=tmp_path / "out", to="hf", fsync=False))
    assert_same_adapter(tmp_path / "out", adapters / "canonical_peft")


def test_torch_dist_of_canonical_gates_keeps_its_tensor_parallel_size(
    adapters: Path, tmp_path: Path
) -> None:
    job = Job(
        src=adapters / "canonical",
        dst=tmp_path / "out",
        topology=TopologyChange(tp=1, pp=1),
        fsync=False,
    )
    with pytest.raises(UnsupportedError, match="only with the arguments' size, 2, not 1"):
        run(job)
    assert not (tmp_path / "out").exists()


def test_adapters_without_a_record_of_alpha_are_refused(adapters: Path, tmp_path: Path) -> None:
    source = tmp_path / "adapter"
    shutil.copytree(adapters / "lora", source)
    config = source / "iter_0000000" / "run_config.yaml"
    config.write_text(config.read_text().replace("\npeft:\n", "\nother:\n"))
    with pytest.raises(UnsupportedError, match="does not record the alpha"):
        run(Job(src=source, dst=tmp_path / "out", to="hf", fsync=False))
