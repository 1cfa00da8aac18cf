"""The operations of S3: a request, and what it does and answers."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from tests.support.s3.checksums import MAKERS
from tests.support.s3.objects import (
    BlobWriter,
    MultipartUpload,
    Objects,
    S3Error,
    StoredObject,
    check_sums,
)

PAGE = 1000
MAX_PARTS = 10_000
_ALGORITHM = "x-amz-checksum-algorithm"
_KEPT_HEADERS = ("content-type", "content-encoding", "cache-control", "x-amz-meta-")


@dataclass(frozen=True)
class S3Request:
    """A request.

    Args:
        method: of HTTP.
        bucket, key: what it is about; "" for none.
        query: name → value.
        headers: name in lower case → value.
    """

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def operation(self) -> str:
        """S3's name of what is asked for."""
        if not self.key:
            return self._operation_on_bucket()
        copies = "x-amz-copy-source" in self.headers
        names: dict[str, tuple[tuple[str, str], ...]] = {
            "GET": (("uploadId", "ListParts"), ("", "GetObject")),
            "HEAD": (("", "HeadObject"),),
            "PUT": (
                ("partNumber", "UploadPartCopy" if copies else "UploadPart"),
                ("", "CopyObject" if copies else "PutObject"),
            ),
            "POST": (
                ("uploads", "CreateMultipartUpload"),
                ("uploadId", "CompleteMultipartUpload"),
            ),
            "DELETE": (("uploadId", "AbortMultipartUpload"), ("", "DeleteObject")),
        }
        return next(
            (
                name
                for parameter, name in names.get(self.method, ())
                if not parameter or parameter in self.query
            ),
            "Unknown",
        )

    def _operation_on_bucket(self) -> str:
        if self.method == "GET":
            lists_uploads = "uploads" in self.query
            kind = "ListMultipartUploads" if lists_uploads else "ListObjectsV2"
            return kind if self.bucket else "ListBuckets"
        if self.method == "POST" and "delete" in self.query:
            return "DeleteObjects"
        names = {"PUT": "CreateBucket", "HEAD": "HeadBucket", "DELETE": "DeleteBucket"}
        return names.get(self.method, "Unknown")


