"""The JSON text of a safetensors header, scanned: an object of small objects, and one object of
strings.

A scanner that knows the shape, not a JSON parser: what a parser makes of 100 MB of brackets takes
gigabytes. An entry is taken as text of at most ``MAX_ENTRY_BYTES`` and parsed alone; the first
thing out of place ends the scan.

Source: RFC 8259; the description of the format in safetensors' README.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from core.errors import CorruptError, Report, raising

METADATA = "__metadata__"
MAX_ENTRY_BYTES = 16_384

_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'
_OPEN = re.compile(rb"\{" + _SPACE + rb"(\})?")
_NAME = re.compile(_SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE)
_TEXT = re.compile(_STRING)
_FLAT = re.compile(rb"\{[^{}]{0,%d}+\}" % MAX_ENTRY_BYTES)
_NUMBER = rb"(?:0|[1-9][0-9]{0,18}+)"
_USUAL = re.compile(
    rb'\{"dtype":"([A-Z0-9_]{1,16}+)","shape":\[((?:%b(?:,%b){0,15}+)?+)\],"data_offsets":\[(%b),(%b)\]\}'
    % (_NUMBER, _NUMBER, _NUMBER, _NUMBER)
)
"""An entry as safetensors itself writes it; others are parsed as JSON, which is slower."""
_NEXT = re.compile(_SPACE + rb"([,}])")
_REST = re.compile(_SPACE + rb"\Z")
_PAIRS = json.JSONDecoder(object_pairs_hook=list)

Fields = dict[str, object]
"""The fields of an entry; values are numbers, strings and lists."""


def scanned(
    data: bytes,
    *,
    file: str,
    what: str = "header",
    metadata: dict[str, str] | None = None,
    report: Report = raising,
) -> Iterator[tuple[str, Fields]]:
    """Yield the entries of a JSON object of objects that hold no others, in order.

    Args:
        data: the text.
        file, what: the file and the part of it that the text is, for messages.
        metadata: receives the members of the entry ``__metadata__``, which must be strings; None if
            that name has no special meaning.
        report: receives names that occur twice, and entries that are not objects of fields.

    Raises:
        CorruptError: the text breaks another rule.
    """
    return _HeaderScanner(data, file, what, report).entries(metadata)


class _HeaderScanner:
    """Scans one text from begin to end."""

    def __init__(self, data: bytes, file: str, what: str, report: Report) -> None:
        self._data = data
        self._file = file
        self._what = what
        self._report = report
        self._at = 0

    def entries(self, metadata: dict[str, str] | None) -> Iterator[tuple[str, Fields]]:
        """Yield name and fields of every entry.

        The strings of ``__metadata__`` go into ``metadata``.
        """
        names: set[str] = set()
        is_open = self._enter_object()
        while is_open:
            name = self._read_name()
            is_first = name not in names
            if not is_first:
                message = f"the {self._what} has two entries with the same name"
                self._report(
                    CorruptError(message, file=self._file, key=name, rule="safetensors.duplicate")
                )
            names.add(name)
            if metadata is not None and name == METADATA:
                self._read_strings(metadata)
            else:
                fields = self._read_fields(name)
                if fields is not None and is_first:
                    yield name, fields
            is_open = self._has_more()
        if _REST.match(self._data, self._at) is None:
            raise CorruptError(
                f"{len(self._data) - self._at} bytes follow the JSON object of the {self._what}",
                file=self._file,
            )

    def _enter_object(self) -> bool:
        """Step into an object; return whether it has members."""
        match = _OPEN.match(self._data, self._at)
        if match is None:
            raise self._error("an opening brace")
        self._at = match.end()
        return match[1] is None

    def _read_name(self) -> str:
        """Read a member's name; its value follows."""
        match = _NAME.match(self._data, self._at)
        if match is None:
            raise self._error("a name and a colon")
        self._at = match.end()
        return self._decode_string(match[1])

    def _has_more(self) -> bool:
        """Step over a comma, or out of an object; return whether a member follows."""
        match = _NEXT.match(self._data, self._at)
        if match is None:
            raise self._error("a comma or a closing brace")
        self._at = match.end()
        return match[1] == b","

    def _read_strings(self, into: dict[str, str]) -> None:
        is_open = self._enter_object()
        while is_open:
            name = self._read_name()
            value = _TEXT.match(self._data, self._at)
            if value is None:
                raise CorruptError(
                    f"{METADATA} may hold only strings, but {name[:100]!r} is not one",
                    file=self._file,
                    rule="safetensors.metadata",
                )
            if name in into:
                message = f"{METADATA} has {name[:100]!r} twice"
                self._report(CorruptError(message, file=self._file, rule="safetensors.duplicate"))
            into[name] = self._decode_string(value[0])
            self._at = value.end()
            is_open = self._has_more()

    def _read_fields(self, name: str) -> Fields | None:
        """Read the fields of an entry.

        None if it is not JSON or has a field twice, which was reported.
        """
        plain = _USUAL.match(self._data, self._at)
        if plain is not None:
            self._at = plain.end()
            dtype, shape, start, end = plain.groups()
            extents = [int(extent) for extent in shape.split(b",")] if shape else []
            return {
                "dtype": dtype.decode(),
                "shape": extents,
                "data_offsets": [int(start), int(end)],
            }
        match = _FLAT.match(self._data, self._at)
        if match is None:
            raise CorruptError(
                f"the entry is not a JSON object of at most {MAX_ENTRY_BYTES} bytes",
                file=self._file,
                key=name,
            )
        self._at = match.end()
        try:
            pairs: list[tuple[str, object]] = _PAIRS.decode(match[0].decode())
        except (ValueError, RecursionError) as err:
            self._report(
                CorruptError(f"the entry is not valid JSON: {err}", file=self._file, key=name)
            )
            return None
        fields = dict(pairs)
        if len(fields) != len(pairs):
            self._report(CorruptError("the entry has a field twice", file=self._file, key=name))
            return None
        return fields

    def _decode_string(self, token: bytes) -> str:
        """Return the string of a JSON token."""
        try:
            if b"\\" not in token:
                return token[1:-1].decode()
            text: str = json.loads(token)
            text.encode()  # half a surrogate pair can neither be printed nor written
        except ValueError as err:
            raise CorruptError(
                f"the {self._what} has a string that is not valid text: {err}", file=self._file
            ) from err
        return text

    def _error(self, expected: str) -> CorruptError:
        rest = self._data[self._at : self._at + 20].decode("utf-8", "replace")
        return CorruptError(
            f"the {self._what} is not valid JSON: expected {expected} at byte {self._at}, not {rest!r}",
            file=self._file,
        )
