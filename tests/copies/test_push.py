"""A folder out, and objects from store to store: verified, resumed, and nothing that is there changed unless told so."""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stagekit import mounts
from stagekit.config import StoreConfig
from stagekit.copies.copy import copy
from stagekit.copies.pull import pull
from stagekit.copies.push import push
from stagekit.dataset import Dataset
from stagekit.errors import (
    BadDigest,
    CheckpointError,
    InvalidReply,
    ManifestError,
    MountRefused,
    NotFound,
    SourceError,
    StoreError,
    Unreachable,
    UsageError,
)
from stagekit.progress import Event, Message
from stagekit.store import open_store
from stagekit.store.base import Children, Data, ObjectInfo
from stagekit.store.memory import MemoryStore
from stagekit.store.usage import usage_below
from stagekit.testing.faults import FaultStore
from stagekit.transfer.bulk import s5cmd
from stagekit.transfer.bulk.choice import EngineName
from stagekit.verification import verify

from ..conftest import S3Place
from ..made import make_dataset
from ..rigs.rgw import Rgw
from ..rigs.servers import S3Server

Credentials = Callable[[S3Server | Rgw], StoreConfig]
_numbers = itertools.count()
ENGINES: tuple[EngineName, ...] = ("builtin", "s5cmd", "rclone")
FILES = {
    ".env/.hidden": b"hidden files are files",
    "a/ü and 'quotes\".bin": os.urandom(70_000),
    "a/[x]*?.txt": b"glob characters",
    "empty": b"",
    "large.bin": os.urandom(18_000_000),
}


@pytest.fixture
def url() -> str:
    return f"memory://push-{next(_numbers)}/out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "folder"


def objects(url: str, config: StoreConfig | None = None) -> dict[str, bytes]:
    store = open_store(url, config)
    return {info.key: bytes(store.get(info.key)) for info in store.list()}


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Message)]


# ---------------------------------------------------------------------------------------------------------------------------- push


def test_every_engine_sends_a_folder_to_every_server_and_a_repeated_push_sends_nothing(any_s3: S3Place, folder: Path) -> None:
    for engine in ENGINES:
        events: list[Event] = []
        url = f"{any_s3.url}/{engine}/out"
        before = usage_below(url)
        pushed = push(folder, url, engine=engine, store=any_s3.config, on_event=events.append)
        assert (usage_below(url) - before).sent_bytes >= pushed.sent_bytes, engine
        assert objects(url, any_s3.config) == FILES, engine
        assert (pushed.files, pushed.sent_bytes, pushed.engine) == (5, pushed.bytes, engine)
        assert texts(events) == [], engine
        again = push(folder, url, engine=engine, store=any_s3.config, on_event=events.append)
        assert (again.sent_bytes, again.engine) == (0, "builtin")


def test_what_differs_is_refused_before_anything_is_sent_and_other_objects_stay(folder: Path, url: str) -> None:
    store = MemoryStore(url)
    store.put("mine", b"precious")
    store.put("a/[x]*?.txt", b"glob charactexs")
    store.put("empty", b"not empty")
    with pytest.raises(UsageError, match=r"a/\[x\]\*\?\.txt is there with other bytes, and so are 1 more; nothing was chan"):
        push(folder, url)
    assert objects(url) == {"mine": b"precious", "a/[x]*?.txt": b"glob charactexs", "empty": b"not empty"}
    store.delete("empty")
    store.delete("a/[x]*?.txt")
    push(folder, url)
    assert objects(url) == {**FILES, "mine": b"precious"}


def test_delete_makes_the_prefix_what_the_folder_is_and_tells_first(folder: Path, url: str) -> None:
    store = MemoryStore(url)
    store.put("old/mine", b"x")
    store.put("empty", b"not empty")
    MemoryStore(url[:-1]).put("beside", b"stays")
    seen: list[tuple[str, bool]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Message):
            seen.append((event.text, objects(url) == {"old/mine": b"x", "empty": b"not empty"}))

    pushed = push(folder, url, delete=True, on_event=listen)
    assert objects(url) == FILES
    assert seen == [(f"--delete removes 1 in {url}: old/mine", True), (f"--delete replaces 1 in {url}: empty", True)]
    assert (pushed.removed, pushed.replaced) == (1, 1)
    assert "1 replaced, 1 other removed" in pushed.line


