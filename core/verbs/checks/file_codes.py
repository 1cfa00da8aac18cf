"""Codes CK101–CK199, for files and containers, used by ``core.verbs.checks.containers``."""

from __future__ import annotations

from core.verbs.checks.check import Code
from core.verbs.checks.finding import Severity
from core.verbs.checks.level import Level

_ALL_FILES = "copy the checkpoint again, with all its files"

MISSING = Code("CK101", Severity.ERROR, "a file is missing", _ALL_FILES)
EMPTY = Code(
    "CK102",
    Severity.ERROR,
    "a file is empty",
    "copy this file again: an interrupted copy or a full disk leaves empty files",
)
TRUNCATED = Code(
    "CK103",
    Severity.ERROR,
    "a file is truncated",
    "copy this file again, and compare its size with that of the original",
)
IRREGULAR = Code(
    "CK104", Severity.ERROR, "not a regular file", "remove it, or replace it with the file itself"
)
UNREADABLE_FILE = Code(
    "CK105", Severity.ERROR, "permission denied or I/O error", "check the permissions and the disk"
)
EXTRA = Code(
    "CK106",
    Severity.WARNING,
    "unreferenced data file",
    "remove it if it is left over from an earlier save",
)
LEFT_OVER = Code(
    "CK107",
    Severity.WARNING,
    "leftover of an unfinished write or copy",
    "remove it if nothing is still writing it",
)
NOT_ITS_KIND = Code(
    "CK108",
    Severity.ERROR,
    "content does not match the file name",
    "download the actual file again",
)
NOT_HANDLED = Code(
    "CK109",
    Severity.ERROR,
    "a container uses an unsupported feature",
    "save it again with current software",
)
UNSAFE = Code(
    "CK110",
    Severity.ERROR,
    "a file requests something unsafe",
    "do not load it, and find out who wrote it",
)
MALFORMED = Code(
    "CK111",
    Severity.ERROR,
    "the content of a file is malformed",
    "compare the checksum of this file with the original: copy it again if"
    " they differ, else save it again",
)
TRAILING = Code(
    "CK112",
    Severity.WARNING,
    "bytes follow the end of a torch file",
    "torch ignores them; if the original is shorter, copy the file again: a copy appended them",
)

ZIP_DIRECTORY = Code(
    "CK120",
    Severity.ERROR,
    "a zip directory is damaged",
    "copy this file again: its end, which lists the records, is damaged",
)
ZIP_DUPLICATE = Code(
    "CK121",
    Severity.ERROR,
    "duplicate zip records or root folders",
    "do not load it: readers may pick either one",
)
ZIP_HEADER = Code(
    "CK122",
    Severity.ERROR,
    "a zip record header does not match the directory",
    "compare the checksum of this file with the original: bytes inside it have changed",
)
ZIP_OVERLAP = Code(
    "CK123",
    Severity.ERROR,
    "zip records overlap or exceed the file",
    "do not load it: torch.save writes no such file, so find out which program changed it",
)
ZIP_CODING = Code(
    "CK124",
    Severity.ERROR,
    "a zip record is encrypted or has unsupported compression",
    "save it again with torch",
)
ZIP_ORDER = Code(
    "CK125",
    Severity.ERROR,
    "a torch file has an invalid byte order",
    "save it again with torch.save: readers would guess the byte order of its numbers",
)
ZIP_DESCRIPTOR = Code(
    "CK126",
    Severity.ERROR,
    "a zip data descriptor does not match the directory",
    "copy this file again: bytes after a record have changed",
    Level.HEADERS,
)
ZIP_SMALL_CRC = Code(
    "CK127",
    Severity.ERROR,
    "checksum mismatch in a pickle or small record",
    "copy this file again: bytes of its pickle have changed since it was saved",
)
ZIP_NO_PICKLE = Code(
    "CK128", Severity.ERROR, "a torch file has no pickle", "this file was not written by torch.save"
)
ZIP_STORAGE = Code(
    "CK129",
    Severity.ERROR,
    "a tensor does not fit in its record",
    "use another checkpoint: the tensor and its record come from different saves",
)

ST_HEADER = Code(
    "CK130",
    Severity.ERROR,
    "a safetensors header is malformed",
    "copy this file again: its first bytes, which list the tensors, have changed",
)
ST_DUPLICATE = Code(
    "CK131",
    Severity.ERROR,
    "duplicate entry in a safetensors header",
    "do not load it: readers may pick either one",
)
ST_METADATA = Code(
    "CK132",
    Severity.ERROR,
    "__metadata__ holds values that are not strings",
    "rewrite the file with safetensors",
)
ST_ENTRY = Code(
    "CK133",
    Severity.ERROR,
    "inconsistent entry in a safetensors header",
    "save it again with safetensors: the entry contradicts itself",
)
ST_ORDER = Code(
    "CK134", Severity.ERROR, "tensors overlap or leave gaps", "rewrite the file with safetensors"
)
ST_REST = Code(
    "CK135",
    Severity.ERROR,
    "trailing bytes belong to no tensor",
    "rewrite the file with safetensors",
)

ZARR_METADATA = Code("CK140", Severity.ERROR, "array metadata is missing or malformed", _ALL_FILES)
ZARR_MISSING = Code("CK141", Severity.ERROR, "a zarr chunk is missing", _ALL_FILES)
ZARR_SIZE = Code(
    "CK142",
    Severity.ERROR,
    "a zarr chunk has the wrong size",
    "copy this chunk again, or find out whether the metadata of its array is from another save",
)
ZARR_BEYOND = Code(
    "CK143",
    Severity.ERROR,
    "a zarr chunk is outside the grid",
    "metadata and chunks come from different saves",
)
ZARR_SEPARATOR = Code(
    "CK144",
    Severity.ERROR,
    "chunk names do not match the metadata",
    "correct the separator or encoding in the metadata",
)
ZARR_SHARD = Code(
    "CK145",
    Severity.ERROR,
    "a zarr shard is inconsistent",
    "copy this shard again: its index is damaged",
)
ZARR_INNER = Code("CK146", Severity.ERROR, "a chunk is missing from a zarr shard", _ALL_FILES)
ZARR_TWO = Code(
    "CK147",
    Severity.WARNING,
    "both zarr 2 and zarr 3 metadata are present",
    "remove the one that is not wanted",
)
ZARR_UNSTORED = Code(
    "CK148",
    Severity.NOTE,
    "zarr chunks are not stored and read as the fill value",
    "expected if the writer skips such chunks; --missing-chunks error rejects them",
)

DCP_METADATA = Code("CK150", Severity.ERROR, ".metadata cannot be read", "use an older checkpoint")
DCP_OVERLAP = Code(
    "CK151", Severity.ERROR, "items overlap in their file", "use an older checkpoint"
)
DCP_ITEM = Code(
    "CK152",
    Severity.ERROR,
    "an item is not where .metadata places it",
    "copy this file again; if it equals the original, .metadata is from another save",
)
DCP_ORPHAN = Code("CK153", Severity.NOTE, "unreferenced stored items", "no action needed")

RANK_MISSING = Code("CK160", Severity.ERROR, "a rank's files are missing", _ALL_FILES)
OBJECT_SHARD = Code("CK162", Severity.ERROR, "a shard of an object is missing", _ALL_FILES)
PIECES = Code("CK163", Severity.WARNING, "ranks have different sets of shard files", _ALL_FILES)
RANK_EXTRA = Code(
    "CK161",
    Severity.ERROR,
    "a rank that does not fit the training arguments",
    "move the files of other runs elsewhere",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Code))
