"""S3-compatible storage through botocore. Every call tries once and reports well; ``RetryStore`` repeats.

What is not the same everywhere (exclusive creation, checked digests) is found out by calls that prove themselves, never by the name
of a provider. What a HEAD cannot say (403 and 404 come without a body) is asked again with a GET, so that a wrong key, a missing
right, a missing bucket and a missing object never look alike.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import os
import re
import socket
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from ..config import StoreConfig
from ..errors import Conflict, InvalidReply, NotFound, StagekitError, StoreError, Unreachable, UsageError, WrongCredentials
from ..location import Location
from .abandon import breaking_off
from .base import Children, Data, ObjectInfo, OpenUpload, check_key, check_part, check_parts, check_prefix, check_range
from .buffers import buffer
from .extras import ExpiryRule
from .s3_client import Client, client_for, drop
from .s3_errors import VENDOR_ERRORS, bare, error_code, status_of, translate
from .s3_obstore import RANGES, fast_reads
from .usage import Usage, count_at, counting, meter_of

_PIECE_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_MOST_PARTS = 10_000
_PROBING = "trying to write below"  # what the caller wants to write; the scratch object's name would tell nobody anything


class S3Store:
    """``s3://bucket/prefix`` at the endpoint that ``config``, the URL's profile or the environment names.

    It holds the location and the settings. The client with its connections belongs to the process and is found when first needed.
    ``page_size`` is the number of keys to ask for in one page of a listing.
    """

    def __init__(self, location: str | Location, config: StoreConfig | None = None, *, page_size: int = 1000) -> None:
        self._location = Location.parse(location)
        self._config = config or StoreConfig()
        self._page_size = page_size
        self._client: Client | None = None
        self._meter = meter_of(self._location)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_meter"} | {"_client": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _meter=meter_of(state["_location"]))

    @property
    def location(self) -> Location:
        return self._location

    @property
    def config(self) -> StoreConfig:
        """The settings it was opened with."""
        return self._config

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        path = self._path(key)
        if if_absent and not self.conditional_create():
            raise UsageError(f"creating {self._name(key)}: this endpoint ignores conditions, so nothing can be created exclusively here")
        doing = "creating" if if_absent else "writing"
        extra = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            answer = self._call(doing, key, "put_object", Key=path, Body=_body(data), ContentMD5=_md5(data), **extra)
        except Conflict as error:
            if if_absent and not error.transient:
                raise Conflict(f"creating {self._name(key)}: the object exists already") from error.__cause__
            raise
        return ObjectInfo(key, len(data), self._etag(doing, key, answer))

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[_S3Multipart]:
        path = self._path(key)
        upload_id = self._call("starting the upload of", key, "create_multipart_upload", Key=path)["UploadId"]
        upload = _S3Multipart(self, key, path, upload_id, part_size)
        try:
            yield upload
            upload.complete()
        except BaseException:
            # What cannot be aborted now stays an open upload; the error that brought us here is the one to report.
            with suppress(StagekitError):
                self.abort_upload(OpenUpload(key, upload_id))
            raise

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        check_range(start, length)
        if length == 0:
            return self._get_nothing(key, start, if_match)
        arguments: dict[str, Any] = {"Key": self._path(key)}
        if start or length is not None:
            arguments["Range"] = f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"
        if if_match is not None:
            arguments["IfMatch"] = f'"{if_match}"'
        client = self._bound()
        fast = fast_reads(self._location, client) if length is not None else None
        if fast is not None and length is not None:
            with counting(self._meter):
                data = fast.get(arguments["Key"], start, length, if_match)
            if data is not None:
                return data
        try:
            answer = self._ask(client, "get_object", **arguments)
        except VENDOR_ERRORS as error:
            if error_code(error) == "InvalidRange" or status_of(error) == 416:
                if length is None:
                    return self._get_nothing(key, start, if_match)
                raise self._beyond(key, start + length, self.head(key).size) from error
            if if_match is not None and status_of(error) == 412:
                raise self._replaced(key, if_match) from error
            raise self._error(client, error, "reading", key) from error
        client.was_reached = True
        found = self._read(client, key, answer, start, length, if_match)
        if "Range" in arguments:
            client.facts[self._location.bucket, RANGES] = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        if fast is not None:
            fast.botocore_could()
        return found

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        client = self._bound()
        try:
            answer = self._ask(client, "head_object", Key=path)
        except VENDOR_ERRORS as error:
            if bare(error) and status_of(error) < 500:
                return self._head_by_get(key, path)
            raise self._error(client, error, "looking up", key) from error
        client.was_reached = True
        etag = self._etag("looking up", key, answer)
        return ObjectInfo(key, answer["ContentLength"], etag, _seconds(answer.get("LastModified")))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._list(prefix, strict=False)

    def list_strictly(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._list(prefix, strict=True)

    def _list(self, prefix: str, *, strict: bool) -> Iterator[ObjectInfo]:
        base = self._base()
        last = ""
        for page in self._pages("listing", prefix, base + check_prefix(prefix)):
            # A page is complete, so sorting it helps servers that order folders in their own way; across pages nothing can be mended.
            for item in sorted(page.get("Contents", ()), key=lambda item: str(item["Key"])):
                path: str = item["Key"]
                if path <= last:
                    raise InvalidReply(f"listing {self._name(prefix)}: the pages are not in order of key", transient=False)
                last = path
                info = self._listed(item, base, prefix)
                if info is not None:
                    yield info
                elif strict and not path.endswith("/"):
                    raise UsageError(
                        f"listing {self._name(prefix)}: the object {path!r} has a name with an empty, '.' or '..' part, which is no file's "
                        "name anywhere; rename or remove it there"
                    )

    def children(self, prefix: str = "") -> Children:
        base = self._base()
        objects: dict[str, ObjectInfo] = {}
        folders: set[str] = set()
        for page in self._pages("listing", prefix, base + check_prefix(prefix), Delimiter="/"):
            for item in page.get("Contents", ()):
                info = self._listed(item, base, prefix)
                if info is not None:
                    objects[info.key] = info
            folders.update(item["Prefix"][len(base) :] for item in page.get("CommonPrefixes", ()))
        return Children(tuple(objects[key] for key in sorted(objects)), tuple(sorted(folders - {prefix + "/"})))

    def delete(self, key: str) -> None:
        with suppress(NotFound):
            self._call("deleting", key, "delete_object", Key=self._path(key))

    def conditional_create(self) -> bool:
        """Proven once per process and bucket: a scratch object is created twice, and the second time must be refused."""
        return self._fact("creates exclusively", self._proves_conditions)

    def checks_digest(self) -> bool:
        """Proven once per process and bucket: a scratch object with a wrong MD5 must be refused."""
        return self._fact("checks digests", self._proves_digests)

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        base = self._base()
        below = base + check_prefix(prefix)
        position: dict[str, str] = {}
        while True:
            # Not asked to be URL-encoded, as listings of objects are: Ceph encodes the keys and does not say so.
            try:
                page = self._call("listing the uploads of", prefix, "list_multipart_uploads", Prefix=below, **position)
            except StoreError as error:
                if isinstance(error.__cause__, Exception) and error_code(error.__cause__) == "NoSuchUpload":  # rclone's word for none
                    return
                raise
            for item in page.get("Uploads", ()):
                path: str = item["Key"]
                if path.startswith(below) and len(path) > len(base):
                    yield OpenUpload(path[len(base) :], item["UploadId"], _seconds(item.get("Initiated")))
            following = {"KeyMarker": page.get("NextKeyMarker", ""), "UploadIdMarker": page.get("NextUploadIdMarker", "")}
            if not page.get("IsTruncated") or following == position:
                return
            position = following

    def abort_upload(self, upload: OpenUpload) -> None:
        client = self._bound()
        try:
            self._ask(client, "abort_multipart_upload", Key=self._path(upload.key), UploadId=upload.upload_id)
        except VENDOR_ERRORS as error:
            if error_code(error) not in ("NoSuchUpload", "NoSuchKey"):
                raise self._error(client, error, "aborting the upload of", upload.key) from error

    # ------------------------------------------------------------------------------------------------------------- beyond the contract

    def server_time_s(self) -> float | None:
        answer = self._call("asking for the time of", "", "list_objects_v2", Prefix=self._base(), MaxKeys=1)
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        with suppress(TypeError, ValueError):
            return parsedate_to_datetime(date).timestamp()
        return None

    def expiry_rules(self) -> tuple[ExpiryRule, ...]:
        try:
            answer = self._call("reading the lifecycle rules of", "", "get_bucket_lifecycle_configuration")
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and (
                error_code(cause) in ("NoSuchLifecycleConfiguration", "NotImplemented", "MethodNotAllowed")
                or status_of(cause) in (405, 501)
            ):
                return ()
            raise
        return tuple(rule for rule in map(_expiry_rule, answer.get("Rules", ())) if rule is not None)

    # ------------------------------------------------------------------------------------------------------------- names and calls

    def _base(self) -> str:
        return self._location.path + "/" if self._location.path else ""

    def _path(self, key: str) -> str:
        return self._base() + check_key(key)

    def _name(self, key: str) -> str:
        return str(self._location / key)

    def _bound(self) -> Client:
        client = self._client
        if client is None or client.pid != os.getpid():
            client = self._client = client_for(self._location, self._config)
            self._meter = meter_of(self._location)
        return client

    def _ask(self, client: Client, operation: str, **arguments: Any) -> Any:
        """botocore's own answer, or error."""
        with counting(self._meter):
            return getattr(client.api, operation)(Bucket=self._location.bucket, **arguments)

    def _call(self, doing: str, key: str, operation: str, **arguments: Any) -> Any:
        client = self._bound()
        try:
            answer = self._ask(client, operation, **arguments)
        except VENDOR_ERRORS as error:
            raise self._error(client, error, doing, key) from error
        client.was_reached = True
        return answer

    def _error(self, client: Client, error: Exception, doing: str, key: str) -> StagekitError:
        if status_of(error):
            client.was_reached = True
        found = translate(error, doing, self._name(key), client.address)
        if isinstance(found, WrongCredentials):
            # Keys that were renewed in the meantime are read at the next call.
            drop(client)
            self._client = None
        return found

    def _etag(self, doing: str, key: str, answer: Any) -> str:
        """The answer's etag. Every S3 answer about an object has one; the login page of a captive network has not."""
        etag = answer.get("ETag")
        if not etag:
            raise InvalidReply(
                f"{doing} {self._name(key)}: {self._bound().address} gave an answer without an etag, as no object store does"
            )
        return str(etag).strip('"')

    def _pages(self, doing: str, prefix: str, below: str, **arguments: Any) -> Iterator[Any]:
        token: str | None = None
        while True:
            more = {"ContinuationToken": token} if token is not None else {}
            page = self._call(doing, prefix, "list_objects_v2", Prefix=below, MaxKeys=self._page_size, **arguments, **more)
            if not any(field in page for field in ("IsTruncated", "Name", "KeyCount", "Contents")):
                raise InvalidReply(f"{doing} {self._name(prefix)}: {self._bound().address} gave an answer that is no listing")
            yield page
            if not page.get("IsTruncated"):
                return
            following = page.get("NextContinuationToken")
            if not following or following == token:
                raise InvalidReply(f"{doing} {self._name(prefix)}: the listing says that it goes on, and not where")
            token = following

    def _listed(self, item: Any, base: str, prefix: str) -> ObjectInfo | None:
        """The object as this store names it; ``None`` for a folder marker, and for names that no key can have."""
        path: str = item["Key"]
        key = path[len(base) :]
        if not path.startswith(base + prefix):
            raise InvalidReply(f"listing {self._name(prefix)}: the answer holds {path!r}, which does not lie there")
        try:
            check_key(key)
        except UsageError:
            return None
        return ObjectInfo(key, item["Size"], str(item.get("ETag", "")).strip('"') or None, _seconds(item.get("LastModified")))

    # ------------------------------------------------------------------------------------------------------------------- reading

    def _read(self, client: Client, key: str, answer: Any, start: int, length: int | None, if_match: str | None) -> Data:
        body = answer["Body"]
        reader = _BodyReader(body)
        finished = False
        try:
            etag = self._etag("reading", key, answer)
            if if_match is not None and etag != if_match:  # a server that ignores conditions
                raise self._replaced(key, if_match)
            read, size = self._extent(key, answer, start, length)
            skip = read
            data = buffer(size)
            arrived = 0
            try:
                with breaking_off(reader.break_off):
                    if skip:
                        rubbish = memoryview(bytearray(min(skip, _PIECE_BYTES)))
                    while skip:
                        count = reader.into(rubbish[:skip])
                        if not count:
                            raise Unreachable(f"reading {self._name(key)}: the body ended before byte {start}")
                        skip -= count
                    while arrived < size:
                        count = reader.into(data[arrived:])
                        if not count:
                            raise Unreachable(
                                f"reading {self._name(key)}: the body ended after {arrived} of {size} bytes",
                                received=bytes(data[:arrived]),
                                etag=etag,
                            )
                        arrived += count
            except VENDOR_ERRORS as error:
                found = self._error(client, error, "reading", key)
                if isinstance(found, StoreError):
                    found.received, found.etag = bytes(data[: 0 if skip else arrived + reader.came]), etag
                raise found from error
            finished = bool(size) and read + size == answer["ContentLength"]
            return data
        finally:
            count_at(self._meter, Usage(received_bytes=reader.total))
            reader.detach()
            if not finished:
                body.close()  # bytes that nobody reads are left in it, or nobody saw its end: the connection cannot be used again

    def _extent(self, key: str, answer: Any, start: int, length: int | None) -> tuple[int, int]:
        """Bytes of the body to skip and then to read. Answers are 206, 200 with the range, or the whole object."""
        status: int = answer["ResponseMetadata"]["HTTPStatusCode"]
        content_length: int = answer["ContentLength"]
        stated = answer.get("ContentRange")
        if stated is None:
            if status == 206:
                raise InvalidReply(f"reading {self._name(key)}: the answer is a part of the object and does not say which")
            end = content_length if length is None else start + length
            if max(start, end) > content_length:
                raise self._beyond(key, max(start, end), content_length)
            return start, end - start
        match = _CONTENT_RANGE.fullmatch(stated)
        if match is None or int(match[1]) != start or int(match[2]) - int(match[1]) + 1 != content_length:
            raise InvalidReply(f"reading {self._name(key)}: asked for bytes from {start} and got {stated!r} with {content_length} bytes")
        if length is not None and content_length < length and match[3] != "*" and start + length > int(match[3]):
            raise self._beyond(key, start + length, int(match[3]))
        if (length is not None and content_length != length) or (length is None and match[3] not in ("*", str(start + content_length))):
            raise InvalidReply(f"reading {self._name(key)}: asked for {length} bytes from {start} and got {stated!r}")
        return 0, content_length

    def _get_nothing(self, key: str, start: int, if_match: str | None) -> Data:
        """An empty range, which HTTP cannot ask for."""
        info = self.head(key)
        if if_match is not None and info.etag != if_match:
            raise self._replaced(key, if_match)
        if start > info.size:
            raise self._beyond(key, start, info.size)
        return b""

    def _head_by_get(self, key: str, path: str) -> ObjectInfo:
        """What HEAD refused to say: a GET of one byte answers with a code, and raises the error that fits."""
        client = self._bound()
        try:
            answer = self._ask(client, "get_object", Key=path, Range="bytes=0-0")
        except VENDOR_ERRORS as error:
            if error_code(error) == "InvalidRange":  # it has appeared, and is empty
                answer = self._call("looking up", key, "get_object", Key=path)
            else:
                raise self._error(client, error, "looking up", key) from error
        answer["Body"].close()
        match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
        size = int(match[3]) if match and match[3] != "*" else answer["ContentLength"]
        return ObjectInfo(key, size, self._etag("looking up", key, answer), _seconds(answer.get("LastModified")))

    def _beyond(self, key: str, end: int, size: int) -> InvalidReply:
        return InvalidReply(f"reading {self._name(key)}: bytes up to {end} reach beyond its end at {size}", transient=False)

    def _replaced(self, key: str, if_match: str) -> Conflict:
        return Conflict(f"reading {self._name(key)}: the object was replaced, its etag is no longer {if_match}")

    # ------------------------------------------------------------------------------------------------------------------- probing

    def _fact(self, name: str, prove: Any) -> bool:
        client = self._bound()
        known = client.facts.get((self._location.bucket, name))
        if known is None:
            known = client.facts[self._location.bucket, name] = prove()
        return known

    def _proves_conditions(self) -> bool:
        with self._scratch() as path:
            body = {"Key": path, "Body": b"", "IfNoneMatch": "*"}
            try:
                self._call(_PROBING, "", "put_object", **body)
                self._call(_PROBING, "", "put_object", **body)
            except Conflict as error:
                if error.transient:
                    raise
                return True
            except StoreError as error:
                if isinstance(error.__cause__, Exception) and status_of(error.__cause__) == 501:
                    return False
                raise
            return False

    def _proves_digests(self) -> bool:
        with self._scratch() as path:
            client = self._bound()
            try:
                self._ask(client, "put_object", Key=path, Body=b"right", ContentMD5=_md5(b"wrong"))
            except VENDOR_ERRORS as error:
                if error_code(error) in ("BadDigest", "InvalidDigest"):
                    return True
                raise self._error(client, error, _PROBING, "") from error
            return False

    @contextmanager
    def _scratch(self) -> Iterator[str]:
        key = f".stagekit-probe-{uuid.uuid4().hex}"
        try:
            yield self._path(key)
        finally:
            with suppress(StoreError):
                self.delete(key)

    def __repr__(self) -> str:
        return f"S3Store({str(self._location)!r}, {self._config!r})"


