"""What an S3 endpoint can do and what the keys may do there, all at once: each answer is proved by a call of its own.

Nothing is believed because of a name or a version. A promise is "kept" only when a request that violates it was refused *and* the object
was looked at afterwards. Everything is written below one scratch name and removed again; what could not be removed is told by its key.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import statistics
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

from ..errors import Denied, NotFound, StagekitError, StoreError, Throttled, WrongCredentials
from ..facts import Fact
from ..parallel import each
from ..units import format_duration, format_rate, format_size
from .extras import ExpiryRule
from .s3 import S3Store
from .s3_errors import error_code, status_of

_PART = 5 << 20  # the smallest that S3 lets anything follow
_LAST_PARTS = (10_000, 1000)
_SAMPLE = 8 << 20
_STREAMS = 4
_USUAL = ("manifest.json", "run.json")  # of a data set, and of a run
_QUICK_S = 2.0
_SKEW_NOTED_S, _SKEW_REFUSED_S = 60.0, 900.0  # S3 refuses signatures that are off by more than a quarter of an hour
SPECIAL = "ü ñ 日本 +&%25?#=;@,'()~!*$.bin"
"""Characters that one or another server, client or proxy has been seen to encode in a way of its own."""

NAMES = (
    "endpoint",
    "clock",
    "rights",
    "ranges",
    "conditions",
    "checksums",
    "listing",
    "names",
    "multipart",
    "uploads",
    "addressing",
    "lifecycle",
    "versioning",
    "speed",
)
"""The facts that ``S3Probe`` tells, in this order, when the endpoint answers at all."""


class S3Probe:
    """All that ``store`` can be asked, each thing once. ``read_only`` writes nothing, and says what therefore cannot be told.

    No step begins after ``budget_s`` seconds: what is left is told as unknown, and the scratch objects are still removed. How long one step
    can take follows from the time-outs in the store's settings.
    """

    def __init__(
        self,
        store: S3Store,
        *,
        read_only: bool = False,
        budget_s: float = 45.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._read_only = read_only
        self._budget_s = budget_s
        self._clock = clock
        self._now = now
        self._scratch = f".stagekit-doctor-{uuid.uuid4().hex[:12]}"
        self._made: list[str] = []
        self._may: dict[str, bool | None] = dict.fromkeys(("list", "get", "put", "delete"))
        self._existing: tuple[str, int] | None = None
        self._skew_s: float | None = None
        self._small = S3Store(store.location, store.config, page_size=1)

    @property
    def scratch(self) -> str:
        """What all names begin with that are written."""
        return self._scratch

    def facts(self) -> Iterator[Fact]:
        """One fact after the other. The first is ``bad``, and the only one, when the endpoint, the bucket or the keys are of no use."""
        began = self._clock()
        first = self._endpoint()
        yield first
        if first.state == "bad":
            return
        steps: dict[str, Callable[[], Fact]] = {
            "clock": self._clock_skew,
            "rights": self._rights,
            "ranges": self._ranges,
            "conditions": self._conditions,
            "checksums": self._checksums,
            "listing": self._listing,
            "names": self._names,
            "multipart": self._multipart,
            "uploads": self._uploads,
            "addressing": self._addressing,
            "lifecycle": self._lifecycle,
            "versioning": self._versioning,
            "speed": self._speed,
        }
        try:
            for name, step in steps.items():
                if self._clock() - began > self._budget_s:
                    yield Fact(name, "unknown", f"not asked: the other answers took {format_duration(self._clock() - began)}")
                    continue
                try:
                    yield step()
                except StagekitError as error:
                    yield Fact(name, "unknown", str(error))
        finally:
            left = self._clean()
        if left:
            yield Fact(
                "left behind",
                "note",
                f"{', '.join(left)} in {self._store.location}, which these keys may not delete",
                f"delete {', '.join(left)} below {self._store.location} with other keys",
                {"keys": left},
            )

    # ----------------------------------------------------------------------------------------------------------- reaching it

    def _endpoint(self) -> Fact:
        store = self._store
        times = []
        try:
            for _ in range(3):
                asked_s, began = self._now(), self._clock()
                try:
                    answer = next(self._small._pages("probing", "", store._base()))
                    self._may["list"] = True
                    headers = answer["ResponseMetadata"]["HTTPHeaders"]
                except Denied as error:
                    if isinstance(error, WrongCredentials):
                        raise
                    self._may["list"] = False
                    headers = _headers(error)
                times.append(self._clock() - began)
                self._skew_s = self._skew_s if self._skew_s is not None else _skew(headers, (asked_s + self._now()) / 2)
        except StagekitError as error:
            return Fact("endpoint", "bad", str(error), str(error), {"error": type(error).__name__})
        latency_s = statistics.median(times)
        client = store._bound()
        keys = client.address.keys
        return Fact(
            "endpoint",
            "ok",
            f"{client.api.meta.endpoint_url} answers in {1000 * latency_s:.0f} ms, with {keys}",
            values={"url": client.api.meta.endpoint_url, "latency_s": latency_s, "keys": keys},
        )

    def _clock_skew(self) -> Fact:
        skew_s = self._skew_s
        if skew_s is None:
            return Fact("clock", "unknown", "the answers have no Date")
        values = {"skew_s": round(skew_s, 1)}
        if abs(skew_s) < 2:  # Date has whole seconds
            return Fact("clock", "ok", "agrees with this machine's", values=values)
        text = f"{format_duration(abs(skew_s))} {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        if abs(skew_s) < _SKEW_NOTED_S:
            return Fact("clock", "ok", text, values=values)
        advice = "set this machine's clock (timedatectl set-ntp true), since requests that are off by a quarter of an hour are refused"
        return Fact("clock", "bad" if abs(skew_s) > _SKEW_REFUSED_S else "note", text, advice, values)

    # ----------------------------------------------------------------------------------------------------------- what the keys may do

    def _rights(self) -> Fact:
        key = self._scratch
        if not self._read_only:
            self._may["put"] = self._allowed(lambda: self._put(key, b"stagekit doctor"))
        if self._may["put"]:
            self._may["get"] = self._allowed(lambda: self._store.get(key))
            self._may["delete"] = self._allowed(lambda: self._store.delete(key))
            if self._may["delete"]:
                gone = self._may["get"] is not True or self._is_gone(key)
                self._may["delete"] = gone
                self._put(key, b"stagekit doctor")
        elif (largest := self._largest()) is not None:
            self._existing = name, size = largest
            self._may["get"] = self._allowed(lambda: self._store.get(name, 0, min(1, size)))
        words = {True: "yes", False: "no", None: "not tried"}
        text = ", ".join(f"{right} {words[may]}" for right, may in self._may.items())
        values = {"rights": dict(self._may)}
        may = self._may
        if not any(may.values()):
            return Fact("rights", "bad", text, f"give the keys rights in {self._store.location}, or use others", values)
        if may["put"] and (may["list"] is False or may["get"] is False):
            advice = "give these keys the rights to list and to get as well: a run looks before it commits, and cannot be kept without"
            return Fact("rights", "bad", text, advice, values)
        if may["put"] and may["delete"] is False:
            advice = (
                "these keys cannot delete: training works, and nothing is ever removed, so prune with other keys "
                "(`stagekit prune`, keep_last=) before the bucket fills up"
            )
            return Fact("rights", "note", text, advice, values)
        if may["put"] is False:
            return Fact("rights", "note", text, "these keys only read: stream with them, and give runs and `stagekit shard` others", values)
        return Fact("rights", "ok" if None not in may.values() else "unknown", text, values=values)

    def _largest(self) -> tuple[str, int] | None:
        """The largest object of the first page, to read from where nothing is to be written. Where nothing may be listed, one that a data
        set or a run begins with, if it may be read."""
        if not self._may["list"]:
            for name in _USUAL:
                with suppress(StoreError):
                    return name, self._store.head(name).size
            return None
        base = self._store._base()
        page = next(self._store._pages("probing", "", base))
        sizes = [(item["Size"], item["Key"][len(base) :]) for item in page.get("Contents", ()) if not item["Key"].endswith("/")]
        size, name = max(sizes, default=(0, ""))
        return (name, size) if name else None

    def _allowed(self, call: Callable[[], object]) -> bool | None:
        try:
            call()
        except Denied:
            return False
        except StoreError:
            return None
        return True

    def _is_gone(self, key: str) -> bool:
        with suppress(NotFound):
            self._store.get(key)
            return False
        return True

    # ----------------------------------------------------------------------------------------------------------- reading

    def _ranges(self) -> Fact:
        if self._may["get"] and self._may["put"]:
            name, whole = self._scratch, b"0123456789"
            self._put(name, whole)
        elif self._may["get"] and self._existing is not None and self._existing[1] >= 10:
            name, whole = self._existing[0], None
        else:
            return Fact("ranges", "unknown", "no object could be read")
        answer = self._call("get_object", name, Key=self._store._path(name), Range="bytes=2-5")
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        body = answer["Body"].read() if answer["ContentLength"] <= _SAMPLE else b""
        answer["Body"].close()
        values = {"status": status, "content_range": answer.get("ContentRange")}
        exact = len(body) == 4 and (whole is None or body == whole[2:6])
        if exact and answer.get("ContentRange"):
            note = "" if status == 206 else ", though not the status that belongs to it"
            return Fact("ranges", "ok", f"{status} with exactly the bytes that were asked for{note}", values=values)
        if whole is not None and body == whole:
            return Fact(
                "ranges", "note", f"{status} with the whole object: a block costs its shard", "pull data sets before training", values
            )
        return Fact("ranges", "bad", f"{status} with {len(body)} other bytes", "nothing can be streamed from here safely", values)

    # ----------------------------------------------------------------------------------------------------------- writing

    def _conditions(self) -> Fact:
        if (why := self._cannot_write()) is not None:
            return Fact("conditions", "unknown", why)
        key, path = self._scratch, self._store._path(self._scratch)
        self._put(key, b"first")
        found: dict[str, bool | None] = {
            "create": self._refused(key, b"first", "put_object", Key=path, Body=b"second", IfNoneMatch="*"),
            "update": self._refused(key, b"first", "put_object", Key=path, Body=b"second", IfMatch='"00000000000000000000000000000000"'),
            "complete": self._completes_conditionally(),
        }
        if found["create"] and self._may["delete"]:  # and it does create what is not there
            fresh = f"{self._scratch}-new"
            self._made.append(fresh)
            self._call("put_object", fresh, Key=self._store._path(fresh), Body=b"", IfNoneMatch="*")
        words = {True: "kept", False: "ignored", None: "not told"}
        names = {"create": "If-None-Match on PUT", "update": "If-Match on PUT", "complete": "If-None-Match when an upload is completed"}
        text = ", ".join(f"{names[name]} {words[kept]}" for name, kept in found.items())
        if found["create"] is not False:
            return Fact("conditions", "ok" if found["create"] else "unknown", text, values={"conditions": found})
        advice = "do not start one run on two machines at once: without exclusive creation the second one is noticed late"
        return Fact("conditions", "note", text, advice, {"conditions": found})

    def _refused(self, key: str, content: bytes, operation: str, **arguments: Any) -> bool | None:
        """Whether a request whose condition does not hold is refused, and really changes nothing."""
        try:
            self._call(operation, key, **arguments)
        except Throttled:
            return None
        except StoreError as error:
            if error.transient or status_of(_cause(error)) not in (409, 412):
                return False if status_of(_cause(error)) in (400, 405, 501) else None
            return not self._may["get"] or bytes(self._store.get(key)) == content
        return False

    def _completes_conditionally(self) -> bool | None:
        key, path = self._scratch, self._store._path(self._scratch)
        self._put(key, b"first")
        upload = self._call("create_multipart_upload", key, Key=path)["UploadId"]
        try:
            part = self._call("upload_part", key, Key=path, UploadId=upload, PartNumber=1, Body=b"second")
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            return self._refused(
                key, b"first", "complete_multipart_upload", Key=path, UploadId=upload, MultipartUpload=parts, IfNoneMatch="*"
            )
        finally:
            self._abort(path, upload)

    def _checksums(self) -> Fact:
        if (why := self._cannot_write()) is not None:
            return Fact("checksums", "unknown", why)
        key, path = self._scratch, self._store._path(self._scratch)
        right, wrong = b"right", b"wrong"
        md5 = self._store.checks_digest() if self._may["delete"] else self._refuses_digest(path, right, ContentMD5=_md5(wrong))
        stored: dict[str, str] = {}
        for name, digest in (("CRC32", _crc32), ("SHA256", _sha256)):
            field = f"Checksum{name}"
            refused = self._refuses_digest(path, right, **{field: digest(wrong)})
            try:
                self._call("put_object", key, Key=path, Body=right, **{field: digest(right)})
            except StoreError:
                stored[name] = "refused"
                continue
            returned = None
            with suppress(StoreError):
                returned = self._call("head_object", key, Key=path, ChecksumMode="ENABLED").get(field)
            stored[name] = "checked" if refused else "not checked"
            stored[name] += " and returned" if returned == digest(right) else ", not returned"
        try:
            self._call("put_object", key, Key=path, Body=right, ChecksumAlgorithm="CRC32")
            defaults = True
        except StoreError:
            defaults = False
        self._put(key, right)
        text = f"Content-MD5 {'checked' if md5 else 'ignored'}, " + ", ".join(f"{name} {what}" for name, what in stored.items())
        text += f", the SDK's default (CRC32 by trailer over https) {'accepted' if defaults else 'refused'}"
        values = {"content_md5": md5, "checksums": stored, "sdk_defaults": defaults}
        if not defaults:
            advice = (
                "for other programs that use an AWS SDK, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required; Stagekit does so by itself"
            )
            return Fact("checksums", "note", text, advice, values)
        return Fact("checksums", "ok" if md5 else "note", text, values=values)

    def _refuses_digest(self, path: str, body: bytes, **arguments: Any) -> bool:
        try:
            self._call("put_object", self._scratch, Key=path, Body=body, **arguments)
        except StoreError as error:
            return 400 <= status_of(_cause(error)) < 500
        return False

    def _listing(self) -> Fact:
        if not self._may["list"]:
            return Fact("listing", "unknown", "these keys may not list")
        if not (self._may["put"] and self._may["delete"]):
            return Fact("listing", "unknown", "not tried: the objects to list could not be written and removed")
        names = [f"{self._scratch}.d/{name}" for name in ("run-1/a", "run-1/b", "run-1/c/d", "run-10/a")]
        for name in names:
            self._put(name, b"")
        wanted = names[:3]
        paged = [info.key for info in self._small.list(f"{self._scratch}.d/run-1/")]
        folders = self._small.children(f"{self._scratch}.d/").folders
        values = {"paged": paged == wanted, "folders": list(folders) == [f"{self._scratch}.d/run-1/", f"{self._scratch}.d/run-10/"]}
        if all(values.values()):
            return Fact("listing", "ok", "pages of one key each: complete, in order, and nothing of run-10/ below run-1/", values=values)
        text = f"pages of one key each give {len(paged)} of {len(wanted)} keys below run-1/, and {len(folders)} of 2 folders"
        return Fact("listing", "bad", text, "a listing here is incomplete: resume, prune and teardown cannot rely on it", values)

    def _names(self) -> Fact:
        if not (self._may["put"] and self._may["delete"]):
            return Fact("names", "unknown", "not tried: the object could not be written and removed")
        name = f"{self._scratch}.d/{SPECIAL}"
        self._put(name, b"special")
        came = bytes(self._store.get(name)) == b"special" if self._may["get"] else True
        listed = not self._may["list"] or name in [info.key for info in self._store.list(f"{self._scratch}.d/")]
        if came and listed:
            return Fact("names", "ok", f"{SPECIAL!r} is written, read and listed as it is", values={"special": True})
        text = f"{SPECIAL!r} does not come back as it was written"
        return Fact("names", "note", text, "use plain names (letters, digits, - _ . /) here", {"special": False})

    def _multipart(self) -> Fact:
        if (why := self._cannot_write()) is not None:
            return Fact("multipart", "unknown", why)
        key, path = self._scratch, self._store._path(self._scratch)
        upload = self._call("create_multipart_upload", key, Key=path)["UploadId"]
        first, last = bytes(range(256)) * (_PART // 256), b"end"
        try:
            etags = [self._part(path, upload, number, data) for number, data in ((1, first), (2, last))]
            parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
            self._made.append(key)
            self._call("complete_multipart_upload", key, Key=path, UploadId=upload, MultipartUpload={"Parts": parts})
        finally:
            self._abort(path, upload)
        intact = not self._may["get"] or bytes(self._store.get(key)) == first + last
        small, highest = self._takes_small_parts(path), self._highest_part(path)
        values = {"intact": intact, "small_parts": small, "highest_part": highest}
        if not intact:
            return Fact(
                "multipart", "bad", "an object sent in two parts reads back as something else", "nothing large can be kept here", values
            )
        least = "parts of any size" if small else "parts of at least 5 MiB"
        return Fact("multipart", "ok", f"{least}, numbers up to {highest:,}", values=values)

    def _part(self, path: str, upload: str, number: int, data: bytes) -> str:
        answer = self._call("upload_part", self._scratch, Key=path, UploadId=upload, PartNumber=number, Body=data, ContentMD5=_md5(data))
        return str(answer["ETag"])

    def _highest_part(self, path: str) -> int:
        """The highest number that is taken, of those that stores are known to end at."""
        upload = self._call("create_multipart_upload", self._scratch, Key=path)["UploadId"]
        try:
            for number in _LAST_PARTS:
                with suppress(StoreError):
                    self._part(path, upload, number, b"x")
                    return number
        finally:
            self._abort(path, upload)
        return 2

    def _takes_small_parts(self, path: str) -> bool:
        upload = self._call("create_multipart_upload", self._scratch, Key=path)["UploadId"]
        try:
            etags = [self._part(path, upload, number, b"x" * 1024) for number in (1, 2)]
            parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
            self._call("complete_multipart_upload", self._scratch, Key=path, UploadId=upload, MultipartUpload={"Parts": parts})
        except StoreError:
            return False
        finally:
            self._abort(path, upload)
        return True

    def _lists_upload(self, path: str, upload: str) -> bool | None:
        try:
            answer = self._call("list_multipart_uploads", self._scratch, Prefix=path)
        except StoreError:
            return None
        return any(item.get("UploadId") == upload for item in answer.get("Uploads", ()))

    def _uploads(self) -> Fact:
        if (why := self._cannot_write()) is not None:
            try:
                open_now = sum(1 for _ in self._store.open_uploads())
            except Denied:
                return Fact("uploads", "unknown", "these keys may not list unfinished uploads")
            return Fact("uploads", "unknown", f"{open_now} unfinished ones are listed; whether that is all, {why}")
        path = self._store._path(self._scratch)
        upload = self._call("create_multipart_upload", self._scratch, Key=path)["UploadId"]
        try:
            listed = self._lists_upload(path, upload)
        finally:
            self._abort(path, upload)
        if listed:
            return Fact("uploads", "ok", "unfinished ones are listed, so `stagekit prune` finds them", values={"listed": True})
        text = "unfinished ones are not listed" if listed is False else "these keys may not list unfinished ones"
        advice = (
            "give the bucket a lifecycle rule that aborts incomplete multipart uploads, since they are billed and `stagekit prune` cannot "
            "find them"
        )
        return Fact("uploads", "note", text, advice, {"listed": listed})

    # ----------------------------------------------------------------------------------------------------------- the bucket

    def _addressing(self) -> Fact:
        client = self._store._bound()
        url = urlsplit(client.api.meta.endpoint_url)
        used = (
            "path" if self._store.config.addressing == "path" or (self._store.config.addressing is None and client.endpoint) else "virtual"
        )
        other: Literal["path", "virtual"] = "virtual" if used == "path" else "path"
        values: dict[str, Any] = {"used": used}
        if other == "virtual" and (_is_address(url.hostname or "") or url.hostname == "localhost"):
            return Fact("addressing", "ok", f"{used} style; an address without a name has no other", values=values)
        config = replace(self._store.config, addressing=other, connect_timeout_s=min(2.0, self._store.config.connect_timeout_s))
        try:
            S3Store(self._store.location, config)._call("probing", "", "list_objects_v2", Prefix=self._store._base(), MaxKeys=1)
            works = True
        except Denied:
            works = True  # it was understood
        except StagekitError:
            works = False
        values[other] = works
        return Fact("addressing", "ok", f"{used} style; {other} style {'works as well' if works else 'does not work'}", values=values)

    def _lifecycle(self) -> Fact:
        base = self._store._base()
        try:
            rules = [rule for rule in self._store.expiry_rules() if rule.prefix.startswith(base) or base.startswith(rule.prefix)]
        except Denied:
            return Fact("lifecycle", "unknown", "these keys may not read the rules")
        if not rules:
            return Fact("lifecycle", "ok", "no rule removes objects here", values={"rules": []})
        text = "; ".join(map(_rule_text, rules))
        advice = f"keep data and runs elsewhere, or take the rule away: the bucket removes objects by itself ({text})"
        return Fact("lifecycle", "note", text, advice, {"rules": [rule.name for rule in rules]})

    def _versioning(self) -> Fact:
        try:
            status = self._call("get_bucket_versioning", "").get("Status")
        except Denied:
            return Fact("versioning", "unknown", "these keys may not read it")
        except StoreError as error:
            if status_of(_cause(error)) in (405, 501) or error_code(_cause(error)) == "NotImplemented":
                return Fact("versioning", "ok", "the store has none", values={"versioning": False})
            raise
        if status == "Enabled":
            advice = "add a lifecycle rule that expires noncurrent versions: what prune deletes is kept and billed otherwise"
            return Fact("versioning", "note", "on: what is deleted stays as an old version", advice, {"versioning": True})
        return Fact("versioning", "ok", "off", values={"versioning": False})

    def _speed(self) -> Fact:
        if not self._may["get"]:
            return Fact("speed", "unknown", "these keys may not read")
        up = None
        if self._may["put"]:
            name, size = self._scratch, _PART
            began = self._clock()
            self._put(name, bytes(size))
            up = size / max(self._clock() - began, 1e-6)
        elif self._existing is not None and self._existing[1] >= 1 << 20:
            name, size = self._existing[0], min(self._existing[1], _SAMPLE)
        else:
            return Fact("speed", "unknown", "there is no object of a megabyte to read")
        began = self._clock()
        self._store.get(name, 0, size)
        took_s = max(self._clock() - began, 1e-6)
        down, text = size / took_s, f"down {format_rate(size / took_s)}"
        if took_s < _QUICK_S:
            began = self._clock()
            for _ in each(lambda _: self._store.get(name, 0, size), range(_STREAMS), threads=_STREAMS):
                pass
            down = max(down, _STREAMS * size / max(self._clock() - began, 1e-6))
            text = f"down {format_rate(down)} in {_STREAMS} connections"
        text += f", up {format_rate(up)} in one" if up is not None else ""
        text += f" (objects of {format_size(size)})"
        return Fact("speed", "ok", text, values={"down_bytes_per_s": down, "up_bytes_per_s": up})

    # ----------------------------------------------------------------------------------------------------------- calls and cleaning

    def _cannot_write(self) -> str | None:
        if self._read_only:
            return "not tried: nothing was to be written"
        return None if self._may["put"] else "not tried: these keys may not write"

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        return self._store._call("probing", key, operation, **arguments)

    def _put(self, key: str, data: bytes) -> None:
        if key not in self._made:
            self._made.append(key)
        self._store.put(key, data)

    def _abort(self, path: str, upload: str) -> None:
        with suppress(StagekitError):
            self._call("abort_multipart_upload", self._scratch, Key=path, UploadId=upload)

    def _clean(self) -> list[str]:
        """Remove all that was written, and return the keys of what may still be there."""
        left = []
        for key in dict.fromkeys(self._made):
            try:
                self._store.delete(key)
            except StagekitError:
                left.append(key)
        return left if self._may["put"] else []


def _cause(error: StoreError) -> Exception:
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


def _headers(error: StoreError) -> dict[str, str]:
    response = getattr(error.__cause__, "response", {})
    return dict(response.get("ResponseMetadata", {}).get("HTTPHeaders", {}))


def _skew(headers: dict[str, str], here_s: float) -> float | None:
    """How far the server's clock is ahead. ``Date`` is cut to whole seconds, which half a second makes up for on average."""
    with suppress(TypeError, ValueError, KeyError):
        return parsedate_to_datetime(headers["date"]).timestamp() + 0.5 - here_s
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _rule_text(rule: ExpiryRule) -> str:
    when = f"{rule.days} days after they were written" if rule.days is not None else "at a fixed date"
    where = f"below {rule.prefix!r}" if rule.prefix else "of the whole bucket"
    return f"rule {rule.name!r} removes objects {where} {when}"


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4)).decode()
