"""Pipelines of diffusers: several models in subdirectories, read as one checkpoint.

On disk (``DiffusionPipeline.save_pretrained``)::

    pipeline/
    ├── model_index.json                  component → [library, class], or [null, null] without one
    ├── unet/                             a component with weights, its tensors as "unet.…"
    │   ├── config.json
    │   └── diffusion_pytorch_model.safetensors    or shards and an index, or a torch file
    ├── text_encoder/  config.json  model.safetensors
    ├── scheduler/     scheduler_config.json       a component without weights: its files are
    └── tokenizer/     tokenizer.json …            carried, byte for byte

``Catalog.files`` has the small files of all components, under their paths in the pipeline. When
safetensors are written, every tensor goes back to the directory of its component, under its own
name, so the result is a pipeline again (``PipelineFacts``).

Not supported: a component with a directory that is a pipeline itself; objects of a component, which
are listed as not carried; a pipeline that is written with some of its components only (a component
alone is a checkpoint: pass its directory).
Directories that ``model_index.json`` does not list are separate checkpoints.

Source: diffusers 0.42.1 ``pipelines/pipeline_utils.py``, whose pipeline is pinned in tests/golden
(``diffusers.tar.xz``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.attributes import ROOT
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped, dropped_each
from core.engine.catalog.facets import PipelineFacts, WeightFileFacts
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import Tensor
from core.errors import (
    CheckpointingException,
    MissingShardError,
    Report,
    UnsafeError,
    UnsupportedError,
)
from core.files.json_object import read_json_object
from core.files.store import ReadStore, check_name
from core.formats.huggingface.files import CONFIG, is_tokenizer_file, with_carried

if TYPE_CHECKING:
    from core.files.ranges import FileRange

INDEX = "model_index.json"
_MAX_INDEX_BYTES = 1 << 20
ReadComponent = Callable[[ReadStore], Catalog | None]
"""Reads the weights in a component's directory; returns None if there are none."""


def is_pipeline(store: ReadStore) -> bool:
    """Return whether a directory is a pipeline."""
    return store.entry is None and store.exists(INDEX)


def component_folders(store: ReadStore) -> tuple[str, ...]:
    """Return the names of the components that a pipeline has, in the order of its index.

    Raises:
        CorruptError: the index is not a JSON object.
        UnsafeError: a component's name leads out of the directory.
    """
    names = []
    for name, place in read_json_object(store, INDEX, max_bytes=_MAX_INDEX_BYTES).items():
        # Other entries are settings of the pipeline, such as ``requires_safety_checker``.
        is_component = isinstance(place, list) and len(place) == 2
        if is_component and isinstance(place, list) and isinstance(place[1], str):
            if "/" in check_name(name, found_in=INDEX):
                raise UnsafeError(
                    f"the component name {name!r} contains a slash, so it does not name a "
                    "subdirectory",
                    file=INDEX,
                )
            names.append(name)
    return tuple(names)


def read_pipeline(
    store: ReadStore, read: ReadComponent, *, report: Report | None = None
) -> Catalog:
    """Read the components of a pipeline as one catalog.

    Args:
        store: the pipeline's directory.
        read: reads the weights of one component.
        report: receives the error of each component that is missing; raises them by default.

    Raises:
        MissingShardError: a component is missing.
        UnsupportedError: no component has weights.
        CheckpointingException: the errors of ``read``.
    """
    folders = {*store.folders()}
    parts: dict[str, Catalog] = {}
    for name in component_folders(store):
        view = _ComponentStore(store, name)
        files = view.files()
        if name not in folders:
            error = f"{INDEX} lists the component {name}, but its directory is missing"
            _raise_or_report(MissingShardError(error, file=name, hint=_COPY), report)
            continue
        with _errors_below(name):
            part = read(view)
        if part is None:
            # A model has config.json; schedulers and processors have other names for theirs.
            if CONFIG in files and not any(map(is_tokenizer_file, files)):
                error = f"{INDEX} lists the model {name}, but its weights are missing"
                _raise_or_report(MissingShardError(error, file=name, hint=_COPY), report)
            part = with_carried(_empty(), view)
        parts[name] = part
    if not any(part.tensors for part in parts.values()) and report is None:
        raise UnsupportedError("no component of the pipeline has weights", file=store.label)
    return _joined(parts, with_carried(_empty(), store, without=component_folders(store)))