class _Part(NamedTuple):
    size: int
    etag: str
    md5: bytes


class _S3Multipart:
    def __init__(self, store: S3Store, key: str, path: str, upload_id: str, part_size: int) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._upload_id = upload_id
        self._part_size = part_size
        self._parts: dict[int, _Part] = {}
        self._lock = threading.Lock()
        self._unanswered = False
        self._info: ObjectInfo | None = None

    @property
    def part_size(self) -> int:
        return self._part_size

    def put_part(self, number: int, data: Data) -> None:
        name = self._store._name(self._key)
        check_part(number, len(data), self._part_size, name)
        if number >= _MOST_PARTS:
            raise UsageError(f"writing {name}: S3 allows {_MOST_PARTS:,} parts; use larger ones than {self._part_size} bytes")
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        answer = self._store._call(
            f"writing part {number} of",
            self._key,
            "upload_part",
            Key=self._path,
            UploadId=self._upload_id,
            PartNumber=number + 1,
            Body=_body(data),
            ContentMD5=base64.b64encode(digest).decode(),
        )
        with self._lock:
            self._parts[number] = _Part(len(data), answer["ETag"], digest)

    def complete(self) -> ObjectInfo:
        if self._info is not None:
            return self._info
        store, key = self._store, self._key
        with self._lock:
            parts = dict(self._parts)
        size = check_parts({number: part.size for number, part in parts.items()}, self._part_size, store._name(key))
        if not parts:  # S3 completes no upload without parts
            info = store.put(key, b"")
            store.abort_upload(OpenUpload(key, self._upload_id))
            self._info = info
            return info
        listed = [{"PartNumber": number + 1, "ETag": parts[number].etag} for number in range(len(parts))]
        try:
            store._call(
                "finishing the upload of",
                key,
                "complete_multipart_upload",
                Key=self._path,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": listed},
            )
        except StoreError as error:
            cause = error.__cause__
            if self._unanswered and isinstance(cause, Exception) and error_code(cause) == "NoSuchUpload":
                # The earlier try that got no answer may have been carried out.
                self._info = self._found(parts, size, error)
                return self._info
            self._unanswered = self._unanswered or error.transient
            raise
        # Without the answer's etag: rclone gives the object another one than it states here.
        self._info = ObjectInfo(key, size)
        return self._info

    def _found(self, parts: dict[int, _Part], size: int, error: StoreError) -> ObjectInfo:
        info = self._store.head(self._key)
        digests = b"".join(parts[number].md5 for number in range(len(parts)))
        expected = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
        has_md5s = all(part.etag.strip('"') == part.md5.hex() for part in parts.values())
        if info.size != size or (has_md5s and info.etag != expected):
            raise error
        return info

    @property
    def info(self) -> ObjectInfo:
        if self._info is None:
            raise StoreError(f"writing {self._store._name(self._key)}: the upload is not finished")
        return self._info


