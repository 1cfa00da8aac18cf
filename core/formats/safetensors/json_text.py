"""The JSON text of a safetensors header, scanned: an object of small objects, and one object of strings.

A scanner that knows the shape, not a JSON parser: what a parser makes of 100 MB of brackets takes gigabytes. An entry
is taken as text of at most ``MAX_ENTRY_BYTES`` and parsed alone; the first thing out of place ends the scan.

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
"""An entry as safetensors itself writes it; others go the slower way."""
_NEXT = re.compile(_SPACE + rb"([,}])")
_REST = re.compile(_SPACE + rb"\Z")
_PAIRS = json.JSONDecoder(object_pairs_hook=list)

Fields = dict[str, object]
"""What an entry says; its values are numbers, strings and lists."""


def scanned(
    data: bytes,
    *,
    file: str,
    what: str = "header",
    metadata: dict[str, str] | None = None,
    report: Report = raising,
) -> Iterator[tuple[str, Fields]]:
    """The entries of a JSON object of objects that hold no others, in order.

    Args:
        data: the text.
        file, what: where it comes from, for messages.
        metadata: gets the members of the entry ``__metadata__``, which must be strings; None if there is no such entry.
        report: told of names that are there twice, and of entries that are no objects of fields.

    Raises:
        CorruptError: anything else is wrong.
    """
    return _Scan(data, file, what, report).entries(metadata)


class _Scan:
    """One text, and how far it has been read."""

    def __init__(self, data: bytes, file: str, what: str, report: Report) -> None:
        self._data = data
        self._file = file
        self._what = what
        self._report = report
        self._at = 0

    def entries(self, metadata: dict[str, str] | None) -> Iterator[tuple[str, Fields]]:
        seen: set[str] = set()
        is_open = self._opened()
        while is_open:
            name = self._name()
            is_first = name not in seen
            if not is_first:
                message = f"the {self._what} has two entries of one name"
                self._report(CorruptError(message, file=self._file, key=name, rule="safetensors.duplicate"))
            seen.add(name)
            if metadata is not None and name == METADATA:
                self._strings(metadata)
            else:
                fields = self._fields(name)
                if fields is not None and is_first:
                    yield name, fields
            is_open = self._has_more()
        if _REST.match(self._data, self._at) is None:
            raise CorruptError(
                f"{len(self._data) - self._at} bytes follow the JSON object of the {self._what}", file=self._file
            )

    def _opened(self) -> bool:
        """Steps into an object; whether it has members."""
        found = _OPEN.match(self._data, self._at)
        if found is None:
            raise self._error("an opening brace")
        self._at = found.end()
        return found[1] is None

    def _name(self) -> str:
        """A member's name; its value follows."""
        found = _NAME.match(self._data, self._at)
        if found is None:
            raise self._error("a name and a colon")
        self._at = found.end()
        return self._text(found[1])

    def _has_more(self) -> bool:
        """Steps over a comma, or out of an object."""
        found = _NEXT.match(self._data, self._at)
        if found is None:
            raise self._error("a comma or a closing brace")
        self._at = found.end()
        return found[1] == b","

    def _strings(self, into: dict[str, str]) -> None:
        is_open = self._opened()
        while is_open:
            name = self._name()
            value = _TEXT.match(self._data, self._at)
            if value is None:
                raise CorruptError(
                    f"{METADATA} holds strings only, but {name[:100]!r} is none",
                    file=self._file,
                    rule="safetensors.metadata",
                )
            if name in into:
                message = f"{METADATA} has {name[:100]!r} twice"
                self._report(CorruptError(message, file=self._file, rule="safetensors.duplicate"))
            into[name] = self._text(value[0])
            self._at = value.end()
            is_open = self._has_more()

    def _fields(self, name: str) -> Fields | None:
        """What an entry says; None if it is no JSON, or says it twice, which was reported."""
        usual = _USUAL.match(self._data, self._at)
        if usual is not None:
            self._at = usual.end()
            dtype, shape, begin, end = usual.groups()
            extents = [int(extent) for extent in shape.split(b",")] if shape else []
            return {"dtype": dtype.decode(), "shape": extents, "data_offsets": [int(begin), int(end)]}
        found = _FLAT.match(self._data, self._at)
        if found is None:
            raise CorruptError(
                f"the entry is no JSON object of at most {MAX_ENTRY_BYTES} bytes", file=self._file, key=name
            )
        self._at = found.end()
        try:
            pairs: list[tuple[str, object]] = _PAIRS.decode(found[0].decode())
        except (ValueError, RecursionError) as err:
            self._report(CorruptError(f"the entry is no JSON: {err}", file=self._file, key=name))
            return None
        fields = dict(pairs)
        if len(fields) != len(pairs):
            self._report(CorruptError("the entry has a field twice", file=self._file, key=name))
            return None
        return fields

    def _text(self, token: bytes) -> str:
        """The string of a JSON token."""
        try:
            if b"\\" not in token:
                return token[1:-1].decode()
            text: str = json.loads(token)
            text.encode()  # half a surrogate pair can neither be printed nor written
        except ValueError as err:
            raise CorruptError(f"the {self._what} has a string that is no text: {err}", file=self._file) from err
        return text

    def _error(self, wanted: str) -> CorruptError:
        found = self._data[self._at : self._at + 20].decode("utf-8", "replace")
        return CorruptError(
            f"the {self._what} is no JSON: {wanted} should stand at its byte {self._at}, not {found!r}", file=self._file
        )
