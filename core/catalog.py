"""What a format plug-in needs to describe a checkpoint: the face of ``core.engine.catalog``."""

from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog, catalog_of_arrays
from core.engine.catalog.file_image import (
    FileImage,
    JoinedArray,
    Literal,
    PlacedArray,
    literal_file,
)
from core.engine.catalog.stored import Encoding, Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, TargetFragment, Tensor, whole_fragment

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
