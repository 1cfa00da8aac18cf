"""Scanner for the JSON text of a safetensors header: small objects and one object of strings.

A general JSON parser would need gigabytes for a header of 100 MB of brackets. This scanner knows
the structure: it parses one entry of at most ``MAX_ENTRY_BYTES`` at a time, and stops at the first
unexpected byte.

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
    rb'"([^"\\\x00-\x1f]*+)":\{"dtype":"([A-Z0-9_]{1,16}+)","shape":\[((?:%b(?:,%b){0,15}+)?+)\],'
    rb'"data_offsets":\[(%b),(%b)\]\}([,}])' % (_NUMBER, _NUMBER, _NUMBER, _NUMBER)
)
"""Name and entry in the form that safetensors writes, and the byte behind them; other forms are
parsed piece by piece, which is slower."""
_NEXT = re.compile(_SPACE + rb"([,}])")
_REST = re.compile(_SPACE + rb"\Z")
_PAIRS = json.JSONDecoder(object_pairs_hook=list)

Fields = dict[str, object]
"""The fields of an entry by name; values are numbers, strings and lists."""


def scanned(
    data: bytes,
    *,
    file: str,
    what: str = "header",
    metadata: dict[str, str] | None = None,
    report: Report = raising,
) -> Iterator[tuple[str, Fields]]:
    """Yield the entries of a JSON object whose values are flat objects, in order.

    Args:
        data: the text.
        file, what: name of the file and description of the text, for messages.
        metadata: receives the members of the entry ``__metadata__``, which must be strings; None if
            that name has no special meaning.
        report: receives duplicate names and entries that are not objects of fields.

    Raises:
        CorruptError: the text breaks another rule.
    """
    return _HeaderScanner(data, file, what, report).entries(metadata)


class _HeaderScanner:
    """Scanner of one text, from beginning to end."""

    def __init__(self, data: bytes, file: str, what: str, report: Report) -> None:
        self._data = data
        self._file = file
        self._what = what
        self._report = report
        self._at = 0

    def entries(self, metadata: dict[str, str] | None) -> Iterator[tuple[str, Fields]]:
        """Yield name and fields of every entry; add the strings of ``__metadata__`` to a dict."""
        names: set[str] = set()
        has_more = self._enter_object()
        while has_more:
            # The usual form needs a single match; headers have up to 10⁵ such entries.
            usual = _USUAL.match(self._data, self._at)
            if usual is not None:
                token, dtype, shape, start, end, separator = usual.groups()
                name = self._decode_string(b'"%b"' % token)
                if name not in names and name != METADATA:
                    self._at = usual.end()
                    names.add(name)
                    has_more = separator == b","
                    yield (
                        name,
                        {
                            "dtype": dtype.decode(),
                            "shape": list(map(int, shape.split(b","))) if shape else [],
                            "data_offsets": [int(start), int(end)],
                        },
                    )
                    continue
            # Of two entries with the same name the first is used.
            name = self._parse_name()
            is_first = name not in names
            if not is_first:
                message = f"the {self._what} has two entries with the same name"
                self._report(
                    CorruptError(message, file=self._file, key=name, rule="safetensors.duplicate")
                )
            names.add(name)
            if metadata is not None and name == METADATA:
                self._parse_strings(metadata)
            else:
                fields = self._parse_fields(name)
                if fields is not None and is_first:
                    yield name, fields
            has_more = self._has_more()
        if _REST.match(self._data, self._at) is None:
            raise CorruptError(
                f"{len(self._data) - self._at} extra bytes follow the JSON object of the "
                f"{self._what}",
                file=self._file,
            )

    def _enter_object(self) -> bool:
        """Skip an opening brace; return whether the object has members."""
        match = _OPEN.match(self._data, self._at)
        if match is None:
            raise self._error("an opening brace")
        self._at = match.end()
        return match[1] is None

    def _parse_name(self) -> str:
        """Parse a member's name and the colon after it."""
        match = _NAME.match(self._data, self._at)
        if match is None:
            raise self._error("a name and a colon")
        self._at = match.end()
        return self._decode_string(match[1])

    def _has_more(self) -> bool:
        """Skip a comma or a closing brace; return whether another member follows."""
        match = _NEXT.match(self._data, self._at)
        if match is None:
            raise self._error("a comma or a closing brace")
        self._at = match.end()
        return match[1] == b","

    def _parse_strings(self, strings: dict[str, str]) -> None:
        """Parse an object of strings and add its members to a dict."""
        has_more = self._enter_object()
        while has_more:
            name = self._parse_name()
            value = _TEXT.match(self._data, self._at)
            if value is None:
                raise CorruptError(
                    f"{METADATA} may contain only strings, but {name[:100]!r} is not a string",
                    file=self._file,
                    rule="safetensors.metadata",
                )
            if name in strings:
                message = f"{METADATA} contains {name[:100]!r} twice"
                self._report(CorruptError(message, file=self._file, rule="safetensors.duplicate"))
            strings[name] = self._decode_string(value[0])
            self._at = value.end()
            has_more = self._has_more()

    def _parse_fields(self, name: str) -> Fields | None:
        """Parse the fields of an entry.

        Returns:
            None if the entry is not JSON or has a field twice, which was reported.

        Raises:
            CorruptError: the end of the entry cannot be determined.
        """
        # Find its end, as it has no inner braces, and parse it as pairs.
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
            self._report(
                CorruptError("the entry contains a field twice", file=self._file, key=name)
            )
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
                f"the {self._what} has an invalid string: {err}", file=self._file
            ) from err
        return text

    def _error(self, expected: str) -> CorruptError:
        """Build the error for an unexpected byte."""
        next_text = self._data[self._at : self._at + 20].decode("utf-8", "replace")
        return CorruptError(
            f"the {self._what} is not valid JSON: expected {expected} at byte {self._at}, not "
            f"{next_text!r}",
            file=self._file,
        )
