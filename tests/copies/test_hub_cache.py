"""Models of the Hugging Face Hub: into a bucket without a disk, and from a bucket into the cache that ``from_pretrained`` reads."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

from stagekit.copies.copy import copy
from stagekit.copies.hub_cache import HubLink
from stagekit.copies.pull import pull
from stagekit.errors import BadDigest, BucketNotFound, UsageError
from stagekit.progress import Event, Message
from stagekit.store import open_store
from stagekit.store.memory import MemoryStore

from ..conftest import S3Place

_numbers = itertools.count()
FILES = {
    "config.json": b'{"model_type": "bert"}',
    "deep/vocab.txt": b"a\nb\n",
    "model.safetensors": os.urandom(20_000_000),
}
LARGE = 10_000


class Hub:
    """What the client asks of the Hub, for one model, ``org/tiny``."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.told = dict(FILES)
        self.resolved: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
                    self.answer(json.dumps({"id": "org/tiny", "sha": "f" * 40, "siblings": []}).encode())
                elif match := re.fullmatch(r"/api/models/org/tiny/tree/main/?(.*)", path):
                    self.answer(json.dumps(hub.tree(match.group(1), recursive="recursive=true" in self.path.lower())).encode())
                elif match := re.fullmatch(r"/org/tiny/resolve/main/(.*)", path):
                    hub.resolved.append(match.group(1))
                    self.answer(hub.files[match.group(1)])
                else:
                    self.answer(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})

            def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
                if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
                    body, status = body[int(wanted.group(1)) : int(wanted.group(2)) + 1], 206
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def tree(self, below: str, *, recursive: bool) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        folders: set[str] = set()
        for path, data in self.told.items():
            if below and not path.startswith(f"{below}/"):
                continue
            inside = path[len(below) + 1 if below else 0 :]
            if "/" in inside:
                folders.add(path[: path.index("/", len(below) + 1)])
                if not recursive:
                    continue
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            if len(data) > LARGE:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            entries.append(entry)
        return [*entries, *({"type": "directory", "path": folder, "size": 0, "oid": "d" * 40} for folder in folders)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    thread = Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server.server_address[1]}")
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


@pytest.fixture
def url() -> str:
    return f"memory://hub-{next(_numbers)}/model"


def objects(url: str) -> dict[str, bytes]:
    store = MemoryStore(url)
    return {info.key: bytes(store.get(info.key)) for info in store.list()}


def test_a_models_weights_go_from_the_hub_into_a_bucket_once(hub: Hub, any_s3: S3Place) -> None:
    target = f"{any_s3.url}/models/tiny"
    copied = copy("hf://org/tiny", target, store=any_s3.config)
    store = open_store(target, any_s3.config)
    assert {info.key: bytes(store.get(info.key)) for info in store.list()} == FILES
    assert (copied.objects, copied.unproven) == (3, 2)  # of the small ones the hub tells a git digest only
    asked = len(hub.resolved)
    assert copy("hf://org/tiny", target, store=any_s3.config).sent_bytes == 0
    assert len(hub.resolved) == asked


def test_weights_that_are_not_what_the_hub_says_never_arrive(hub: Hub, url: str) -> None:
    hub.files["model.safetensors"] = bytes(20_000_000)
    with pytest.raises(BadDigest, match=r"model\.safetensors: expected sha-256 \w+, found sha256:\w+ and then .*; the object is damaged"):
        copy("hf://org/tiny", url)
    assert "model.safetensors" not in objects(url)
    with pytest.raises(BucketNotFound, match="there is no repository 'org/nothing'"):
        copy("hf://org/nothing", url)


def test_a_model_comes_from_the_hub_to_a_disk(hub: Hub, tmp_path: Path) -> None:
    pulled = pull("hf://org/tiny", tmp_path / "tiny")
    assert {
        path.relative_to(tmp_path / "tiny").as_posix(): path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()
    } == FILES
    assert (pulled.files, pulled.unproven) == (3, 2)


_OFFLINE = """
import sys, torch, transformers, stagekit
from pathlib import Path
config = transformers.BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
model = transformers.BertModel(config)
model.save_pretrained("saved")
stagekit.push("saved", "bucket/models/tiny")
pulled = stagekit.pull("bucket/models/tiny", "local", link_hf="org/tiny-random")
assert pulled.linked == "org/tiny-random", pulled
again = transformers.AutoModel.from_pretrained("org/tiny-random")
for name, weights in model.state_dict().items():
    assert torch.equal(weights, again.state_dict()[name]), name
print("loaded", pulled.line)
"""


def test_from_pretrained_finds_a_pulled_model_offline(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", _OFFLINE], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "; from_pretrained finds it as org/tiny-random" in done.stdout


def test_the_cache_holds_links_and_no_second_copy(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for key, data in FILES.items():
        MemoryStore(url).put(key, data)
    pull(url, tmp_path / "model", link_hf="org/name")
    folder = tmp_path / "hub" / "models--org--name"
    revision = (folder / "refs" / "main").read_text()
    assert re.fullmatch("[0-9a-f]{40}", revision)
    snapshot = folder / "snapshots" / revision
    for path, data in FILES.items():
        assert (snapshot / path).is_symlink()
        assert (snapshot / path).read_bytes() == data
        assert (snapshot / path).resolve().parent == folder / "blobs"
        assert (snapshot / path).samefile(tmp_path / "model" / path)
    before = sorted(str(path) for path in folder.rglob("*"))
    assert pull(url, tmp_path / "model", link_hf="org/name").fetched_bytes == 0
    assert sorted(str(path) for path in folder.rglob("*")) == before
    MemoryStore(url).put("config.json", b"{}")
    pull(url, tmp_path / "newer", link_hf="org/name")
    assert (folder / "refs" / "main").read_text() != revision
    assert (snapshot / "config.json").read_bytes() == FILES["config.json"]  # who uses the earlier one keeps it


def test_a_cache_on_another_disk_is_told_to_need_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(b"{}")
    link = HubLink("org/name", tmp_path / "hub")

    def other_disk(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    events: list[Event] = []
    revision = link.lay_out(tmp_path / "model", on_event=events.append)
    assert (link.folder / "snapshots" / revision / "config.json").read_bytes() == b"{}"
    (told,) = [event.text for event in events if isinstance(event, Message)]
    assert told == f"{link.folder} is on another disk than {tmp_path / 'model'}: the model is found as long as {tmp_path / 'model'} stays"


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "org/..", "org/a--b", "/abs", "org/"])
def test_what_is_no_models_name_is_refused_before_anything(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no model's name; write it as from_pretrained gets it, org/name"):
        pull("memory://hub/none", tmp_path / "x", link_hf=name)