class _BodyReader:
    """Reads the body of an answer into memory: straight from the socket where urllib3 is as we know it, whose own ``readinto`` makes bytes
    and copies them, which costs as much again as the reading.

    ``came`` tells after an error how many bytes of that call had come: nothing of a body that stalls or is cut is lost. ``total`` are the
    bytes of all calls.
    """

    _errors: Any  # urllib3 gives it no type
    _socket: Any  # of whatever lies beneath

    def __init__(self, body: Any) -> None:
        self.came = self.total = 0
        raw = getattr(body, "_raw_stream", None)
        source, errors = getattr(raw, "_fp", None), getattr(raw, "_error_catcher", None)
        self._source: http.client.HTTPResponse | None = None
        self._body, self._errors, self._socket = body, errors, None
        if errors is not None and isinstance(source, http.client.HTTPResponse) and not source.chunked and source.fp is not None:
            self._socket = getattr(getattr(source.fp, "raw", None), "_sock", None)
            source.fp = _Arrivals(source.fp, self._socket)  # type: ignore[assignment]  # as much of a file as is used
            self._source = source

    def into(self, memory: memoryview) -> int:
        """Fill ``memory``, or a piece of it; nothing is read only at the body's end."""
        self.came = 0
        source = self._source
        if source is None:
            read: int = self._body.readinto(memory[:_PIECE_BYTES])
            self.total += read
            return read
        with self._errors():  # makes the socket's errors urllib3's, and gives the connection back behind the last byte
            while self.came < len(memory):
                count = source.readinto(memory[self.came :])
                if not count:
                    break
                self.came += count
                self.total += count
        came, self.came = self.came, 0
        return came

    def detach(self) -> None:
        """Let go of the body and its socket. An error keeps the frames it came through, this reader with them, and nothing that is open."""
        self._body = self._errors = self._source = self._socket = None

    def break_off(self) -> None:
        """Let a read that waits in another thread find the end of the connection."""
        if isinstance(self._socket, socket.socket):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not TLS's own, which would change what the other thread uses