def test_a_push_that_broke_sends_what_is_missing_and_the_manifest_last(tmp_path: Path, url: str) -> None:
    digits = tmp_path / "digits"
    manifest = make_dataset(open_store(digits))
    broken = FaultStore(MemoryStore(url))
    broken.fail("put", Unreachable("the link is down"), manifest.shards[2].name, times=None)
    with pytest.raises(Unreachable):
        push(digits, broken, threads=1)
    assert "manifest.json" not in objects(url)
    whole = FaultStore(MemoryStore(url))
    pushed = push(digits, whole)
    sent = [call.key for call in whole.calls if call.operation == "put"]
    assert sent[-1] == "manifest.json"
    assert manifest.shards[0].name not in sent
    assert 0 < pushed.sent_bytes < pushed.bytes
    assert Dataset(url).digest == manifest.digest
    assert verify(url, deep=True).findings == ()


def test_links_to_files_go_as_files_and_what_is_no_file_is_named(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "link").symlink_to(folder / "large.bin")
    (folder / "a" / "up").symlink_to(folder)
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(folder)  # a socket's path must be short
        listening.bind("s")
    events: list[Event] = []
    push(folder, url, on_event=events.append)
    assert objects(url) == {**FILES, "link": FILES["large.bin"]}
    assert texts(events) == [f"2 entries of {folder} left out, no file or a link to a folder: a/up, s"]
    (folder / "broken").symlink_to("nowhere")
    with pytest.raises(SourceError, match="broken is a link that leads nowhere"):
        push(folder, url)


def test_a_file_that_changes_while_it_is_sent_is_not_stored(folder: Path, url: str) -> None:
    class Touching(MemoryStore):
        def multipart(self, key: str, *, part_size: int):  # type: ignore[no-untyped-def]  # the same as the memory store's
            with (folder / key).open("r+b") as file:
                file.write(b"changed")
            os.utime(folder / key, ns=(1, 1))
            return super().multipart(key, part_size=part_size)

    with pytest.raises(SourceError, match=r"large\.bin: it changed while it was read, and was not stored"):
        push(folder, Touching(url))
    assert "large.bin" not in objects(url)


@pytest.mark.parametrize("name", ["large.bin", "a"])
def test_what_this_user_may_not_read_is_named_before_anything_is_sent(
    folder: Path, tmp_path: Path, name: str, as_nobody: Callable[[Callable[[], str]], str]
) -> None:
    (folder / name).chmod(0)
    bucket = tmp_path / "bucket"
    bucket.mkdir(mode=0o777)
    bucket.chmod(0o777)

    def attempt() -> str:
        try:
            push(folder, bucket)
        except SourceError as error:
            return str(error)
        return "it was sent"

    assert f"{name} may not be read by this user, and nothing was sent; look at the owner" in as_nobody(attempt)
    assert os.listdir(bucket) == []


def test_what_cannot_be_meant_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: it is no folder"):
        push(tmp_path / "nowhere", "memory://push/x")
    with pytest.raises(UsageError, match=r"pushing s3://bucket/x: it takes a folder of this machine; between stores use stagekit cp"):
        push("s3://bucket/x", "memory://push/x")
    with pytest.raises(UsageError, match="one lies in the other"):
        push(folder, folder / "out")
    (tmp_path / "void").mkdir()
    with pytest.raises(SourceError, match="there is no file in it"):
        push(tmp_path / "void", "memory://push/x")