@dataclass
class S3Answer:
    """An answer.

    Args:
        content: object whose bytes [start, stop) are the body, instead of ``body``.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    content: StoredObject | None = None
    start: int = 0
    stop: int = 0


def error_answer(status: int, code: str, message: str = "") -> S3Answer:
    """Return the answer for an error."""
    text = f"<Code>{code}</Code><Message>{escape(message or code)}</Message>"
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error>{text}<RequestId>1</RequestId></Error>'
    return S3Answer(status, body.encode(), {"Content-Type": "application/xml"})


def _xml(name: str, *parts: str) -> S3Answer:
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{space}">{"".join(parts)}</{name}>'
    )
    return S3Answer(200, text.encode(), {"Content-Type": "application/xml"})


def _element(name: str, value: object) -> str:
    return f"<{name}>{escape(str(value))}</{name}>"


def _iso(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(nanoseconds // 10**9))


def sums_of(headers: Mapping[str, str]) -> list[str]:
    """Return the checksums that a request states, or will state in its trailers."""
    named = [*headers, *headers.get("x-amz-trailer", "").replace(",", " ").lower().split()]
    return [name for name in MAKERS if name in named]


class Operations:
    """The operations on what a server holds."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._small: dict[str, Callable[[S3Request, bytes], S3Answer]] = {
            "ListBuckets": self._list_buckets,
            "CreateBucket": self._create_bucket,
            "DeleteBucket": self._delete_bucket,
            "HeadBucket": self._head_bucket,
            "ListObjectsV2": self._list_objects,
            "ListMultipartUploads": self._list_uploads,
            "DeleteObjects": self._delete_objects,
            "GetObject": self._get_object,
            "HeadObject": self._get_object,
            "DeleteObject": self._delete_object,
            "CopyObject": self._copy_object,
            "UploadPartCopy": self._copy_part,
            "ListParts": self._list_parts,
            "CreateMultipartUpload": self._begin_upload,
            "CompleteMultipartUpload": self._complete_upload,
            "AbortMultipartUpload": self._abort_upload,
        }

    def new_writer(self, request: S3Request) -> BlobWriter:
        """Return the blob that takes the body of a request."""
        return self._objects.new_writer(sums_of(request.headers))

    def finish(
        self, request: S3Request, writer: BlobWriter, trailers: Mapping[str, str]
    ) -> S3Answer:
        """Do what a request asks for whose body has been received."""
        new = self._objects.finish(writer, {})
        try:
            stated = {**request.headers, **trailers}
            sums = {name: stated[name] for name in MAKERS if name in stated}
            check_sums(writer, sums)
            operation = request.operation
            if operation in ("PutObject", "UploadPart"):
                stored_headers = _kept(request.headers) | {
                    name: value for name, value in sums.items() if name.startswith("x-amz")
                }
                put = self._put_object if operation == "PutObject" else self._put_part
                return put(request, StoredObject(new.blobs, new.e_tag, stored_headers))
            if operation not in self._small:
                raise S3Error(501, "NotImplemented", f"{request.method} {dict(request.query)}")
            return self._small[operation](request, b"".join(writer.blob.reader()))
        except S3Error as err:
            return error_answer(err.status, err.code, err.message)

    # ------------------------------------------------------------------ buckets

    def _list_buckets(self, request: S3Request, body: bytes) -> S3Answer:
        names = (f"<Bucket>{_element('Name', name)}</Bucket>" for name in self._objects.buckets)
        return _xml("ListAllMyBucketsResult", "<Buckets>", *names, "</Buckets>")

    def _create_bucket(self, request: S3Request, body: bytes) -> S3Answer:
        self._objects.buckets.setdefault(request.bucket, {})
        return S3Answer(headers={"Location": f"/{request.bucket}"})

    def _delete_bucket(self, request: S3Request, body: bytes) -> S3Answer:
        if self._objects.bucket(request.bucket):
            raise S3Error(409, "BucketNotEmpty")
        del self._objects.buckets[request.bucket]
        return S3Answer(204)

    def _head_bucket(self, request: S3Request, body: bytes) -> S3Answer:
        self._objects.bucket(request.bucket)
        return S3Answer()

    def _list_objects(self, request: S3Request, body: bytes) -> S3Answer:
        query, objects = request.query, self._objects
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        n_max = min(PAGE, int(query.get("max-keys", PAGE)))
        is_quoted = query.get("encoding-type") == "url"

        def shown(name: str, value: str) -> str:
            return _element(name, quote(value) if is_quoted else value)

        entries: dict[str, str] = {}
        is_truncated = False
        for key in objects.keys(request.bucket, prefix, after):
            inner, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            name = prefix + inner + mark if mark else key
            # A common prefix was on the page before, if the token is one.
            if name in entries or (mark and name <= after):
                continue
            if len(entries) == n_max:
                is_truncated = True
                break
            if mark:
                entries[name] = f"<CommonPrefixes>{shown('Prefix', name)}</CommonPrefixes>"
                continue
            entry = objects.buckets[request.bucket].get(key)
            if entry is not None:  # not deleted meanwhile
                entries[name] = "".join(
                    (
                        f"<Contents>{shown('Key', key)}",
                        _element("LastModified", _iso(entry.modified_ns)),
                        f"{_element('ETag', entry.e_tag)}{_element('Size', entry.size)}",
                        "<StorageClass>STANDARD</StorageClass></Contents>",
                    )
                )
        parts = [
            _element("Name", request.bucket),
            shown("Prefix", prefix),
            _element("KeyCount", len(entries)),
            _element("MaxKeys", n_max),
            _element("IsTruncated", str(is_truncated).lower()),
        ]
        if is_quoted:
            parts.append(_element("EncodingType", "url"))
        if is_truncated:
            parts.append(_element("NextContinuationToken", [*entries][-1]))
        return _xml("ListBucketResult", *parts, *entries.values())

    def _delete_objects(self, request: S3Request, body: bytes) -> S3Answer:
        if not sums_of(request.headers):
            raise S3Error(400, "InvalidRequest", "Content-MD5 or x-amz-checksum is required")
        tree = _parsed(body)
        keys = [node.findtext("{*}Key", "") for node in tree.iter() if _is_named(node, "Object")]
        if not 0 < len(keys) <= PAGE:
            raise S3Error(400, "MalformedXML")
        for key in keys:
            self._objects.delete(request.bucket, key)
        if tree.findtext("{*}Quiet") == "true":
            return _xml("DeleteResult")
        return _xml("DeleteResult", *(f"<Deleted>{_element('Key', key)}</Deleted>" for key in keys))

    # ------------------------------------------------------------------ objects

    def _get_object(self, request: S3Request, body: bytes) -> S3Answer:
        entry = self._objects.get(request.bucket, request.key)
        tag = request.headers.get("if-match")
        if tag not in (None, "*", entry.e_tag):
            raise S3Error(412, "PreconditionFailed")
        if request.headers.get("if-none-match") in ("*", entry.e_tag):
            return S3Answer(304)
        modified = formatdate(entry.modified_ns // 10**9, usegmt=True)
        since = request.headers.get("if-unmodified-since")
        if since and tag is None and _is_before(since, entry.modified_ns):
            raise S3Error(412, "PreconditionFailed")
        headers = {
            name: value
            for name, value in entry.headers.items()
            if not name.startswith("x-amz-checksum") or "x-amz-checksum-mode" in request.headers
        }
        headers |= {"ETag": entry.e_tag, "Last-Modified": modified, "Accept-Ranges": "bytes"}
        span = _span_of(request.headers.get("range", ""), entry.size)
        if span is None:
            return S3Answer(200, b"", headers, entry, 0, entry.size)
        headers = {
            name: value for name, value in headers.items() if not name.startswith("x-amz-checksum")
        }
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{entry.size}"
        return S3Answer(206, b"", headers, entry, *span)

    def _put_object(self, request: S3Request, new: StoredObject) -> S3Answer:
        self._objects.put(request.bucket, request.key, new, _condition(request.headers))
        return S3Answer(headers={"ETag": new.e_tag, **_checksums(new)})

    def _delete_object(self, request: S3Request, body: bytes) -> S3Answer:
        self._objects.delete(request.bucket, request.key)
        return S3Answer(204)

    def _copy_source(self, request: S3Request) -> StoredObject:
        source = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("?")[0]
        bucket, _, key = source.partition("/")
        entry = self._objects.get(bucket, key)
        if request.headers.get("x-amz-copy-source-if-match", entry.e_tag) != entry.e_tag:
            raise S3Error(412, "PreconditionFailed")
        return entry

    def _copy_object(self, request: S3Request, body: bytes) -> S3Answer:
        source = self._copy_source(request)
        replaces = request.headers.get("x-amz-metadata-directive") == "REPLACE"
        headers = _kept(request.headers) if replaces else source.headers
        new = StoredObject(source.blobs, source.e_tag, headers)
        self._objects.put(request.bucket, request.key, new, _condition(request.headers))
        return _xml("CopyObjectResult", *_tag_and_time(new))

    # ------------------------------------------------------------------ uploads

    def _begin_upload(self, request: S3Request, body: bytes) -> S3Answer:
        algorithm = request.headers.get(_ALGORITHM, "")
        upload_id = self._objects.begin_upload(
            request.bucket, request.key, _kept(request.headers), algorithm
        )
        answer = _xml(
            "InitiateMultipartUploadResult",
            _element("Bucket", request.bucket),
            _element("Key", request.key),
            _element("UploadId", upload_id),
        )
        # A store that checks the parts confirms by which checksum.
        if algorithm:
            answer.headers[_ALGORITHM] = algorithm
        return answer

    def _upload_of(self, request: S3Request) -> MultipartUpload:
        return self._objects.upload(request.bucket, request.key, request.query["uploadId"])

    def _put_part(self, request: S3Request, new: StoredObject) -> S3Answer:
        number = int(request.query["partNumber"])
        if not 1 <= number <= MAX_PARTS:
            raise S3Error(400, "InvalidArgument", "Part number must be from 1 to 10000")
        self._upload_of(request).parts[number] = new
        return S3Answer(headers={"ETag": new.e_tag, **_checksums(new)})

    def _copy_part(self, request: S3Request, body: bytes) -> S3Answer:
        source = self._copy_source(request)
        span = _span_of(request.headers.get("x-amz-copy-source-range", ""), source.size)
        writer = self._objects.new_writer(())
        first, stop = span or (0, source.size)
        position = 0
        for blob in source.blobs:
            for data in blob.reader():
                part = data[max(0, first - position) : max(0, stop - position)]
                writer.write(memoryview(part))
                position += len(data)
        new = self._objects.finish(writer, {})
        self._put_part(request, new)
        return _xml("CopyPartResult", *_tag_and_time(new))

    def _list_parts(self, request: S3Request, body: bytes) -> S3Answer:
        upload = self._upload_of(request)
        after = int(request.query.get("part-number-marker", 0) or 0)
        n_max = min(PAGE, int(request.query.get("max-parts", PAGE)))
        numbers = [number for number in sorted(upload.parts) if number > after]
        entries = []
        for number in numbers[:n_max]:
            part = upload.parts[number]
            about = f"{_element('PartNumber', number)}{_element('Size', part.size)}"
            for header, value in _checksums(part).items():
                about += _element(f"Checksum{header.rpartition('-')[2].upper()}", value)
            entries.append(f"<Part>{about}{''.join(_tag_and_time(part))}</Part>")
        is_truncated = len(numbers) > n_max
        return _xml(
            "ListPartsResult",
            _element("UploadId", request.query["uploadId"]),
            _element("ChecksumAlgorithm", upload.algorithm) if upload.algorithm else "",
            _element("IsTruncated", str(is_truncated).lower()),
            _element("NextPartNumberMarker", numbers[n_max - 1]) if is_truncated else "",
            *entries,
        )

    def _list_uploads(self, request: S3Request, body: bytes) -> S3Answer:
        self._objects.bucket(request.bucket)
        query = request.query
        after = (query.get("key-marker", ""), query.get("upload-id-marker", "\uffff"))
        n_max = min(PAGE, int(query.get("max-uploads", PAGE)))
        with self._objects.lock:
            uploads = sorted(
                (upload.key, upload_id, upload.begun_ns)
                for upload_id, upload in self._objects.uploads.items()
                if upload.bucket == request.bucket
                and upload.key.startswith(query.get("prefix", ""))
            )
        uploads = [upload for upload in uploads if upload[:2] > after or not after[0]]
        page = uploads[:n_max]
        parts = [_element("IsTruncated", str(len(uploads) > n_max).lower())]
        if len(uploads) > n_max:
            parts.append(_element("NextKeyMarker", page[-1][0]))
            parts.append(_element("NextUploadIdMarker", page[-1][1]))
        for key, upload_id, begun_ns in page:
            about = f"{_element('Key', key)}{_element('UploadId', upload_id)}"
            parts.append(f"<Upload>{about}{_element('Initiated', _iso(begun_ns))}</Upload>")
        return _xml("ListMultipartUploadsResult", *parts)

    def _complete_upload(self, request: S3Request, body: bytes) -> S3Answer:
        # A second request of a completed upload is refused, as documented; Amazon's servers are
        # more patient for a while, others are not.
        upload = self._upload_of(request)
        wanted = [
            (int(node.findtext("{*}PartNumber", "0")), node.findtext("{*}ETag", ""))
            for node in _parsed(body).iter()
            if _is_named(node, "Part")
        ]
        new = self._objects.joined(upload, wanted)
        with self._objects.lock:
            self._upload_of(request)
            self._objects.put(request.bucket, request.key, new, _condition(request.headers))
            del self._objects.uploads[request.query["uploadId"]]
        return _xml(
            "CompleteMultipartUploadResult",
            _element("Bucket", request.bucket),
            _element("Key", request.key),
            _element("ETag", new.e_tag),
        )

    def _abort_upload(self, request: S3Request, body: bytes) -> S3Answer:
        with self._objects.lock:
            self._upload_of(request)
            del self._objects.uploads[request.query["uploadId"]]
        return S3Answer(204)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are told to readers, without the coding of the request itself."""
    stored_headers = {
        name: value for name, value in headers.items() if name.startswith(_KEPT_HEADERS)
    }
    codings = [part.strip() for part in stored_headers.pop("content-encoding", "").split(",")]
    codings = [coding for coding in codings if coding not in ("", "aws-chunked")]
    return stored_headers | ({"content-encoding": ",".join(codings)} if codings else {})


def _checksums(entry: StoredObject) -> dict[str, str]:
    return {
        name: value for name, value in entry.headers.items() if name.startswith("x-amz-checksum")
    }


def _tag_and_time(entry: StoredObject) -> tuple[str, str]:
    return _element("ETag", entry.e_tag), _element("LastModified", _iso(entry.modified_ns))


def _condition(headers: Mapping[str, str]) -> Callable[[StoredObject | None], None]:
    """Return what checks ``If-None-Match: *`` and ``If-Match`` of a request that writes."""

    def check(existing: StoredObject | None) -> None:
        if existing is not None and headers.get("if-none-match") == "*":
            raise S3Error(412, "PreconditionFailed", "the object exists")
        tag = headers.get("if-match")
        if tag is not None and existing is None:
            raise S3Error(404, "NoSuchKey")
        if tag is not None and existing is not None and tag not in ("*", existing.e_tag):
            raise S3Error(412, "PreconditionFailed", "the object has another ETag")

    return check


def _span_of(text: str, size: int) -> tuple[int, int] | None:
    """Return [start, stop) of a range; None for the whole object.

    Raises:
        S3Error: the range begins behind the end.
    """
    unit, _, rest = text.partition("=")
    first, dash, last = rest.partition("-")
    if unit != "bytes" or not dash or "," in rest:
        return None
    if first:
        span = int(first), min(size, int(last) + 1) if last else size
    else:
        span = max(0, size - int(last)), size
    if span[0] >= size or span[0] >= span[1]:
        raise S3Error(416, "InvalidRange", "The requested range is not satisfiable")
    return span


def _is_before(date: str, nanoseconds: int) -> bool:
    return parsedate_to_datetime(date).timestamp() < nanoseconds // 10**9


def _parsed(body: bytes) -> ET.Element:
    try:
        return ET.fromstring(body)
    except ET.ParseError:
        raise S3Error(400, "MalformedXML") from None


def _is_named(node: ET.Element, name: str) -> bool:
    return node.tag.rpartition("}")[2] == name
