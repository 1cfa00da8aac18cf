"""Laying out safetensors files: the tensors of each file, and the other files in the directory.

On disk: ``model.safetensors``, or ``model-00001-of-0000n.safetensors …`` and
``model.safetensors.index.json``; next to them the small files (``huggingface.files``) and
``ckpt-objects.pt`` (``torch.side_file``).

Shards are filled in the order of the catalog, as in huggingface_hub, with one difference: a tensor
larger than the maximum file size also ends the previous file.

Source: huggingface_hub 2.4 ``serialization/_base.py``; transformers 5.23 ``modeling_utils.py``
    (format of the index).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from core.engine.catalog.attributes import BY_PATH, ROOT, Attributes
from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.facets import PipelineFacts, WeightFileFacts, WriteOptions
from core.engine.catalog.file_image import FileImage, literal_file
from core.engine.catalog.stored import PlannedArray
from core.errors import UnsupportedError
from core.formats.format import check_dtypes
from core.formats.huggingface.files import file_images
from core.formats.huggingface.index import INDEX_SUFFIX as ANY_INDEX_SUFFIX
from core.formats.safetensors.files import DEFAULT_METADATA, INDEX_SUFFIX, STEMS, SUFFIX
from core.formats.safetensors.header import file_image
from core.formats.torch.side_file import objects_image

DEFAULT_FILE_BYTES = 5_000_000_000
"""The default of huggingface_hub, so that shards are the usual ones."""


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Lay out a directory: weights, the small files, objects, and the index last.

    Args:
        target: every tensor is one array. A tied tensor is written under its first key; the others
            are recorded in the metadata of its file.
            ``core.formats.safetensors.format`` lists the other fields that are used.

    Returns:
        The layouts of the files; with ``WriteOptions.is_file`` only that of one weight file.

    Raises:
        UnsupportedError: the format cannot store a dtype or name, a tensor is in several chunks, an
            object was not read, or two files have the same name.
    """
    check_dtypes(
        {key: tensor.dtype for key, tensor in target.tensors.items()},
        lambda dtype: dtype.safetensors is not None,
        owner="safetensors",
    )
    pipeline = target.facet(PipelineFacts)
    if target.write.is_file or pipeline is None:
        facts = target.facet(WeightFileFacts) or WeightFileFacts()
        models = _images_of_models(target, facts)
    else:
        models = [
            _model_images(target, _keys_of_model(target, name, pipeline), facts, model=name)
            for name, facts in pipeline.models.items()
        ]
    weights = [image for model in models for image in model if not image.is_metadata]
    if target.write.is_file:
        return tuple(weights)

    # Add the small files, the objects and the indexes.
    objects = objects_image(target)
    images = [*weights, *file_images(target), *([] if objects is None else [objects])]
    images += [image for model in models for image in model if image.is_metadata]

    # A carried file may have the name of a file that is written.
    path, n_files = Counter(image.path for image in images).most_common(1)[0]
    if n_files > 1:
        raise UnsupportedError("two output files would have the same name", file=path)
    return tuple(images)


def _images_of_models(target: TargetCatalog, facts: WeightFileFacts) -> list[list[FileImage]]:
    """Lay out the weight files of the model, and of accelerate's further models.

    A further model is one file, as accelerate reads it.
    """
    stem_of = {
        key: next((stem for stem in facts.further_models if key.startswith(f"{stem}.")), None)
        for key in target.tensors
    }
    if target.write.is_file or not any(stem_of.values()):
        return [_model_images(target, {key: key for key in target.tensors}, facts)]
    models = [
        _model_images(target, {key: key for key in target.tensors if not stem_of[key]}, facts)
    ]
    for stem in dict.fromkeys(filter(None, stem_of.values())):
        name_of = {
            key: key.removeprefix(f"{stem}.") for key in target.tensors if stem_of[key] == stem
        }
        arrays = {name: target.whole_array(key) for key, name in name_of.items()}
        own = {name: str(text) for name, text in target.attributes.get(stem, {}).items()}
        models.append([file_image(f"{stem}{SUFFIX}", arrays, {**DEFAULT_METADATA, **own})])
    return models


