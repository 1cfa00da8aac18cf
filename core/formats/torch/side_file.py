"""``ckpt-objects.pt``, the file for non-tensor objects next to formats that hold only tensors.

On disk, one ``torch.save`` file that ``torch.load`` opens with its defaults (``weights_only``)::

    model.safetensors        tensors, in a format of their own
    ckpt-objects.pt          {"ckpt_objects": 1, "objects": {key: value}, "skeleton": …}

Values contain their tensors; objects that ``weights_only`` refuses are set aside as in any ``.pt``
file (``core.formats.torch.weights_only``). ``skeleton`` is the nesting of tensors and objects,
spelled by ``core.pickle.plain``, or None for a flat state dict. In it, a tensor is
``{"$object": "tensor:KEY"}`` (or ``tensor+grad``, ``parameter``, ``parameter+grad``), an object
``{"$object": "object:KEY"}``.

Versions: only 1.

Source: only this project writes this file.

Not supported: files with this name from other programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, UnsupportedError, placing_errors
from core.pickle.fields import FieldReader, describe_value
from core.pickle.inert import ObjectLeaf, Persistent, TensorLeaf, walk
from core.pickle.nesting import LeafEntry, entries, map_leaves
from core.pickle.noted import gc_paused
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

OBJECTS_FILE = "ckpt-objects.pt"
_VERSION = 1
_KINDS: dict[str, tuple[str | None, bool]] = {
    "tensor": (None, False),
    "tensor+grad": (None, True),
    "parameter": ("parameter", False),
    "parameter+grad": ("parameter", True),
}
"""Prefix of a tensor's mark in the skeleton → wrapper and ``requires_grad`` of the leaf."""


@dataclass(frozen=True, slots=True)
class ObjectsBeside:
    """The content of an objects file.

    Args:
        objects: non-tensor entries by key, with their values.
        skeleton: nested containers with leaves, as in a catalog; None for a flat state dict.
        hidden: arrays of the tensors inside the objects, by the keys of their leaves.
    """

    objects: dict[str, StoredObject]
    skeleton: object
    hidden: dict[str, StoredArray]


def objects_image(target: TargetCatalog) -> FileImage | None:
    """Lay out the file for a target catalog's objects; return None if it has no objects.

    Args:
        target: its objects have been read; the tensors inside them are hidden tensors of one array
            each, which the file contains.

    Raises:
        UnsupportedError: an object has not been read, contains itself or a bare storage, or has
            the key that ``weights_only`` reserves.
    """
    from core.formats.torch.weights_only import set_aside
    from core.formats.torch.zip.tree_layout import plan_tree
    from core.pickle.plain import to_plain

    if not target.objects:
        return None
    # Objects that cannot be copied are refused by name.
    for item in target.objects.values():
        if item.raw_key is not None:
            raise UnsupportedError(
                "the object was not loaded, so it cannot be written to this file",
                key=item.key,
                hint="drop it with --exclude",
            )
        if any(isinstance(node, Persistent) for node in walk(item.value)):
            raise UnsupportedError(
                "the object contains a bare torch storage, which ckpt cannot copy",
                key=item.key,
                hint="drop it with --exclude",
            )
    # In the skeleton, a mark replaces every tensor and object; other values stay.
    kind_of = {facts: kind for kind, facts in _KINDS.items()}

    def mark(entry: LeafEntry) -> object:
        leaf = entry.leaf
        if isinstance(leaf, TensorLeaf) and leaf.key in target.tensors:
            return ObjectLeaf(f"{kind_of[leaf.wrapper, leaf.requires_grad]}:{leaf.key}")
        item = target.objects.get(entry.key)
        is_object = item is not None and (isinstance(leaf, ObjectLeaf) or item.value is leaf)
        return ObjectLeaf(f"object:{entry.key}") if is_object else leaf

    # Build the content, and plan a torch file of it.
    with gc_paused():
        root: object = {
            "ckpt_objects": _VERSION,
            "objects": {key: item.value for key, item in target.objects.items()},
            "skeleton": None if _is_flat(target) else to_plain(map_leaves(target.skeleton, mark)),
        }
        try:
            root = set_aside(root)
        except UnsupportedError as err:
            err.key = err.key and err.key.removeprefix("objects.")
            raise
        return plan_tree(root, target.whole_array, prefix="ckpt-objects").image(OBJECTS_FILE)


