"""Check that a format keeps the contract of all formats; plug-in authors can run the checks too.

::

    from core.verbs.convert.contract import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_format_keeps_the_contract(check, tmp_path):
        check(FORMAT, tmp_path)

A check writes a small checkpoint through the engine, reads it back, damages it, and raises
``AssertionError`` with a sentence about the problem. For formats that cannot store everything, a
``Sample`` defines the content of the checkpoint. For formats that are only read, ``check_reading``
takes a checkpoint that other software wrote.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import field
from math import prod
from pathlib import Path

from core.arrays.dtypes import DTYPES, itemsize
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog, catalog_of_arrays
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import whole_tensor
from core.engine.copy.run import execute
from core.engine.plan.match import match
from core.engine.plan.plan import make_plan
from core.errors import CheckpointingException, UnsupportedError
from core.files.store import LocalStore, MemoryStore, ReadStore, check_name
from core.formats.format import Format
from core.opening.objects import loaded
from core.opening.target import source_and_target
from core.publish.manifest.of_copy import finish_files
from core.publish.stage.files import StageStore
from core.values import dataclass

_METADATA_BYTES = 1 << 20
"""Maximum number of bytes that ``read`` may fetch of the sample, whose largest tensor is longer."""


def _sample_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return key → (dtype, shape) with every dtype in an odd shape, and every kind of shape."""
    dtypes = {
        f"dtypes.{name}": (name, (3, 6) if name == "float4_e2m1fn_x2" else (3, 5))
        for name in DTYPES
    }
    return {
        **dtypes,
        "model.large.weight": ("bfloat16", (1024, 1025)),
        "model.scalar": ("float32", ()),
        "model.empty": ("float32", (0, 4)),
        "model.one": ("int64", (1,)),
        "model.deep": ("float32", (2, 1, 3, 2)),
        "model.layers.0.self_attention.linear_qkv.weight": ("bfloat16", (12, 7)),
        "model.layers.10.self_attention.linear_qkv.weight": ("bfloat16", (12, 7)),
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """The content of the checkpoints that the checks write.

    Args:
        tensors: key → (dtype, shape). Tensors of a dtype that the format refuses are skipped.
        objects: key → plain value.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=_sample_tensors)
    objects: Mapping[str, object] = field(
        default_factory=lambda: {
            "step": 7,
            "settings": {"lr": 0.125, "betas": [0.9, 0.95], "name": "run é", "no": None},
        }
    )


SAMPLE = Sample()


def check_facts(format: Format, folder: Path, sample: Sample = SAMPLE) -> None:
    """Check a format's names, and that it recognises no directory of notes."""
    for name in (format.name, *format.aliases):
        assert name == name.lower() and name.replace("_", "a").isalnum(), (
            f"{name!r} is not a plain name"
        )
    assert format.title.strip(), "the title is empty"
    assert not format.suffixes or format.is_single_file, (
        "only a destination that is one file has suffixes"
    )
    empty = folder / "empty"
    empty.mkdir()
    assert not format.sniff(LocalStore(empty)), "an empty directory is sniffed as this format"
    (empty / "notes.txt").write_text("no checkpoint")
    (empty / "deeper").mkdir()
    assert not format.sniff(LocalStore(empty)), "a directory of notes is sniffed as this format"
    assert not format.sniff(LocalStore(empty, entry="notes.txt")), (
        "a text file is sniffed as this format"
    )


def check_images(format: Format, folder: Path, sample: Sample = SAMPLE) -> None:
    """Check that ``lay_out`` is pure, names files safely, and claims no byte twice."""
    if format.lay_out is None:
        return
    source, target, _ = _source_and_target(format, sample)

    # Two calls give the same files.
    images, again = list(format.lay_out(target)), list(format.lay_out(target))
    assert [(i.path, i.size, i.is_metadata) for i in images] == [
        (i.path, i.size, i.is_metadata) for i in again
    ]
    assert images, "lay_out returned no files"
    assert len({image.path for image in images}) == len(images), "two files have the same name"

    # In each file the arrays are in order, and neither arrays nor literals overlap.
    for image, repeated in zip(images, again, strict=True):
        check_name(image.path)
        literals = sorted(image.literals(lambda name: 5))
        assert literals == sorted(repeated.literals(lambda name: 5)), (
            f"{image.path}: literals differ between two calls"
        )
        ranges = [
            (placed.offset, placed.array.n_bytes, placed.array.name) for placed in image.arrays
        ]
        assert ranges == sorted(ranges, key=lambda item: item[0]), (
            f"{image.path}: arrays are not in order of offset"
        )
        ranges += [(offset, len(data), "a literal") for offset, data in literals]
        end, last = 0, "the start"
        for offset, n_bytes, name in sorted(ranges, key=lambda item: item[0]):
            if n_bytes == 0:
                continue
            assert offset >= end, (
                f"{image.path}: {name} at byte {offset} overlaps {last}, which ends at {end}"
            )
            end, last = offset + n_bytes, name
        assert end <= image.size, (
            f"{image.path}: {last} ends at byte {end}, the file at {image.size}"
        )
    make_plan(source, target, images)


def check_round_trip(format: Format, folder: Path, sample: Sample = SAMPLE) -> None:
    """Check that a sample is read back equal, and that two runs write the same bytes."""
    if format.lay_out is None:
        return
    source, store, specs = _write_sample(format, folder / "one", sample)
    _write_sample(format, folder / "two", sample)
    files = _files(folder / "one")
    assert files == _files(folder / "two"), "two runs wrote different bytes"

    # Reading fetches metadata only.
    read_store = _CountingStore(LocalStore(folder / "one"))
    assert format.sniff(read_store), "what was written is not recognized as this format"
    catalog = format.read(read_store)
    large = max(prod(shape) * itemsize(dtype) for dtype, shape in specs.values())
    if large > _METADATA_BYTES:
        assert read_store.n_bytes < _METADATA_BYTES, (
            f"read fetched {read_store.n_bytes} bytes: data, not metadata"
        )

    # Every key, dtype, shape, byte and object comes back, and nothing else.
    _check_tensors(catalog, specs)
    _check_fragments(catalog)
    expected, actual = _contents(source, store, specs), _contents(catalog, read_store, specs)
    for key in specs:
        assert actual[key] == expected[key], f"the bytes of {key} differ"
    if format.keeps_objects:
        objects = _objects(catalog, read_store)
        for key, value in sample.objects.items():
            assert objects.get(key) == value, f"object {key} came back as {objects.get(key)!r}"


def _check_tensors(catalog: Catalog, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Check that a catalog has exactly the tensors of ``specs``, with their dtypes and shapes."""
    for key, (dtype, shape) in specs.items():
        tensor = catalog.tensors.get(key)
        assert tensor is not None, (
            f"tensor {key} was not read back; the catalog has {list(catalog.tensors)[:8]} …"
        )
        assert (tensor.dtype, tensor.shape) == (dtype, shape), (
            f"{key} came back as {tensor.dtype} {tensor.shape}"
        )
    extra = set(catalog.tensors) - set(specs)
    assert not extra, f"unexpected tensors: {sorted(extra)[:4]}"


def check_refused_dtypes(format: Format, folder: Path, sample: Sample = SAMPLE) -> None:
    """Check that an unsupported dtype is refused with the tensor's name and a hint."""
    if format.lay_out is None:
        return
    for key, (dtype, shape) in sample.tensors.items():
        refusal = _refusal(format, Sample({"fine": ("float32", (2,)), key: (dtype, shape)}, {}))
        if refusal is not None:
            assert refusal.key == key, (
                f"the refusal of {dtype} does not name the tensor: {refusal.message}"
            )
            assert refusal.hint, f"the refusal of {dtype} offers nothing: {refusal.message}"


def check_damage(format: Format, folder: Path, sample: Sample = SAMPLE) -> None:
    """Check that truncated, missing or changed files lead only to the project's own errors."""
    if format.lay_out is None:
        return
    _write_sample(
        format, folder / "sample", Sample(dict(list(sample.tensors.items())[-6:]), sample.objects)
    )
    check_reading(format, folder / "sample", folder / "damage")


def check_reading(format: Format, path: Path, scratch: Path, *, n_flips: int = 40) -> None:
    """Check that a checkpoint in this format can be read, and damaged copies raise typed errors.

    Args:
        format: the format.
        path: a small, complete checkpoint directory or file.
        scratch: a directory that does not exist yet, for a copy that is damaged in one place after
            the other.
        n_flips: number of times that a byte is changed.
    """
    entry = None if path.is_dir() else path.name
    if entry is None:
        shutil.copytree(path, scratch)
    else:
        scratch.mkdir(parents=True)
        shutil.copy(path, scratch)

    # The checkpoint itself reads well.
    with closing(LocalStore(scratch, entry=entry)) as store:
        assert format.sniff(store), f"{path} is not sniffed as {format.name}"
        catalog = format.read(store)
        assert catalog.tensors, "the checkpoint has no tensors"
        if not catalog.is_rank_local:
            _check_fragments(catalog)
    intact = _files(scratch)
    chance = random.Random(5)

    # Damage it: some files are cut short, emptied or removed, and single bytes are changed.
    damaged: list[tuple[str, bytes | None]] = []
    for name in chance.sample(list(intact), min(len(intact), 12)):
        data = intact[name]
        damaged += [(name, data[: -max(1, len(data) // 3)]), (name, b""), (name, None)]
    for _ in range(n_flips):
        name = chance.choice(list(intact))
        damaged.append((name, _flip_byte(intact[name], at=chance.random())))

    # Reading each damaged copy works or raises one of the project's errors; then it is mended.
    for name, content in damaged:
        (scratch / name).unlink()
        if content is not None:
            (scratch / name).write_bytes(content)
        with closing(LocalStore(scratch, entry=entry)) as store:
            _check_damaged(format, store)
        (scratch / name).write_bytes(intact[name])


def _check_damaged(format: Format, store: LocalStore) -> None:
    """Check that reading a damaged checkpoint works or raises one of the project's errors."""
    with suppress(CheckpointingException):
        if format.sniff(store):
            catalog = format.read(store)
            if not catalog.is_rank_local:
                _contents(
                    catalog,
                    store,
                    {key: (tensor.dtype, tensor.shape) for key, tensor in catalog.tensors.items()},
                )


def _flip_byte(data: bytes, *, at: float) -> bytes:
    """Return the bytes with one of them changed; ``at`` is its position, from 0 to 1."""
    flipped = bytearray(data)
    if data:
        flipped[int(at * len(data))] ^= 0x15
    return bytes(flipped)


CHECKS: tuple[Callable[..., None], ...] = (
    check_facts,
    check_images,
    check_round_trip,
    check_refused_dtypes,
    check_damage,
)
"""All checks; each takes a format, a new directory, and optionally a ``Sample``."""


class _CountingStore(ReadStore):
    """A store that counts the bytes that are fetched from it."""

    entry: str | None = None
    label = ""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.entry = store.entry
        self.label = store.label
        self.n_bytes = 0

    def files(self, under: str = "") -> list[str]:
        return self._store.files(under)

    def folders(self, under: str = "") -> list[str]:
        return self._store.folders(under)

    def sizes(self, under: str = "") -> Mapping[str, int]:
        return self._store.sizes(under)

    def exists(self, name: str) -> bool:
        return self._store.exists(name)

    def size(self, name: str) -> int:
        return self._store.size(name)

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        self.n_bytes += n_bytes
        return self._store.read(name, offset, n_bytes)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.n_bytes += len(buffer)
        self._store.read_into(name, offset, buffer)

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(name, offset, n_bytes) for offset, n_bytes in spans]

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._store.read_vector(name, offset, buffers, n_bytes)


def _content(key: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    data = hashlib.shake_128(key.encode()).digest(prod(shape) * itemsize(dtype))
    return bytes(byte & 1 for byte in data) if dtype == "bool" else data


def _source(sample: Sample) -> tuple[Catalog, MemoryStore]:
    """Return a catalog of the sample in memory, one file per tensor, and its files."""
    arrays = {
        key: StoredArray(key, dtype, shape, Extent(f"t{number}", 0))
        for number, (key, (dtype, shape)) in enumerate(sample.tensors.items())
    }
    files: dict[str, bytes | bytearray] = {
        f"t{number}": _content(key, dtype, shape)
        for number, (key, (dtype, shape)) in enumerate(sample.tensors.items())
    }
    objects = {key: StoredObject(key, value=value) for key, value in sample.objects.items()}
    return catalog_of_arrays(format="memory", arrays=arrays, objects=objects), MemoryStore(files)


def _refusal(format: Format, sample: Sample) -> UnsupportedError | None:
    """Return the error that refuses a sample, or None if it can be laid out."""
    assert format.lay_out is not None
    catalog, _ = _source(sample)
    _, target = source_and_target(catalog, format)
    try:
        list(format.lay_out(target))
    except UnsupportedError as err:
        return err
    return None


def _source_and_target(
    format: Format, sample: Sample
) -> tuple[Catalog, TargetCatalog, MemoryStore]:
    """Return source, target and files for those parts of a sample that the format can hold."""
    supported = {
        key: spec
        for key, spec in sample.tensors.items()
        if _refusal(format, Sample({"fine": ("float32", (2,)), key: spec}, {})) is None
    }
    assert supported, "the format holds none of the sample's tensors"
    catalog, store = _source(Sample(supported, sample.objects if format.keeps_objects else {}))
    source, target = source_and_target(catalog, format)
    return source, target, store


def _write_sample(
    format: Format, folder: Path, sample: Sample
) -> tuple[Catalog, MemoryStore, dict[str, tuple[str, tuple[int, ...]]]]:
    """Write a sample into a new directory.

    Returns:
        The source, its files, and key → (dtype, shape) of the tensors that the format holds.
    """
    assert format.lay_out is not None
    source, target, store = _source_and_target(format, sample)
    folder.mkdir(parents=True)
    plan = make_plan(source, target, tuple(format.lay_out(target)))
    with closing(StageStore(folder, is_durable=False)) as stage:
        finish_files(plan, execute(plan, store, stage), stage, crc=True)
    return source, store, {key: sample.tensors[key] for key in source.tensors}


def _contents(
    catalog: Catalog, store: ReadStore, specs: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, bytearray]:
    """Return the dense bytes of every tensor, moved by the engine."""
    arrays = {key: PlannedArray(key, dtype, shape) for key, (dtype, shape) in specs.items()}
    target = catalog_of_arrays(format="memory", arrays=arrays)
    images = [
        FileImage(f"t{number}", array.n_bytes, (PlacedArray(0, array),))
        for number, array in enumerate(arrays.values())
    ]
    output = MemoryStore()
    execute(make_plan(catalog, target, images), store, output)
    return {key: bytearray(output.contents[f"t{number}"]) for number, key in enumerate(arrays)}


def _check_fragments(catalog: Catalog) -> None:
    """Check that the fragments of every tensor tile it and are within their arrays."""
    for key, tensor in catalog.tensors.items():
        match(key, tensor, whole_tensor(PlannedArray(key, tensor.dtype, tensor.shape)))


def _objects(catalog: Catalog, store: ReadStore) -> dict[str, object]:
    """Return the entries that are not tensors by key, those of a common state included."""

    values = {key: item.value for key, item in loaded(catalog, store).objects.items()}
    common = catalog.common or {}
    values |= {str(key): value for key, value in common.items()}
    return {key: _plain(value) for key, value in _nest_keys(values).items()}


def _nest_keys(values: Mapping[str, object]) -> dict[str, object]:
    """Return objects whose dotted keys are paths as nested dicts."""
    root: dict[str, object] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        branch = root
        for name in parents:
            child = branch.setdefault(name, {})
            if not isinstance(child, dict):
                break
            branch = child
        else:
            branch[last] = value
    return root


def _plain(value: object) -> object:
    """Convert mappings and lists to dicts and lists, and dicts with the keys 0, 1, … to lists."""
    if isinstance(value, Mapping):
        items = {str(key): _plain(item) for key, item in value.items()}
        if items and list(items) == [str(number) for number in range(len(items))]:
            return list(items.values())
        return items
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
