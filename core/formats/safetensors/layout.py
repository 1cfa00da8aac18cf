"""Laying out safetensors files: the tensors of each file, and the files around them.

On disk: ``model.safetensors``, or ``model-00001-of-0000n.safetensors …`` and
``model.safetensors.index.json``; beside them the small files (``huggingface.files``) and
``ckpt-objects.pt`` (``torch.side_file``).

Shards are filled in the order of the catalog, as huggingface_hub fills them, save that a tensor
that is larger than a file may be ends the file before it.

Source: huggingface_hub 2.4 ``serialization/_base.py``; transformers 5.23 ``modeling_utils.py`` (the
    index's spelling).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from core.catalog.catalog import TargetCatalog
from core.catalog.facets import WeightFileFacts
from core.catalog.file_image import FileImage, literal_file
from core.catalog.stored import PlannedArray
from core.errors import UnsupportedError
from core.formats.huggingface.files import file_images
from core.formats.safetensors.files import INDEX_SUFFIX, STEMS, SUFFIX
from core.formats.safetensors.header import file_image
from core.formats.torch.side_file import objects_image

DEFAULT_FILE_BYTES = 5_000_000_000
"""huggingface_hub's own, so that shards are as people know them."""
DEFAULT_METADATA = {"format": "pt"}
"""What transformers and safetensors.torch write; transformers before 5 refused files without it."""


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Return the images of a directory: weights, the small files around them, objects, and the
    index last.

    Args:
        target: every tensor is one array. A tensor that its ``aliases`` call equal to another is
            not written; its name is recorded in the metadata of the file that holds the other.
            ``core.formats.safetensors.format`` lists the other fields that are used.

    Raises:
        UnsupportedError: the format has no such dtype or name, a tensor is in several pieces, or an
            object was not read.
    """
    # Distribute the tensors over files.
    aliases = _kept_aliases(target)
    arrays = {key: target.whole_array(key) for key in target.tensors if key not in aliases}
    shards = _shards(arrays, _max_bytes(target))
    facts = target.facet(WeightFileFacts)
    stem = facts.stem if facts is not None and facts.stem in STEMS else STEMS[0]
    metadata = _written_metadata(target)
    # Each file records the aliases of its tensors.
    weights = []
    file_of: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        name = stem + (f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "") + SUFFIX
        file_of |= dict.fromkeys(keys, name)
        keys_in_file = set(keys)
        recorded = {key: first for key, first in aliases.items() if first in keys_in_file}
        weights.append(
            file_image(name, {key: arrays[key] for key in keys}, {**metadata, **recorded})
        )
    if target.write.is_file:
        return tuple(weights)
    # Small files, objects and the index complete a directory.
    images = [*weights, *file_images(target)]
    objects = objects_image(target)
    if objects is not None:
        images.append(objects)
    if len(shards) > 1:
        total = sum(array.n_bytes for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        images.append(literal_file(stem + INDEX_SUFFIX, text.encode(), is_metadata=True))
    # A carried file may have the name of one that is written.
    paths: set[str] = set()
    for image in images:
        if image.path in paths:
            raise UnsupportedError("two files would have the same name", file=image.path)
        paths.add(image.path)
    return tuple(images)


def _max_bytes(target: TargetCatalog) -> int | None:
    """Return the maximum number of tensor bytes in one file; None for no limit."""
    if target.write.is_file:
        return None
    limit = target.write.max_file_bytes
    return DEFAULT_FILE_BYTES if limit is None else limit


def _shards(arrays: Mapping[str, PlannedArray], max_bytes: int | None) -> list[list[str]]:
    """Return the keys of each file, filled in order.

    A new file begins when the next tensor does not fit; there is at least one file.
    """
    shards: list[list[str]] = [[]]
    n_bytes = 0
    for key, array in arrays.items():
        if max_bytes is not None and shards[-1] and n_bytes + array.n_bytes > max_bytes:
            shards.append([])
            n_bytes = 0
        shards[-1].append(key)
        n_bytes += array.n_bytes
    return shards


def _written_metadata(target: TargetCatalog) -> dict[str, str]:
    """Return ``__metadata__`` without aliases: the source's, and the ``format`` that transformers
    asks for.
    """
    facts = target.facet(WeightFileFacts)
    return {**DEFAULT_METADATA, **({} if facts is None else facts.metadata)}


def _kept_aliases(target: TargetCatalog) -> dict[str, str]:
    """Return key → key whose bytes serve for it, if both have equal form and the name can be
    recorded.
    """
    stated = target.aliases
    metadata = _written_metadata(target)
    aliases: dict[str, str] = {}
    for key, first in stated.items():
        first = stated.get(first, first)
        alias, original = target.tensors.get(key), target.tensors.get(first)
        is_alike = (
            alias is not None
            and original is not None
            and (alias.dtype, alias.shape) == (original.dtype, original.shape)
        )
        if is_alike and key != first and first not in stated and key not in metadata:
            aliases[key] = first
    return aliases
