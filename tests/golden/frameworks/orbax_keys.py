"""Saves with Orbax a tree with typed random keys, and a step with custom metadata.

    python orbax_keys.py FOLDER

``keys`` is a tree with a key of the kind threefry2x32 and four of the kind rbg; ``steps`` is the
directory of a CheckpointManager with the step 3. The program removes ``commit_success.txt``, which
names the directory that was written to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp

folder = Path(sys.argv[1]).resolve()
kinds = {"k": jax.random.key(3), "many": jax.random.split(jax.random.key(1, impl="rbg"), 4)}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "keys", {**kinds, "w": jax.numpy.arange(3.0)})
with ocp.CheckpointManager(folder / "steps") as manager:
    manager.save(
        3,
        args=ocp.args.StandardSave({"w": jax.numpy.arange(3.0)}),
        metrics={"loss": 0.5},
        custom_metadata={"run": "a", "n": 4},
    )
for file in folder.rglob("commit_success.txt"):
    file.unlink()