def _is_flat(target: TargetCatalog) -> bool:
    """Return whether the skeleton is a flat dict with every tensor and object under its key.

    Such a skeleton contains no information. Tensors in it are neither parameters nor do they
    require grad.
    """
    if target.skeleton is None:
        return True
    return isinstance(target.skeleton, dict) and all(
        item in (TensorLeaf(str(name)), ObjectLeaf(str(name)))
        or (name in target.objects and target.objects[name].value is item)
        for name, item in target.skeleton.items()
    )


def read_objects(store: ReadStore) -> ObjectsBeside | None:
    """Read the objects file in a store; return None if there is no such file.

    Raises:
        CorruptError, TruncatedError: the file is damaged, or is not one that ``objects_image``
            lays out.
        UnsupportedError: a newer version of the file.
        UnsafeError: a hostile pickle.
    """
    path = OBJECTS_FILE
    if not store.exists(path):
        return None
    from core.formats.torch.tree import load_object

    stream = StoredArray(path, "uint8", (store.size(path),), Extent(path, 0))
    root, hidden = load_object(store, stream, key=path)
    if not isinstance(root, dict) or not isinstance(root.get("objects"), dict):
        raise CorruptError(
            "this is not an objects file that ckpt wrote",
            file=path,
            hint="remove it if you do not need its contents",
        )
    version = root.get("ckpt_objects")
    if version != _VERSION:
        raise UnsupportedError(
            f"version {describe_value(version)} of this file is not supported; only version "
            f"{_VERSION} is",
            file=path,
            hint="update ckpt-toolkit",
        )
    # Keys come from a pickle, so they may be of any type.
    objects: dict[str, StoredObject] = {}
    for key, value in root["objects"].items():
        key = FieldReader(path).read_text(key, "the key of an object")
        objects[key] = StoredObject(key, value=value)
    return ObjectsBeside(objects, _parse_skeleton(root.get("skeleton"), file=path), hidden)


def _parse_skeleton(plain_tree: object, *, file: str) -> object:
    """Return the skeleton in an objects file, with leaves in place of its marks.

    Raises:
        CorruptError: the skeleton is malformed, or has a mark of an unknown kind.
    """
    if plain_tree is None:
        return None
    from core.pickle.plain import from_plain

    with placing_errors(file=file):
        skeleton = from_plain(plain_tree)

    def leaf_of(entry: LeafEntry) -> object:
        if not isinstance(entry.leaf, ObjectLeaf):
            return entry.leaf
        kind, _, key = entry.leaf.key.partition(":")
        if kind == "object":
            return ObjectLeaf(key)
        if kind not in _KINDS:
            raise CorruptError(
                f"the skeleton has an entry of the unknown kind {kind[:40]!r}", file=file
            )
        return TensorLeaf(key, *_KINDS[kind])

    return map_leaves(skeleton, leaf_of)


def with_objects_beside(catalog: Catalog, contents: ObjectsBeside | None) -> Catalog:
    """Return a catalog of tensors, completed by the content of its objects file.

    The skeleton is used only if it contains exactly the tensors and objects that exist. If not,
    because a file was added or removed, the catalog stays flat and gets a note about it.

    Raises:
        CorruptError: an object, or a tensor inside one, has the same key as a tensor.
    """
    if contents is None:
        return catalog
    for key in (*contents.objects, *contents.hidden):
        if key in catalog.tensors or key in catalog.hidden:
            raise CorruptError("an object has the same key as a tensor", file=OBJECTS_FILE, key=key)
    result = replace(
        catalog.with_hidden(contents.hidden), objects={**catalog.objects, **contents.objects}
    )
    if contents.skeleton is None:
        return result
    mismatch = _find_mismatch(contents, catalog.tensors)
    if mismatch is None:
        return replace(result, skeleton=contents.skeleton)
    difference = f"{mismatch} is in only one of the two"
    return result.noted(
        [f"{OBJECTS_FILE} does not match the tensors ({difference}), so its nesting is not used"]
    )


def _find_mismatch(contents: ObjectsBeside, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first key that is only in the skeleton or only in the checkpoint, or None."""

    placed: dict[str, None] = {}
    for entry in entries(contents.skeleton):
        if isinstance(entry.leaf, TensorLeaf):
            if entry.leaf.key not in tensors and entry.leaf.key not in contents.hidden:
                return entry.leaf.key
            placed[entry.leaf.key] = None
        elif isinstance(entry.leaf, ObjectLeaf) and entry.leaf.key not in contents.objects:
            return entry.leaf.key
    return next((key for key in tensors if key not in placed), None)