def test_a_mounted_bucket_is_no_source(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"1 0 0:2 / / rw - ext4 x rw\n2 1 0:1 / {folder} rw - fuse.rclone contabo:bucket rw\n"
    table = mounts.MountTable(mounts.parse_mountinfo(lines.encode()))
    monkeypatch.setattr(mounts.MountTable, "read", classmethod(lambda cls: table))
    with pytest.raises(MountRefused, match=r"pushing from .* is refused.*fuse\.rclone"):
        push(folder, url)
    events: list[Event] = []
    push(folder, url, allow_mount=True, on_event=events.append)
    assert "fuse.rclone" in texts(events)[0]
    assert objects(url) == FILES


_FAKE = """#!{python}
import json, shlex, sys
copies = [shlex.split(line)[-2:] for line in open(sys.argv[-1]).read().splitlines()]
{body}
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(3)", r"s5cmd left 4 of 4 files: it ended with code 3;"),
        (
            "for path, url in copies: print(json.dumps(dict(success=True, destination=url)))",
            r"s5cmd left 4 of 4 files, and of 4 of them the store does not prove that they are whole: it reported success;",
        ),
    ],
)
def test_an_engine_that_sends_nothing_is_found_out(
    body: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    moto_server: S3Server,
    credentials_for: Credentials,
) -> None:
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/out"
    (folder / "large.bin").unlink()
    binary = tmp_path / "s5cmd"
    binary.write_text(_FAKE.format(python=sys.executable, body=body))
    binary.chmod(0o755)
    monkeypatch.setattr(s5cmd, "s5cmd_binary", lambda: binary)
    events: list[Event] = []
    push(folder, url, engine="s5cmd", store=config, on_event=events.append)
    assert objects(url, config) == {name: data for name, data in FILES.items() if name != "large.bin"}
    (text,) = texts(events)
    assert re.match(words, text), text


# ---------------------------------------------------------------------------------------------------------------------------- copy


def put_all(url: str, config: StoreConfig | None = None, wanted: dict[str, bytes] = FILES) -> None:
    store = open_store(url, config)
    for key, data in wanted.items():
        store.put(key, data)


def test_objects_pass_between_two_providers_with_two_profiles(
    rclone_server: S3Server, rgw: Rgw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {"one": rclone_server, "two": rgw.https, "three": rgw.http}
    (tmp_path / "config").write_text(
        "".join(f"[profile {name}]\nendpoint_url = {server.endpoint_url}\n" for name, server in servers.items())
    )
    (tmp_path / "credentials").write_text(
        "".join(
            f"[{name}]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
            for name, server in servers.items()
        )
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(rgw.https.ca_bundle))
    source, target = f"s3://one@{rclone_server.create_bucket()}/a", f"s3://two@{rgw.https.create_bucket()}/b"
    put_all(source)
    copied = copy(source, target)
    assert objects(target) == FILES
    assert (copied.objects, copied.sent_bytes, copied.unproven) == (5, copied.bytes, 0)
    assert copied.line == f"{source} is in {target}: 5 objects, 18.1 MB, every byte verified"
    assert copy(source, target).sent_bytes == 0
    back = f"s3://three@{rgw.http.create_bucket()}/c"
    assert copy(target, back, limit_rate="900MB/s").unproven == 0
    assert objects(back) == FILES


def test_a_copy_that_broke_goes_on_and_reads_no_copied_object_again(url: str) -> None:
    put_all(url)
    target = url.replace("/out", "/target")
    broken = FaultStore(MemoryStore(target))
    broken.fail("put", Unreachable("the link is down"), "empty", times=None)
    with pytest.raises(Unreachable):
        copy(MemoryStore(url), broken, threads=1)
    done = objects(target)
    assert done
    assert "empty" not in done
    source = FaultStore(MemoryStore(url))
    copied = copy(source, target)
    assert objects(target) == FILES
    assert {call.key for call in source.calls if call.operation == "get"}.isdisjoint(done)
    assert copied.sent_bytes == sum(len(data) for key, data in FILES.items() if key not in done)


class Opaque(MemoryStore):
    """A store whose etags say nothing of the bytes."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (replace(info, etag=f"v-{info.etag}") for info in super().list(prefix))

    def head(self, key: str) -> ObjectInfo:
        info = super().head(key)
        return replace(info, etag=f"v-{info.etag}")

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        return super().get(key, start, length, if_match=if_match and if_match.removeprefix("v-"))


def test_where_etags_say_nothing_notes_of_this_machine_do_and_without_them_the_bytes(url: str, isolated: Path) -> None:
    put_all(url)
    target = FaultStore(Opaque(url.replace("/out", "/target")))
    first = copy(Opaque(url), target)
    assert first.unproven == len(FILES)
    assert "all of them by size alone" in first.line

    def read_by_another() -> int:
        source = FaultStore(Opaque(url))
        assert copy(source, target).sent_bytes == 0
        return len([call for call in source.calls if call.operation == "get"])

    assert read_by_another() == 0
    for notes in (isolated / "stagekit" / "copies").iterdir():
        notes.unlink()
    assert read_by_another() > 0
    Opaque(url).put("empty", b"")
    Opaque(url).put(".env/.hidden", b"HIDDEN files are files")
    with pytest.raises(UsageError, match=r"\.env/\.hidden is there with other bytes; nothing was changed"):
        copy(Opaque(url), target)


def test_what_is_damaged_on_the_way_is_passed_again_and_never_becomes_visible(url: str) -> None:
    class Flipping(MemoryStore):
        flips = 1

        def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
            data = bytearray(super().get(key, start, length, if_match=if_match))
            if key == "a/[x]*?.txt" and self.flips:
                self.flips -= 1
                data[0] = self.flips % 256
            return bytes(data)

    put_all(url)
    healed = url.replace("/out", "/healed")
    assert copy(Flipping(url), healed).unproven == 0
    assert objects(healed) == FILES
    damaged = Flipping(url)
    damaged.flips = 1000
    target = url.replace("/out", "/damaged")
    with pytest.raises(BadDigest, match=r"\[x\]\*\?\.txt: expected etag .*; the object is damaged or was replaced, and nothing"):
        copy(damaged, target)
    assert "a/[x]*?.txt" not in objects(target)


def test_delete_and_single_objects(url: str) -> None:
    put_all(url)
    target = url.replace("/out", "/target")
    MemoryStore(target).put("strange", b"x")
    MemoryStore(target).put("empty", b"other")
    events: list[Event] = []
    copied = copy(url, target, delete=True, on_event=events.append)
    assert objects(target) == FILES
    assert (copied.replaced, copied.removed) == (1, 1)
    assert texts(events) == [f"--delete removes 1 in {target}: strange", f"--delete replaces 1 in {target}: empty"]
    one = url.replace("/out", "/one")
    assert copy(f"{url}/large.bin", f"{one}/renamed").objects == 1
    copy(f"{url}/large.bin", f"{one}/into/")
    assert objects(one) == {"renamed": FILES["large.bin"], "into/large.bin": FILES["large.bin"]}
    assert copy(f"{url}/large.bin", f"{one}/renamed").sent_bytes == 0
    with pytest.raises(UsageError, match="--delete is for what does"):
        copy(f"{url}/large.bin", f"{one}/renamed", delete=True)
    with pytest.raises(ManifestError, match="there is no object of this name, and none below it"):
        copy(f"{url}/nothing", f"{one}/x")
    with pytest.raises(CheckpointError, match=f"no single checkpoint of a run; copy {url}, or .*: stagekit pull {url}@latest DIRECTORY"):
        copy(f"{url}@latest", f"{one}/x")
    with pytest.raises(UsageError, match="one lies in the other"):
        copy(url, f"{url}/below")


# -------------------------------------------------------------------------------------------------------------- the user's own remotes


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A remote called ``nas`` in the user's configuration: a directory of this machine."""
    (tmp_path / "rclone.conf").write_text(f"[nas]\ntype = alias\nremote = {tmp_path / 'nas'}\n")
    (tmp_path / "nas").mkdir()
    monkeypatch.setenv("RCLONE_CONFIG", str(tmp_path / "rclone.conf"))
    return "rclone:nas:share"


def test_rclones_remotes_are_pushed_to_pulled_from_and_copied(remote: str, folder: Path, tmp_path: Path, url: str) -> None:
    events: list[Event] = []
    pushed = push(folder, f"{remote}/out", on_event=events.append)
    assert pushed.engine == "rclone"
    assert texts(events) == []
    assert push(folder, f"{remote}/out").sent_bytes == 0
    pulled = pull(f"{remote}/out", tmp_path / "back", on_event=events.append)
    assert (pulled.engine, pulled.unproven) == ("rclone", 0)
    assert texts(events) == []
    assert {name: (tmp_path / "back" / name).read_bytes() for name in FILES} == FILES
    assert copy(f"{remote}/out", url).unproven == 0
    assert objects(url) == FILES
    back = f"{remote}/copied"
    assert copy(url, back).objects == len(FILES)
    assert objects(back) == FILES
    assert copy(url, back).sent_bytes == 0
    with pytest.raises(StoreError, match=r"rclone:none:x/manifest\.json: rclone ended with code 1 .*; rclone config shows the remotes"):
        pull("rclone:none:x", tmp_path / "x")


def test_an_upload_to_a_remote_is_there_whole_or_not_at_all(remote: str, tmp_path: Path) -> None:
    store = open_store(remote)
    with pytest.raises(ZeroDivisionError), store.multipart("deep/a", part_size=10) as upload:
        upload.put_part(0, b"x" * 10)
        raise ZeroDivisionError
    assert list(store.list()) == list(store.open_uploads()) == []
    with store.multipart("deep/a", part_size=10) as upload:
        upload.put_part(1, b"y" * 3)
        upload.put_part(0, b"x" * 10)
    assert bytes(store.get("deep/a")) == b"x" * 10 + b"yyy"
    assert bytes(store.get("deep/a", 9, 2)) == b"xy"
    assert store.children() == Children((), ("deep/",))
    with pytest.raises(InvalidReply, match="reaches beyond its end at 13"):
        store.get("deep/a", 10, 10)
    with pytest.raises(NotFound):
        store.head("deep")
    assert store.put("b", b"whole").size == 5
    assert bytes(store.get("b")) == b"whole"
    assert store.put("empty", b"").size == 0
    store.delete("b")
    store.delete("empty")
    with pytest.raises(UsageError, match="created exclusively"):
        store.put("b", b"", if_absent=True)
    store.delete("deep/a")
    store.delete("deep/a")
    assert list(store.list()) == []


def test_a_store_that_has_lost_what_it_took_is_not_told_as_a_lost_file(folder: Path, url: str) -> None:
    class Losing(MemoryStore):
        def head(self, key: str) -> ObjectInfo:
            raise NotFound(f"looking up {self.location / key}: there is no such object")

    with pytest.raises(InvalidReply, match=r"writing memory://\S+: the store was given the object and answers that there is no such"):
        push(folder, Losing(url))

    class Meanwhile(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            (folder / "empty").unlink()
            return super().list(prefix)

    with pytest.raises(SourceError, match=r"sending \S+/empty: it is gone; repeat"):
        push(folder, Meanwhile(url))
    (folder / "empty").touch()
    push(folder, url)
    with pytest.raises(SourceError, match=r"sending \S+/empty: it is gone; repeat"):
        push(folder, Meanwhile(url))  # when it is there already, and compared


def test_a_name_that_no_store_takes_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"x")
    with pytest.raises(UsageError, match=r"pushing .*raw: 'caf\\udce9\.txt' is no object key: it is not valid Unicode; rename the file"):
        push(tmp_path / "raw", str(tmp_path / "there"))