class _Arrivals:
    """A socket's file that gives what has come, instead of waiting for all that was asked for and losing it when no more comes.

    What the file has read ahead is taken from it first. Then a plain socket is asked to fill the rest in one call, without Python's lock:
    one that is handed from thread to thread for every piece that arrives costs more than the copying. TLS has its own small pieces.
    """

    def __init__(self, file: Any, where: object) -> None:
        self._file = file
        self._plain = where if type(where) is socket.socket else None
        self._drained = False

    def readinto(self, memory: memoryview) -> int:
        if self._drained and self._plain is not None:
            return _fill(self._plain, memory)
        self._drained = len(memory) > io.DEFAULT_BUFFER_SIZE  # a read larger than the file's buffer leaves nothing in it
        count: int = self._file.readinto1(memory)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _fill(where: socket.socket, memory: memoryview) -> int:
    """Read until ``memory`` is full, the connection ends, or as long as the socket's time-out was waited in all. ``TimeoutError`` when
    nothing came in that time; what came is never lost."""
    timeout_s = where.gettimeout()
    seconds, micros = divmod(int((timeout_s or 0.0) * 1e6), 10**6)
    where.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, micros))
    where.settimeout(None)  # Python's own time-outs return with whatever is there
    try:
        return where.recv_into(memory, 0, socket.MSG_WAITALL)
    except BlockingIOError:
        raise TimeoutError("timed out") from None
    finally:
        where.settimeout(timeout_s)


def _body(data: Data) -> bytes | bytearray:
    # botocore takes no memoryview; one copy of a part is nothing beside its MD5.
    return bytes(data) if isinstance(data, memoryview) else data


def _md5(data: Data) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _expiry_rule(rule: Any) -> ExpiryRule | None:
    """The rule where it removes objects as Stagekit writes them: current ones, without tags."""
    expiration = rule.get("Expiration", {})
    days, moment = expiration.get("Days"), expiration.get("Date")
    if rule.get("Status") != "Enabled" or (days is None and moment is None):
        return None
    where = rule.get("Filter", {})
    where = where.get("And", where)
    if "Tag" in where or where.get("Tags"):
        return None
    prefix = where.get("Prefix", rule.get("Prefix", ""))
    sizes = where.get("ObjectSizeGreaterThan"), where.get("ObjectSizeLessThan")
    return ExpiryRule(str(rule.get("ID", "")), str(prefix), days, _seconds(moment), sizes[0] and sizes[0] + 1, sizes[1])


def _seconds(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None
