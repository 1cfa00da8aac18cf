"""Find the description of a Megatron model that was saved without training arguments.

::

    global_step_10/actor/dist_ckpt/             verl: torch_dist
    global_step_10/actor/huggingface/           config.json, tokenizer
    global_step_10/actor/{model,optimizer,extra}/dist_ckpt/     newer verl: one checkpoint
    global_step_10/actor/model/huggingface/
    global_step_10/policy/                      SkyRL: torch_dist
    global_step_10/policy/huggingface/
    model--…-last/weights/                      NeMo 2: torch_dist
    model--…-last/context/model.yaml
    gpt/model_weights/                          NeMo 1, unpacked: torch_dist or zarr
    gpt/model_config.yaml
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException
from core.files.json_object import parse_json_object
from core.files.source_store import open_store
from core.formats.huggingface.files import CONFIG, config_document_of
from core.pickle.inert import as_mapping

if TYPE_CHECKING:
    from core.hf.family import Family

HUGGING_FACE = "huggingface"
"""Directory with the configuration, the tokenizer and perhaps a copy of the weights."""
_ATTENTION = ".self_attention."
"""Part of some names of each Megatron model (``core.megatron.rules.prefixes``)."""
_FOLDERS = ("", HUGGING_FACE, f"model/{HUGGING_FACE}")
"""Folders with a ``config.json``, below the checkpoint; without ``model``, next to it, too."""


def with_description(catalog: Catalog, path: Path, *, iteration: int | None) -> Catalog:
    """Return a checkpoint with the training arguments that a file beside it stands for.

    A checkpoint with arguments of its own, or without Megatron's names, is returned as it is. A
    file that cannot be used is noted: the tensors do not depend on it.

    Args:
        path: directory of the checkpoint.
        iteration: number in the name of a directory, or None.
    """
    if not lacks_arguments(catalog):
        return catalog
    from core.formats.mcore.nemo_config import (
        MODEL_WEIGHTS,
        WEIGHTS,
        with_nemo_config,
        with_nemo_context,
    )

    if catalog.common is not None and path.name == WEIGHTS:
        with closing(open_store(path.parent)) as above:
            catalog = with_nemo_context(catalog, above)
        if catalog.args is not None:
            return catalog
    for folder in (path, *((path.parent,) if path.name == MODEL_WEIGHTS else ())):
        with closing(open_store(folder)) as store:
            catalog = with_nemo_config(catalog, store) if folder.is_dir() else catalog
        if catalog.args is not None:
            return catalog
    for folder in (*(path / name for name in _FOLDERS), path.parent / HUGGING_FACE):
        with closing(open_store(folder)) as store:
            document = config_document_of(store) if folder.is_dir() else None
        if document is None:
            continue
        file = f"{folder.name}/{CONFIG}" if folder != path else CONFIG
        try:
            return with_config_arguments(catalog, document, file=file, iteration=iteration)
        except CheckpointingException as err:
            note = f"ckpt could not derive the training arguments from {file}: {err.message}"
            return replace(catalog, notes=(*catalog.notes, note))
    return catalog


def may_have_arguments(catalog: Catalog) -> bool:
    """Return whether a catalog has an entry that may be Megatron's training arguments."""
    return (
        catalog.args is not None
        or catalog.common is not None
        or "args" in catalog.objects
        or "args" in (as_mapping(catalog.skeleton) or {})
    )


def lacks_arguments(catalog: Catalog) -> bool:
    """Return whether global tensors have Megatron's names, but no training arguments."""
    if catalog.args is not None or "args" in catalog.objects or catalog.is_rank_local:
        return False
    # Other names need no rules, whose table takes a while to read.
    if not any(_ATTENTION in key for key in catalog.tensors):
        return False
    from core.megatron.rules.prefixes import has_megatron_names
    from core.megatron.rules.tables import load_rules

    return has_megatron_names(catalog, load_rules())


def with_config_arguments(
    catalog: Catalog,
    document: bytes,
    *,
    file: str,
    iteration: int | None = None,
    family: Family | None = None,
) -> Catalog:
    """Return a catalog that lacks training arguments with those that a ``config.json`` stands for.

    Args:
        document: content of the file, whose name is ``file``.
        iteration: number of the iteration, if the metadata does not record it.
        family: the model's family, if the user describes it.

    Raises:
        UnsupportedError, CorruptError, MissingShardError: as for ``derive_arguments``.
    """
    from core.formats.mcore.run_config import with_arguments
    from core.hf.config_json.megatron_arguments import derive_arguments

    config = parse_json_object(document, file=file)
    fields = derive_arguments(
        catalog, config, document=document, iteration=iteration, family=family
    )
    common: dict[object, object] = {"checkpoint_version": 3.0, "iteration": fields["iteration"]}
    note = f"the training arguments were derived from {file}"
    return with_arguments(catalog, common, fields, note=note)
