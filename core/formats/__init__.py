"""The formats: a table of values, found by name or by looking at the files.

A format is three functions (``sniff``, ``read``, ``lay_out``) and facts. Third parties add formats
through the entry point group ``ckpt.formats``, whose entries are ``Format`` values.
"""

from core.formats.format import Format
from core.formats.registry import format_called, formats, sniffed

__all__ = ["Format", "format_called", "formats", "sniffed"]
