"""What one DeepSpeed file holds: its inert tree, and typed access to it.

Every entry of a file may be missing or of another type; the accessors say which one, by its path.

Nothing is unpickled: a file is a torch zip, read by ``core.formats.torch.format``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from core.errors import CorruptError
from core.formats.torch.format import parse
from core.pickle.inert import Inert, ObjectLeaf, TensorLeaf, as_mapping
from core.pickle.nesting import map_leaves

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore
    from core.formats.deepspeed.partition import Shapes

MAX_ELEMENTS = 1 << 62


@dataclass(frozen=True, slots=True)
class StateFile:
    """A torch file that holds a dict.

    Args:
        file: its name.
        root: its content, inert.
        arrays: its tensors by the keys of their leaves, which begin with the file's name.
    """

    file: str
    root: Mapping[object, object]
    arrays: Mapping[str, StoredArray]

    def corrupt(self, what: str, *, key: str | None = None) -> CorruptError:
        """An error about this file."""
        return CorruptError(what, file=self.file, key=key, hint="copy the checkpoint again, or use an older one")

    def mapping(self, value: object, path: str) -> Mapping[object, object]:
        """The value as a mapping."""
        found = as_mapping(value)
        if found is None:
            raise self.corrupt(f"{path} is a {type_of(value)}, not a dict")
        return found

    def items(self, value: object, path: str) -> Sequence[object]:
        """The value as a list."""
        if not isinstance(value, (list, tuple)):
            raise self.corrupt(f"{path} is a {type_of(value)}, not a list")
        return value

    def number(self, value: object, path: str) -> int:
        """The value as a count."""
        if type(value) is not int or not 0 <= value < MAX_ELEMENTS:
            raise self.corrupt(f"{path} is {shown(value)}, not a count")
        return value

    def name(self, value: object, path: str) -> str:
        """The value as a parameter's name."""
        if not isinstance(value, str) or not value:
            raise self.corrupt(f"{path} has the name {shown(value)}")
        return value

    def tensor(self, value: object, path: str) -> StoredArray:
        """The value as a tensor."""
        if not isinstance(value, TensorLeaf):
            raise self.corrupt(f"{path} is a {type_of(value)}, not a plain tensor")
        return self.arrays[value.key]

    def flat(self, value: object, path: str) -> StoredArray:
        """The value as a tensor with one axis and no gaps."""
        array = self.tensor(value, path)
        if len(array.shape) != 1 or array.extent.strides is not None:
            raise self.corrupt(f"{path} is a tensor of shape {array.shape}, not a flat one")
        return array

    def shapes(self, value: object, path: str) -> Shapes:
        """The value as parameters and their shapes."""
        found: dict[str, Shape] = {}
        for name, shape in self.mapping(value, path).items():
            name = self.name(name, path)
            sizes = tuple(self.number(n, f"{path}.{name}") for n in self.items(shape, f"{path}.{name}"))
            if prod(sizes) >= MAX_ELEMENTS:
                raise self.corrupt(f"{path} states the shape {sizes}", key=name)
            found[name] = sizes
        return found


def type_of(value: object) -> str:
    """The type of an inert value, for people."""
    return value.class_name if isinstance(value, Inert) else type(value).__name__


def shown(value: object) -> str:
    """An inert value, for people; what is no scalar as its type."""
    return repr(value)[:60] if isinstance(value, (int, str, float)) else f"a {type_of(value)}"


def read_value(store: ReadStore, file: str) -> tuple[object, dict[str, StoredArray]]:
    """The inert content of a torch file, and its tensors by the keys of their leaves; metadata only.

    Raises:
        CorruptError, TruncatedError: it is damaged.
        UnsupportedError, UnsafeError: as ``parse``.
    """
    tree = parse(store, file, prefix=f"{file}:")
    value = map_leaves(
        tree.value, lambda entry: tree.objects[entry.key].value if isinstance(entry.leaf, ObjectLeaf) else entry.leaf
    )
    return value, {**tree.arrays, **tree.hidden}


def read_state_file(store: ReadStore, file: str) -> StateFile:
    """The content of a file that holds a dict; raises as ``read_value``, and CorruptError if it holds none."""
    value, arrays = read_value(store, file)
    root = as_mapping(value)
    if root is None:
        raise CorruptError(f"the file holds a {type_of(value)}, not a dict", file=file)
    return StateFile(file, root, arrays)
