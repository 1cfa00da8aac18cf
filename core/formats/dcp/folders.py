"""One save in several DCP directories: accelerate and verl store model and optimizer separately.

On disk (``Accelerator.save_state`` and transformers' Trainer, with FSDP and sharded state dicts)::

    checkpoint_0/
    ├── pytorch_model_fsdp_0/    DCP: "model.<fqn>"
    ├── optimizer_0/             DCP: "optimizer.state.<fqn>.exp_avg",
    │                                 "optimizer.param_groups.<fqn>.lr" …
    ├── pytorch_model_fsdp_1/    a second model, its entries again under "model"
    └── scheduler.bin  random_states_0.pkl …    not part of the DCP

verl writes torch_dist checkpoints (``core.formats.dcp.torch_dist``), each with a common state::

    actor/
    ├── model/dist_ckpt/         unless the weights are in model/huggingface
    ├── optimizer/dist_ckpt/     and the scheduler
    ├── extra/dist_ckpt/         random states
    └── model/huggingface/  transformer_config.json  ckpt_contents.json

They are read as one checkpoint: entries keep their names, except that those of the second model and
optimizer begin with ``model_1`` and ``optimizer_1``. Names of item files are relative to the parent
directory.

Not supported: one file per rank without DCP (``use_dcp=False``).

Source: accelerate 1.15.0 ``utils/fsdp_utils.py`` (``save_fsdp_model``, ``save_fsdp_optimizer``),
whose directories are pinned in tests/golden (``accelerate/fsdp2_dp2``); verl 1dda039b
``utils/checkpoint/megatron_checkpoint_manager.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.errors import UnsupportedError

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.dcp.columns import DcpMetadata

_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d{1,4})")
_MODEL = "pytorch_model_fsdp"
DIST_CKPT = "dist_ckpt"
"""Directory of a torch_dist checkpoint of verl."""
_PARTS = ("model", "optimizer", "extra")


def dcp_folders(store: ReadStore) -> tuple[str, ...]:
    """Return the directories of one checkpoint, models first; () without a model's directory."""
    parts = list_torch_dist_folders(store)
    if parts:
        return parts
    matches = [match for match in map(_FOLDER.fullmatch, store.folders()) if match is not None]
    if not any(match[1] == _MODEL for match in matches):
        return ()
    return tuple(
        match[0] for match in sorted(matches, key=lambda match: (match[1] != _MODEL, int(match[2])))
    )


def list_torch_dist_folders(store: ReadStore) -> tuple[str, ...]:
    """Return verl's directories of one torch_dist checkpoint, the model's first; () if it is none.

    An optimizer's or a random state's directory alone is not a model's checkpoint.
    """
    names = store.folders()
    parts = [f"{part}/{DIST_CKPT}" for part in _PARTS if part in names]
    parts = [folder for folder in parts if store.files(folder)]
    return tuple(parts) if len(parts) > 1 else ()


def join_folders(parts: Sequence[tuple[str, DcpMetadata]], store: ReadStore) -> DcpMetadata:
    """Join the metadata of several directories into one.

    Args:
        parts: each directory with its metadata.
        store: the parent directory.

    Raises:
        CorruptError: planner_data gives an entry different paths in two directories.
        UnsupportedError: two directories contain an entry with the same name.
    """
    from core.formats.dcp.rank_metadata import merge_rank_metadata

    shifted = [_as_seen_from_parent(metadata, folder) for folder, metadata in parts]
    owner: dict[str, str] = {}
    for (folder, _), metadata in zip(parts, shifted, strict=True):
        for key in (*metadata.tensors, *metadata.objects):
            if owner.setdefault(key, folder) != folder:
                raise UnsupportedError(
                    f"{owner[key]} and {folder} both contain an entry with this name",
                    file=folder,
                    key=key,
                    hint="pass one of these directories as the source",
                )
    return merge_rank_metadata(shifted, store)


def _as_seen_from_parent(metadata: DcpMetadata, folder: str) -> DcpMetadata:
    """Return the metadata of a directory with keys and file names as seen from its parent."""
    match = _FOLDER.fullmatch(folder)
    # accelerate names the entries of every model "model"; the number keeps them distinct.
    suffix = "" if match is None or int(match[2]) == 0 else f"_{int(match[2])}"

    def renamed(key: str) -> str:
        first, dot, rest = key.partition(".")
        return f"{first}{suffix}{dot}{rest}"

    paths = metadata.planner_data
    if paths is not None:
        paths = {renamed(key): (renamed(str(path[0])), *path[1:]) for key, path in paths.items()}
    return replace(
        metadata,
        tensors={
            (name := renamed(key)): tensor._replace(key=name)
            for key, tensor in metadata.tensors.items()
        },
        files=[f"{folder}/{file}" for file in metadata.files],
        objects={
            renamed(key): item._replace(file=f"{folder}/{item.file}")
            for key, item in metadata.objects.items()
        },
        planner_data=paths,
        orphans=tuple(map(renamed, metadata.orphans)),
        object_descriptors={
            renamed(key): names for key, names in metadata.object_descriptors.items()
        },
    )
