"""The metadata of checkpoints: tensors, boxes, arrays in files; and files to write.

Start at ``catalog``; ``stored`` defines arrays in a file, with their encodings, and arrays without
a position yet. ``file_image`` describes an output file before it has data, and ``planned_store``
reads such files like any checkpoint. The names below are those that a format plug-in needs.
"""

from core.catalog.catalog import Catalog, StoredObject, TargetCatalog, catalog_of_arrays
from core.catalog.file_image import FileImage, JoinedArray, Literal, PlacedArray, literal_file
from core.catalog.stored import Encoding, Extent, PlannedArray, StoredArray
from core.catalog.tensor import Fragment, TargetFragment, Tensor, whole_fragment

__all__ = [
    "Catalog",
    "Encoding",
    "Extent",
    "FileImage",
    "Fragment",
    "JoinedArray",
    "Literal",
    "PlacedArray",
    "PlannedArray",
    "StoredArray",
    "StoredObject",
    "TargetCatalog",
    "TargetFragment",
    "Tensor",
    "catalog_of_arrays",
    "literal_file",
    "whole_fragment",
]
