"""DeepSpeed's own engine over universal checkpoints that we wrote.

A process of its own trains nothing: it makes an engine, loads, and answers with what the optimizer
then holds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.engine.changes.select import without_optimizer
from core.files.store import LocalStore
from core.formats.deepspeed import format as deepspeed
from tests.formats.deepspeed.deepspeed_samples import written
from tests.support.materialize import tensor_bytes

PYTHON = os.environ.get("CKPT_DEEPSPEED_PYTHON")
"""An interpreter with DeepSpeed, as scripts/framework-tests has it; else that of the tests."""
if PYTHON is None and importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

SCRIPT = r"""
import os, socket, sys
folder, out = sys.argv[1:3]
stage, n_groups, has_state = map(int, sys.argv[3:])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1",
    LOCAL_RANK="0", DS_ACCELERATOR="cpu"
)
import torch
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile C++


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(37, 24)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(24, 73), torch.nn.GELU(), torch.nn.Linear(73, 24))
            for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(24)
        self.head = torch.nn.Linear(24, 37, bias=False)
        self.register_buffer("inv_freq", torch.zeros(5))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


model = Model()
groups = [{"params": list(model.parameters())}]
if n_groups == 2:
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == has_rows]}
              for has_rows in (True, False)]
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 1000, "checkpoint": {"load_universal": True},
}
optimizer = torch.optim.AdamW(groups, lr=1e-9)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
_, client = engine.load_checkpoint(folder, load_module_only=not has_state and stage == 3)
found = {}
for name, parameter in engine.module.named_parameters():
    found[name] = safe_get_full_fp32_param(parameter).detach().clone()
    for state in ("exp_avg", "exp_avg_sq") if has_state else ():
        value = safe_get_full_optimizer_state(parameter, state)
        found[f"optimizer.state.{name}.{state}"] = value.detach().clone()
inner = engine.optimizer.optimizer
found["steps"] = [float(state["step"]) for state in inner.state.values() if "step" in state]
found["decay"] = [group["weight_decay"] for group in inner.param_groups]
found["note"] = client["note"]
loss = engine(torch.arange(8).reshape(1, 8)).float().pow(2).mean()
engine.backward(loss)
engine.step()
torch.save(found, out)
"""


def seen_by_deepspeed(
    folder: Path, out: Path, *, stage: int, n_groups: int = 2, has_state: bool = True
) -> dict[str, object]:
    """What the engine holds after loading."""
    arguments = [str(folder), str(out), str(stage), str(n_groups), "1" if has_state else "0"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [PYTHON or sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, object] = torch.load(out, weights_only=True)
    return loaded


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", ["zero1_dp2_bf16", "zero3_dp2_bf16"])
def test_every_stage_loads_what_every_stage_saved(
    golden: Path, tmp_path: Path, case: str, stage: int
) -> None:
    store = LocalStore(golden / "deepspeed" / case / "global_step10")
    catalog = deepspeed.read(store)
    loaded = seen_by_deepspeed(
        written(catalog, store, tmp_path / "made"), tmp_path / "out", stage=stage
    )
    n_seen = 0
    for key in catalog.tensors:
        tensor = loaded.get(key)
        if isinstance(tensor, torch.Tensor):
            assert tensor.numpy().tobytes() == tensor_bytes(catalog, store, key).tobytes(), key
            n_seen += 1
    assert n_seen == 36
    assert loaded["steps"] == [2.0, 2.0] and loaded["note"] == "gold"
    assert loaded["decay"] == (
        [0.1, 0.1] if stage == 3 else [0.1, 0.0]
    )  # ZeRO-3 takes the first group's for all


@pytest.mark.parametrize(("stage", "n_groups"), [(1, 2), (2, 1), (3, 2)])
def test_weights_alone_are_loaded_into_every_group(
    golden: Path, tmp_path: Path, stage: int, n_groups: int
) -> None:
    store = LocalStore(golden / "deepspeed" / "zero2_dp2_bf16" / "global_step10")
    catalog = without_optimizer(deepspeed.read(store)).catalog
    folder = written(catalog, store, tmp_path / "made")
    loaded = seen_by_deepspeed(
        folder, tmp_path / "out", stage=stage, n_groups=n_groups, has_state=False
    )
    assert len(catalog.tensors) > 1
    for key in catalog.tensors:
        if key != "inv_freq":
            tensor = loaded[key]
            assert isinstance(tensor, torch.Tensor)
            assert tensor.numpy().tobytes() == tensor_bytes(catalog, store, key).tobytes(), key
