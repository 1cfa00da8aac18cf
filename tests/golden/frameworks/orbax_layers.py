"""Saves with Orbax a tree whose layers are stacked along axis 1, as MaxText does (param_scan_axis).

    python orbax_layers.py FOLDER

Names and axes are those of MaxText's Llama decoder (``scan_layers``); the values of the array that
is number n by name count up from 1000 n. The arrays are distributed over four devices, so that each
is stored in several chunks, in some of them cut along the axis of layers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

EMBED, LAYERS, HEADS, HEAD_DIM, MLP = 8, 4, 2, 4, 12

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
layers = {
    "mlp.wi_0.kernel": ((EMBED, LAYERS, MLP), ("x", None, "y")),
    "mlp.wo.kernel": ((MLP, LAYERS, EMBED), ("x", "y", None)),
    "pre_self_attention_layer_norm.scale": ((EMBED, LAYERS), ("x", None)),
    "self_attention.out.kernel": ((HEADS, LAYERS, HEAD_DIM, EMBED), (None, None, "y", "x")),
    "self_attention.query.kernel": ((EMBED, LAYERS, HEADS, HEAD_DIM), ("x", None, "y", None)),
}
params = {f"decoder.layers.{name}": value for name, value in layers.items()}
params["decoder.decoder_norm.scale"] = ((EMBED,), ("x",))
params["token_embedder.embedding"] = ((16, EMBED), ("y", "x"))
leaves = {f"params.params.{name}": value for name, value in params.items()}
for moment in ("mu", "nu"):
    leaves |= {f"opt_state.0.{moment}.params.{name}": value for name, value in params.items()}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *above, last = path.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


arrays: dict[str, Any] = {}
for number, name in enumerate(sorted(leaves)):
    shape, axes = leaves[name]
    value = (1000 * number + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)
    arrays[name] = jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))
folder = Path(sys.argv[1]).resolve() / "maxtext"
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, nested(arrays))
(folder / "commit_success.txt").unlink()  # it names the folder