_COPY = "copy the pipeline again, with all its directories"
_NOT_A_TENSOR = "not a tensor; ckpt reads only tensors from a pipeline's models"


def _raise_or_report(error: CheckpointingException, report: Report | None) -> None:
    if report is None:
        raise error
    report(error)


def _empty() -> Catalog:
    return Catalog("safetensors", None, {})


@contextmanager
def _errors_below(component: str) -> Iterator[None]:
    """Put the component's directory before the file of an error."""
    try:
        yield
    except CheckpointingException as err:
        if err.file is not None and not err.file.startswith(f"{component}/"):
            err.file = f"{component}/{err.file}"
        raise


def _joined(parts: Mapping[str, Catalog], root: Catalog) -> Catalog:
    """Join the catalogs of the components, whose keys and files get the component's name.

    Args:
        parts: component → catalog.
        root: the small files of the pipeline's own directory.
    """
    tensors: dict[str, Tensor] = {}
    files = {**root.files}
    dropped: list[Dropped] = []
    for name, part in parts.items():
        moved = _below(part, name)
        tensors |= {f"{name}.{key}": tensor for key, tensor in moved.tensors.items()}
        files |= {f"{name}/{path}": content for path, content in moved.files.items()}
        dropped += [
            replace(
                entries,
                names=tuple(f"{name}.{key}" for key in entries.names),
                line=None if entries.line is None else f"{name}: {entries.line}",
            )
            for entries in part.dropped
        ]
        dropped += dropped_each((f"{name}.{key}" for key in part.objects), _NOT_A_TENSOR)
    facts = {name: part.facet(WeightFileFacts) for name, part in parts.items() if part.tensors}
    models = {name: fact or WeightFileFacts() for name, fact in facts.items()}
    others = [name for name, part in parts.items() if not part.tensors]
    note = f"this is a Diffusers pipeline with weights in {', '.join(models)}" + (
        f"; components without weights: {', '.join(others)}" if others else ""
    )
    return Catalog(
        "safetensors",
        None,
        tensors,
        attributes={
            name if path == ROOT else f"{name}/{path}": values
            for name, part in parts.items()
            for path, values in part.attributes.items()
        },
        files=files,
        notes=(note, *(f"{name}: {text}" for name, part in parts.items() for text in part.notes)),
        dropped=tuple(dropped),
    ).with_facet(PipelineFacts(models))


def _below(part: Catalog, component: str) -> Catalog:
    """Return the catalog of a component with its arrays in the files of the pipeline.

    Its fragments raise UnsupportedError if their bytes have to be decoded.
    """

    def moved(array: StoredArray) -> StoredArray:
        if array.extent.encoding is not None:
            raise UnsupportedError(
                "ckpt does not read compressed weight files inside a pipeline",
                file=f"{component}/{array.extent.file}",
                hint=f"convert the directory {component} by itself",
            )
        extent = replace(array.extent, file=f"{component}/{array.extent.file}")
        return replace(array, name=f"{component}.{array.name}", extent=extent)

    return part.map_tensors(lambda _, tensor: tensor.with_arrays(moved))


class _ComponentStore(ReadStore):
    """Read access to one directory of a store, under the names that files have in it."""

    def __init__(self, store: ReadStore, folder: str) -> None:
        self._store, self._folder = store, folder
        self.is_remote = store.is_remote

    @property
    def label(self) -> str:
        return f"{self._store.label}/{self._folder}"

    @property
    def entry(self) -> str | None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if name else self._folder

    def files(self, under: str = "") -> list[str]:
        return self._store.files(self._path(under))

    def folders(self, under: str = "") -> list[str]:
        return self._store.folders(self._path(under))

    def sizes(self, under: str = "") -> Mapping[str, int]:
        return self._store.sizes(self._path(under))

    def exists(self, name: str) -> bool:
        return self._store.exists(self._path(name))

    def size(self, name: str) -> int:
        return self._store.size(self._path(name))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._store.read_into(self._path(name), offset, buffer)

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        return self._store.read(self._path(name), offset, n_bytes)

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._store.read_spans(self._path(name), spans)

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        self._store.read_vector(self._path(name), offset, buffers, n_bytes)

    def expect_ranges(self, ranges: Iterable[FileRange]) -> None:
        self._store.expect_ranges((self._path(name), start, end) for name, start, end in ranges)

    def expect_headers(self, names: Iterable[str]) -> None:
        self._store.expect_headers(map(self._path, names))
