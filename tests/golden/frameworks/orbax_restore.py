"""Restores with Orbax what ckpt wrote: by all three checkpointers, with and without a target tree.

    python orbax_restore.py FOLDER

FOLDER is empty; ``ckpt`` is importable. Ends with an error unless every value is the one that torch
saved, bit for bit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import torch

jax.config.update("jax_enable_x64", True)
folder = Path(sys.argv[1]).resolve()

tree = {
    "params": {
        "dense": {"kernel": torch.arange(12.0).reshape(3, 4), "bias": torch.arange(4).bfloat16()},
        "embed.table": torch.arange(6, dtype=torch.int8).reshape(2, 3),
        "a/b": torch.arange(3.0).to(torch.float8_e4m3fn),
    },
    # More than one band of 64 MiB, and no multiple of it.
    "long": torch.arange(20_000_003, dtype=torch.int32),
    "opt": [{"count": torch.tensor(3), "mu": torch.zeros(0, 3)}, None, {}, []],
    "step": 7,
    "lr": 0.125,
}
torch.save(tree, folder / "in.pt")
for name in ("item", "run/10"):
    command = ["convert", folder / "in.pt", folder / name, "--to", "orbax", "--quiet"]
    subprocess.run([sys.executable, "-m", "ckpt_cli", *command], check=True)


def check(restored: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, dict):
        assert sorted(restored) == sorted(expected), path
        for key, value in expected.items():
            check(restored[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(restored) == len(expected), path
        for number, value in enumerate(expected):
            check(restored[number], value, f"{path}.{number}")
    elif isinstance(expected, torch.Tensor):
        array = np.asarray(restored)
        assert array.dtype.name == str(expected.dtype).removeprefix("torch."), path
        assert array.shape == tuple(expected.shape), path
        raw = expected.reshape(-1).view(torch.uint8) if expected.numel() else torch.zeros(0)
        assert array.tobytes() == raw.numpy().tobytes(), path
    else:
        assert restored == expected, path


restored = ocp.StandardCheckpointer().restore(folder / "item")
check(restored, tree)
check(ocp.PyTreeCheckpointer().restore(folder / "item"), tree)
manager = ocp.CheckpointManager(folder / "run")
assert manager.latest_step() == 10
check(manager.restore(10), tree)

# Onto a device, as a training run does.
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = jax.tree.map(
    lambda leaf: (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if isinstance(leaf, np.ndarray)
        else leaf
    ),
    restored,
)
on_device = manager.restore(10, args=ocp.args.StandardRestore(target))
assert isinstance(on_device["params"]["dense"]["bias"], jax.Array)
check(on_device, tree)

# Typed random keys that Orbax saved stay typed keys.
kinds = {"k": jax.random.key(3), "many": jax.random.split(jax.random.key(1, impl="rbg"), 4)}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "keys", kinds)
command = ["convert", folder / "keys", folder / "keys_again", "--to", "orbax", "--quiet"]
subprocess.run([sys.executable, "-m", "ckpt_cli", *command], check=True)
again = ocp.StandardCheckpointer().restore(folder / "keys_again")
for name, key in kinds.items():
    assert again[name].dtype == key.dtype, name
    assert (jax.random.key_data(again[name]) == jax.random.key_data(key)).all(), name
