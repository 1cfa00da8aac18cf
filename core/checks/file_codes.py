"""The codes CK101–CK199, of files and containers; the check modules beside this one share them."""

from __future__ import annotations

from core.checks.check import Code
from core.checks.finding import Severity
from core.checks.level import Level

_AGAIN = "copy the checkpoint again, or use an older one"
_ALL_FILES = "copy the checkpoint again, with all its files"

MISSING = Code("CK101", Severity.ERROR, "a file is missing", _ALL_FILES)
EMPTY = Code("CK102", Severity.ERROR, "a file is empty", _AGAIN)
TRUNCATED = Code("CK103", Severity.ERROR, "a file ends too early", _AGAIN)
IRREGULAR = Code("CK104", Severity.ERROR, "not a regular file", "remove it, or put the file in its place")
UNREADABLE_FILE = Code(
    "CK105", Severity.ERROR, "the system refuses to read a file", "check the permissions and the disk"
)
EXTRA = Code("CK106", Severity.WARNING, "a data file that nothing refers to", "remove it if an earlier save left it")
LEFT_OVER = Code(
    "CK107", Severity.WARNING, "left over from an unfinished write or copy", "remove it if nobody writes it"
)
NOT_ITS_KIND = Code("CK108", Severity.ERROR, "a file is not what its name says", "fetch the file itself again")
NOT_HANDLED = Code(
    "CK109", Severity.ERROR, "a container uses what is not handled", "save it again with current software"
)
UNSAFE = Code("CK110", Severity.ERROR, "a file asks for what is refused", "do not load it, and find out who wrote it")
MALFORMED = Code("CK111", Severity.ERROR, "the content of a file is malformed", _AGAIN)

ZIP_DIRECTORY = Code("CK120", Severity.ERROR, "a zip's directory is broken", _AGAIN)
ZIP_DUPLICATE = Code(
    "CK121", Severity.ERROR, "two zip records of one name, or two roots", "do not load it; readers differ"
)
ZIP_HEADER = Code("CK122", Severity.ERROR, "a zip record's header contradicts the directory", _AGAIN)
ZIP_OVERLAP = Code("CK123", Severity.ERROR, "zip records overlap or reach outside", _AGAIN)
ZIP_CODING = Code("CK124", Severity.ERROR, "a zip record is encrypted or oddly compressed", "save it again with torch")
ZIP_ORDER = Code("CK125", Severity.ERROR, "a torch file's byte order is none", _AGAIN)
ZIP_DESCRIPTOR = Code("CK126", Severity.ERROR, "two CRC fields of a record differ", _AGAIN, Level.HEADERS)
ZIP_SMALL_CRC = Code("CK127", Severity.ERROR, "a pickle or small record has another CRC", _AGAIN)
ZIP_NO_PICKLE = Code("CK128", Severity.ERROR, "a torch file has no pickle", "this is no file that torch.save wrote")
ZIP_STORAGE = Code("CK129", Severity.ERROR, "a tensor does not fit its record", _AGAIN)

ST_HEADER = Code("CK130", Severity.ERROR, "a safetensors header is malformed", _AGAIN)
ST_DUPLICATE = Code(
    "CK131", Severity.ERROR, "a safetensors header says something twice", "do not load it; readers differ"
)
ST_METADATA = Code(
    "CK132", Severity.ERROR, "__metadata__ holds more than strings", "write the file again with safetensors"
)
ST_ENTRY = Code("CK133", Severity.ERROR, "an entry of a safetensors header contradicts itself", _AGAIN)
ST_ORDER = Code("CK134", Severity.ERROR, "tensors overlap or leave holes", "write the file again with safetensors")
ST_REST = Code("CK135", Severity.ERROR, "bytes at the end belong to no tensor", "write the file again with safetensors")

ZARR_METADATA = Code("CK140", Severity.ERROR, "an array's metadata is missing or malformed", _ALL_FILES)
ZARR_MISSING = Code("CK141", Severity.ERROR, "a zarr chunk is missing", _ALL_FILES)
ZARR_SIZE = Code("CK142", Severity.ERROR, "a zarr chunk has the wrong length", _AGAIN)
ZARR_BEYOND = Code("CK143", Severity.ERROR, "a zarr chunk lies beyond the grid", "metadata and chunks are of two saves")
ZARR_SEPARATOR = Code(
    "CK144", Severity.ERROR, "chunks have names of another kind", "correct the separator or encoding in the metadata"
)
ZARR_SHARD = Code("CK145", Severity.ERROR, "a zarr shard contradicts itself", _AGAIN)
ZARR_INNER = Code("CK146", Severity.ERROR, "a zarr shard lacks a chunk", _ALL_FILES)
ZARR_TWO = Code(
    "CK147", Severity.WARNING, "zarr 2 and zarr 3 metadata side by side", "remove the one that is not meant"
)
ZARR_UNSTORED = Code(
    "CK148",
    Severity.NOTE,
    "zarr chunks are not stored and hold the fill value",
    "nothing to do where the writer leaves out such chunks; --missing-chunks error refuses them",
)

DCP_METADATA = Code("CK150", Severity.ERROR, ".metadata cannot be read", "use an older checkpoint")
DCP_OVERLAP = Code("CK151", Severity.ERROR, "items overlap in their file", "use an older checkpoint")
DCP_ITEM = Code("CK152", Severity.ERROR, "an item is not where .metadata says", _AGAIN, Level.HEADERS)
DCP_ORPHAN = Code("CK153", Severity.NOTE, "stored items that no entry refers to", "nothing to do")

RANK_MISSING = Code("CK160", Severity.ERROR, "a rank's files are missing", _ALL_FILES)
OBJECT_SHARD = Code("CK162", Severity.ERROR, "a shard of an object is missing", _ALL_FILES)
PIECES = Code("CK163", Severity.WARNING, "ranks have pieces in different files", _ALL_FILES)
RANK_EXTRA = Code("CK161", Severity.ERROR, "a rank that the arguments do not allow", "move files of other runs away")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Code))