def _keys_of_model(target: TargetCatalog, model: str, pipeline: PipelineFacts) -> dict[str, str]:
    """Return key → name in the model's own files, of the tensors of one model of a pipeline.

    Raises:
        UnsupportedError: the model has no tensors, or a tensor belongs to no model.
    """
    for key in target.tensors:
        if key.partition(".")[0] not in pipeline.models:
            raise UnsupportedError(
                "the tensor does not belong to any model of the pipeline "
                f"({', '.join(pipeline.models)})",
                key=key,
                hint="keep the model names in the keys, or write a different format, such as "
                "--to dcp",
            )
    keys = {
        key: key.removeprefix(f"{model}.") for key in target.tensors if key.startswith(f"{model}.")
    }
    if not keys:
        raise UnsupportedError(
            f"the pipeline would have no weights for {model}",
            hint="to convert only part of the pipeline, pass that part's directory",
        )
    return keys


def _model_images(
    target: TargetCatalog, name_of: Mapping[str, str], facts: WeightFileFacts, *, model: str = ""
) -> list[FileImage]:
    """Lay out the weight files of one model and, for several, their index.

    Args:
        name_of: key → name in the files, of the model's tensors.
        facts: the stem of the files.
        model: the model of a pipeline, which names the directory of the files; "" if there is one.
    """
    stem = facts.stem if facts.stem in STEMS else STEMS[0]
    folder = f"{model}/" if model else ""
    # The attributes of the root and of the indexes have places of their own, if they are text and
    # there is an index.
    root = target.attributes.get(model, {})
    metadata = {**DEFAULT_METADATA, **_texts(root, {*name_of.values()})}
    of_index: dict[str, object] = {}
    others: dict[str, Attributes] = {
        ROOT: {name: value for name, value in root.items() if metadata.get(name) is not value}
    }
    for path, values in target.attributes.items():
        if path.startswith(folder) and path.endswith(ANY_INDEX_SUFFIX):
            of_index |= values
        if not model and path not in (ROOT, *facts.further_models):
            others[path] = values

    # Distribute the tensors over files.
    ties = target.ties
    taken = next((key for key in name_of if key in ties and name_of[key] in metadata), None)
    if taken is not None:
        raise UnsupportedError(
            "safetensors records tied tensors in the metadata, which already has a different entry "
            "with this name",
            key=taken,
            hint=f"write it as a separate tensor with --untie {taken}={ties[taken]}",
        )
    arrays = {key: target.whole_array(key) for key in name_of if key not in ties}
    shards = _fill_files(arrays, target.write)

    # Each file records the other names of its tensors.
    images = []
    file_of: dict[str, str] = {}
    has_index = len(shards) > 1 and not target.write.is_file
    if has_index:
        others = {
            path: item for path, item in others.items() if not path.endswith(ANY_INDEX_SUFFIX)
        }
    for number, keys in enumerate(shards, start=1):
        name = stem + (f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "") + SUFFIX
        file_of |= {name_of[key]: name for key in keys}
        keys_in_file = set(keys)
        recorded = {
            name_of[key]: name_of[original]
            for key, original in ties.items()
            if original in keys_in_file
        }
        tensors = {name_of[key]: arrays[key] for key in keys}
        of_tensors = {name_of[key]: target.tensors[key].attributes or {} for key in keys}
        by_path = {path: dict(item) for path, item in {**others, **of_tensors}.items() if item}
        if by_path:
            recorded[BY_PATH] = json.dumps(by_path, sort_keys=True)
        images.append(file_image(f"{folder}{name}", tensors, {**metadata, **recorded}))
    if has_index:
        total = sum(array.n_bytes for array in arrays.values())
        index = {"metadata": {**of_index, "total_size": total}, "weight_map": file_of}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        path = f"{folder}{stem}{INDEX_SUFFIX}"
        images.append(literal_file(path, text.encode(), is_metadata=True))
    return images


def _texts(attributes: Attributes, names: Collection[str]) -> dict[str, str]:
    """Return those attributes that can be members of ``__metadata__``: texts.

    The name of a tensor would be taken for an alias of it.

    Args:
        names: names of the model's tensors.
    """
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, str) and name != BY_PATH and value not in names
    }


def _fill_files(arrays: Mapping[str, PlannedArray], options: WriteOptions) -> list[list[str]]:
    """Return the keys of each file's tensors; a tensor that does not fit begins a new file."""
    max_bytes = DEFAULT_FILE_BYTES if options.max_file_bytes is None else options.max_file_bytes
    files: list[list[str]] = [[]]
    n_bytes = 0
    for key, array in arrays.items():
        if not options.is_file and files[-1] and n_bytes + array.n_bytes > max_bytes:
            files.append([])
            n_bytes = 0
        files[-1].append(key)
        n_bytes += array.n_bytes
    return files
