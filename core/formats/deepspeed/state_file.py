"""The content of one DeepSpeed file: its inert tree, and typed access to it.

Every entry of a file may be missing or of another type. The accessors check the type; their errors
name the entry by its path, such as ``param_shapes[0].embed.weight``.

Nothing is unpickled: a file is a torch zip, read by ``core.formats.torch.format``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from core.errors import CorruptError
from core.formats.torch.tree import parse
from core.pickle.fields import FieldReader, describe_value
from core.pickle.inert import TensorLeaf
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

MAX_ELEMENTS = 1 << 62
MIXED_STEPS_HINT = (
    "the files may be from different saves; copy the files of all ranks from one save into an "
    "empty directory"
)
SAVE_ANEW_HINT = (
    "load the checkpoint with the DeepSpeed version that wrote it and save it again with a "
    "different version, or use an older checkpoint"
)


@dataclass(frozen=True, slots=True)
class StateFile:
    """A torch file that contains a dict.

    Args:
        file: name of the file.
        root: the dict, inert.
        arrays: the tensors by the keys of their leaves, which begin with the file's name.
    """

    file: str
    root: Mapping[object, object]
    arrays: Mapping[str, StoredArray]

    def corrupt(self, message: str, *, key: str | None = None) -> CorruptError:
        """Return an error about an entry that no known version of DeepSpeed writes."""
        return CorruptError(message, file=self.file, key=key, hint=SAVE_ANEW_HINT)

    def mismatch(self, message: str, *, key: str | None = None) -> CorruptError:
        """Return an error about an entry that contradicts another file."""
        return CorruptError(message, file=self.file, key=key, hint=MIXED_STEPS_HINT)

    @property
    def fields(self) -> FieldReader:
        """The reader of the file's values."""
        return FieldReader(self.file, hint=SAVE_ANEW_HINT)

    def name(self, value: object, path: str) -> str:
        """Return the value as the name of a parameter.

        Raises:
            CorruptError: the value is not a string, or is empty.
        """
        if not isinstance(value, str) or not value:
            raise self.corrupt(f"{path} contains an invalid name: {describe_value(value)}")
        return value

    def tensor(self, value: object, path: str) -> StoredArray:
        """Return the value as a tensor.

        Raises:
            CorruptError: the value is not a tensor.
        """
        if not isinstance(value, TensorLeaf):
            raise self.fields.build_error(value, path, "a plain tensor")
        return self.arrays[value.key]

    def flat(self, value: object, path: str) -> StoredArray:
        """Return the value as a tensor with one axis and no gaps.

        Raises:
            CorruptError: the value is not a tensor, or has gaps or another number of axes.
        """
        array = self.tensor(value, path)
        if len(array.shape) != 1 or array.extent.strides is not None:
            raise self.corrupt(f"{path} is a tensor of shape {array.shape}, not a flat tensor")
        return array

    def shapes(self, value: object, path: str) -> Mapping[str, Shape]:
        """Return the value as the names of parameters and their shapes, in elements.

        Raises:
            CorruptError: the value is not a dict from names to shapes, or a shape is absurd.
        """
        shapes: dict[str, Shape] = {}
        for name, shape in self.fields.read_mapping(value, path).items():
            name = self.name(name, path)
            sizes = self.fields.read_shape(shape, f"{path}.{name}")
            if prod(sizes) >= MAX_ELEMENTS:
                raise self.corrupt(f"{path} contains the impossibly large shape {sizes}", key=name)
            shapes[name] = sizes
        return shapes


def read_value(store: ReadStore, file: str) -> tuple[object, dict[str, StoredArray]]:
    """Read a torch file; return its inert content, and its tensors by the keys of their leaves.

    No tensor data is read.

    Raises:
        CorruptError, TruncatedError: the file is damaged.
        UnsupportedError: the file is not a torch file that can be read.
        UnsafeError: the pickle is hostile.
    """
    # The file's objects are not entries of the catalog: put their values in place of the leaves.
    tree = parse(store, file, prefix=f"{file}:")
    return tree.inline_objects(), {**tree.arrays, **tree.hidden}


def read_state_file(store: ReadStore, file: str) -> StateFile:
    """Read a file that contains a dict.

    Raises:
        CorruptError, TruncatedError: the file is damaged, or its content is not a dict.
        UnsupportedError: the file is not a torch file that can be read.
        UnsafeError: the pickle is hostile.
    """
    value, arrays = read_value(store, file)
    return StateFile(file, FieldReader(file).read_mapping(value, "the content"), arrays)
