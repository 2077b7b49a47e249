"""The pure parts of the rows, and those that no fault of a whole machine reaches."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stagekit.copies.pull import pull
from stagekit.errors import Unreachable
from stagekit.mounts import Judgement
from stagekit.processes import Process
from stagekit.progress import ignore
from stagekit.runs.heartbeat import Heartbeat
from stagekit.saves.adapter import base_in
from stagekit.saves.pulled import note_pulled
from stagekit.store import open_store
from stagekit.store.base import ObjectInfo, Store
from stagekit.store.extras import ExpiryRule
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.verdict import files, nearby, processes, steps, teardown
from stagekit.verdict.bucket import RunState, look_at_run
from stagekit.verdict.caches import is_cache
from stagekit.verdict.durable import Durable
from stagekit.verdict.expiry import first_expiry
from stagekit.verdict.files import Found, LocalFile, compare
from stagekit.verdict.findings import Finding
from stagekit.verdict.origins import HubAnswer, ask_hub, judge_base_model
from stagekit.verdict.scope import find_scope

from ..made import make_checkpoint, make_run

DAY = 86_400.0


# --------------------------------------------------------------------------------------------------------------------------- expiry


@pytest.mark.parametrize(
    ("rule", "at_s"),
    [
        (ExpiryRule("r", "", days=3), 4 * DAY),
        (ExpiryRule("r", "runs/", days=3), 4 * DAY),
        (ExpiryRule("r", "runs/first/checkpoints/b", days=3), 5 * DAY),
        (ExpiryRule("r", "runs/second/", days=3), None),
        (ExpiryRule("r", "", at_s=9 * DAY), 9 * DAY),
        (ExpiryRule("r", "", days=1, above=50), 3 * DAY),
        (ExpiryRule("r", "", days=1, below=50), 2 * DAY),
    ],
)
def test_what_a_rule_removes_first(rule: ExpiryRule, at_s: float | None) -> None:
    objects = [ObjectInfo("checkpoints/a", 10, None, DAY), ObjectInfo("checkpoints/b", 100, None, 2 * DAY)]
    found = first_expiry(objects, "runs/first/", [rule])
    assert (found.at_s if found else None) == at_s


# ---------------------------------------------------------------------------------------------------------------------------- files


def test_files_that_go_away_during_the_look_are_one_row_and_no_matter_of_rights(tmp_path: Path) -> None:
    out = tmp_path / "out" / "checkpoint-3"
    out.mkdir(parents=True)
    (out / "model.bin").write_bytes(b"weights")
    kept = [
        LocalFile(tmp_path / "out", f"checkpoint-3/{name}", size, 0.0) for name, size in (("model.bin", 7), ("gone.bin", 7), ("new", 9))
    ]
    looked = RunState("s3://bucket/run", seen=True, held={(7, hashlib.sha256(b"weights").hexdigest()): 1})
    found = compare(Found(files=kept), [looked], Durable(), clock=lambda: 0.0, on_event=ignore)
    assert [(one.weight, one.row, one.subject) for one in found] == [("CANNOT TELL", "file", str(out))]
    assert "2 files went away during the look" in found[0].what


# ---------------------------------------------------------------------------------------------------------------------------- steps


def state(url: str, step: int) -> RunState:
    make_run(MemoryStore(url))
    make_checkpoint(MemoryStore(url), step, {"a": b"a"})
    return look_at_run(MemoryStore(url), lambda: 1_700_001_000.0)


@pytest.mark.parametrize(
    ("process", "weight"),
    [
        (Process.current(), "NO"),
        (Process("another-server", "boot", "pid:[1]", 5, "1"), "note"),
        (Process("container", Process.current().boot_id, "pid:[1]", 5, "1"), "CANNOT TELL"),
    ],
)
def test_what_was_trained_and_not_saved_counts_while_somebody_may_still_save_it(process: Process, weight: str) -> None:
    url = f"memory://steps-{weight.replace(' ', '-')}/run"
    beat = Heartbeat(url, 1300, 1_700_000_200.0 + 14 * 60, process)
    (finding,) = steps.judge({url: state(url, 100)}, [], [beat])
    assert finding.weight == weight
    assert "step 100 is the newest that is safe: you lose 1,200 steps, 14 min" in finding.what
    assert steps.judge({url: state(url, 1300)}, [], [beat]) == []


# ------------------------------------------------------------------------------------------------------------------------ odd names


def test_a_row_is_one_line_whatever_a_file_is_called_and_its_command_names_that_file(tmp_path: Path) -> None:
    name = os.fsdecode(b"it's\\a\nb\xff\x1b[2J.txt")
    (tmp_path / name).write_text("x")
    verdict = teardown(watch=[tmp_path], check=True)
    (finding,) = [one for one in verdict.findings if one.row == "file"]
    first, second = finding.line.splitlines()
    assert r"it's\a\nb\xff\x1b[2J.txt: 1 file is not in any bucket" in first
    pattern = second.partition("--ignore ")[2]
    assert pattern.isprintable()
    printed = subprocess.run(["bash", "-c", f"printf %s {pattern}"], capture_output=True, check=True).stdout
    assert printed == os.fsencode(name)
    assert all(line.isprintable() for line in find_scope([tmp_path / name]).scope.lines)


# --------------------------------------------------------------------------------------------------------------------------- caches


def test_caches_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    assert is_cache(tmp_path / "env", ["bin", "pyvenv.cfg"])
    assert is_cache(tmp_path / "miniconda3", ["bin", "conda-meta"])
    assert is_cache(tmp_path / "models--org--tiny", ["blobs", "refs", "snapshots"])
    assert is_cache(tmp_path / "pip", ["http-v2", "selfcheck"])
    assert not is_cache(tmp_path / "models--mine", ["model.bin"])
    assert not is_cache(tmp_path / "wheels", ["wheels"])
    (tmp_path / "CACHEDIR.TAG").write_text("mine")
    assert not is_cache(tmp_path, ["CACHEDIR.TAG"])
    (tmp_path / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n# made by uv")
    assert is_cache(tmp_path, ["CACHEDIR.TAG"])


def test_where_a_training_was_started_is_searched_deep_and_not_without_end(tmp_path: Path) -> None:
    deep = tmp_path / "outputs" / "2026-01-01" / "12-00-00" / "lightning_logs" / "version_0"
    runs = tmp_path / "mlruns" / "0" / "aa" / "metrics"
    for folder in (deep, runs):
        folder.mkdir(parents=True)
    written = [deep / "events.out.tfevents.1", deep / "metrics.csv", runs / "loss"]
    for path in written:
        path.write_bytes(b"1")
    assert sorted(nearby.look(tmp_path).tracked) == sorted(written)
    assert nearby.look(tmp_path).cut is None
    times = iter([0.0, *[nearby.PATIENCE_S + 1] * 99])
    assert nearby.look(tmp_path, monotonic=lambda: next(times)).cut == "below"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mlruns").rename(tmp_path / "elsewhere" / "mlruns")
    started = tmp_path / "started"
    started.mkdir()
    (started / "mlruns").symlink_to(tmp_path / "elsewhere" / "mlruns")
    (started / "circle").symlink_to(started)
    times = iter([0.0, 0.0, *[nearby.PATIENCE_S + 1] * 99])
    assert nearby.look(started, monotonic=lambda: next(times)).cut == "links"
    assert nearby.look(started).tracked == [started / "mlruns" / "0" / "aa" / "metrics" / "loss"]


def test_trackios_folder_on_a_mounted_bucket_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = tmp_path / "hub" / "trackio"
    trackio.mkdir(parents=True)
    (trackio / "llm.db").write_bytes(b"x")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "work" / "trackio").mkdir(parents=True)
    (tmp_path / "work" / "trackio" / "notes.txt").write_bytes(b"somebody's own folder")
    looking = files.Looking([], [])
    looking.working({tmp_path / "work": 1.0})
    assert [file.path for file in looking.found.files] == ["trackio/llm.db"]
    monkeypatch.setattr(files, "judge_mount", lambda path: Judgement("refused" if path == trackio else "fine", "a bucket"))
    looking = files.Looking([], [])
    looking.working({tmp_path / "work": 1.0})
    assert looking.found.files == []
    assert [(one.weight, one.row, one.subject) for one in looking.found.findings] == [("note", "mount", str(trackio))]


def test_what_looks_like_a_save_counts_when_it_was_written_since_and_was_not_brought_here(tmp_path: Path) -> None:
    def write(name: str, time_s: float = 200.0) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        os.utime(path, (time_s, time_s))
        return path

    saves = [write(name) for name in ("final/model.safetensors", "best.pt", "out2/checkpoint-3/state.json", "x/step_7/deep/er/a")]
    for name in ("old.pt", "data/notes.txt", "checkpoint-final/notes.txt", ".hidden/model.pt", "own/model.pt"):
        write(name, 50.0 if name == "old.pt" else 200.0)
    write("hub/model.safetensors")
    (tmp_path / "hub" / ".cache" / "huggingface" / "download").mkdir(parents=True)
    for name in ("base/model.safetensors", "base/config.json"):
        write(name)
    home = tmp_path / ".home"
    note_pulled(tmp_path / "base", "s3://bucket/base", {}, home=home)
    found = nearby.look(tmp_path, 100.0, skips=lambda path, relative: relative == "own", home=home)
    assert sorted(found.saves) == sorted(saves)
    assert nearby.look(tmp_path).saves == [], "where it is not known since when"


# -------------------------------------------------------------------------------------------------------------------------- durable


def test_what_lies_on_a_volume_that_stays_is_a_note_by_where_its_links_lead(tmp_path: Path) -> None:
    volume = tmp_path / "workspace"
    volume.mkdir()
    (tmp_path / "link").symlink_to(volume)
    durable = Durable([volume])
    finding = Finding("NO", "file", "1 file is in no verified checkpoint", "x", fix="copy it away")
    for place in (volume, volume / "a", tmp_path / "link" / "a"):
        assert durable.excuse(finding, place).weight == "note"
        assert durable.excuse(finding, place).fix == ""
    assert durable.excuse(finding, tmp_path / "workspace-2") == finding


# ------------------------------------------------------------------------------------------------------------------------ processes


def test_a_file_that_is_mapped_for_writing_counts_after_it_was_closed(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "out"
    (proc / "4194301" / "fd").mkdir(parents=True)
    (proc / "self").mkdir()
    root.mkdir()
    (proc / "4194301" / "cmdline").write_bytes(b"python\0train.py\0")
    maps = proc / "4194301" / "maps"
    for line in (
        f"7f00-7f01 rw-p 00000000 08:01 12 {root}/private",
        f"7f00-7f01 r--s 00000000 08:01 12 {root}/read",
        f"7f00-7f01 rw-s 00000000 08:01 12 {root}/gone (deleted)",
        f"7f00-7f01 rw-s 00000000 08:01 12 {root}-other/array.npy",
        "7f00-7f01 rw-s 00000000 00:01 12 /dev/shm/x",
    ):
        maps.write_text(line + "\n")
        assert processes.judge([root], proc=proc) == []
    maps.write_text(f"7f00-7f01 rw-s 00000000 08:01 12     {root}/an array.npy\n")
    (finding,) = processes.judge([root], proc=proc)
    assert finding.what == f"process 4194301 (python train.py) has {root}/an array.npy open for writing"


# -------------------------------------------------------------------------------------------------------------------------- the Hub


class Hub(BaseHTTPRequestHandler):
    """A Hub that has one model with one commit."""

    def do_GET(self) -> None:
        there = self.path.startswith("/api/models/org/tiny/revision/abc")
        body = json.dumps({"id": "org/tiny", "sha": "abc"} if there else {"error": "Repository not found"}).encode()
        self.send_response(200 if there else 404)
        if not there:
            self.send_header("X-Error-Code", "RevisionNotFound" if "org/tiny" in self.path else "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield
        server.shutdown()


def test_the_hub_is_asked_for_the_revision(hub: None) -> None:
    assert ask_hub("org/tiny", "abc") == "there"
    assert ask_hub("org/tiny", "def") == "missing"
    assert ask_hub("org/gone", "abc") == "missing"


def test_a_hub_that_does_not_answer_was_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert ask_hub("org/tiny", "abc") == "unasked"


@pytest.mark.parametrize(("answer", "weights"), [("there", []), ("missing", ["CANNOT TELL"]), ("unasked", ["note"])])
def test_a_base_model_of_the_hub(answer: HubAnswer, weights: list[str]) -> None:
    url = f"memory://base-{answer}/run"
    make_run(MemoryStore(url))
    make_checkpoint(MemoryStore(url), 1, {"a": b"a"}, identity={"base_model": "org/tiny@abc"})
    state = look_at_run(MemoryStore(url), lambda: 1_700_001_000.0)
    found = judge_base_model(state, lambda name: False, open_store, None, lambda name, revision: answer)
    assert [one.weight for one in found] == weights
    assert all("the base model org/tiny@abc" in one.what for one in found)
    assert judge_base_model(state, lambda name: name == "org/tiny", open_store, None, lambda name, revision: answer) == []


def test_a_base_model_that_was_pulled_is_looked_for_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEKIT_HOME", str(tmp_path / "home"))
    bucket = MemoryStore("memory://pulled-base/models/tiny")
    for name in ("config.json", "model.safetensors", "tokenizer/vocab.txt"):
        bucket.put(name, os.urandom(9000))
    pull(str(bucket.location), tmp_path / "base")
    url = "memory://pulled-base/run"
    make_run(MemoryStore(url))
    make_checkpoint(MemoryStore(url), 1, {"a": b"a"}, identity={"base_model": base_in(tmp_path / "base")})
    state = look_at_run(MemoryStore(url), lambda: 1_700_001_000.0)

    def judged(open_place: Callable[..., Store] = open_store) -> list[Finding]:
        return judge_base_model(state, lambda name: False, open_place, None)

    assert judged() == []
    [gone] = judged(lambda url, store: FaultStore(MemoryStore("memory://pulled-base/elsewhere")))
    assert (gone.weight, gone.row) == ("CANNOT TELL", "base model")
    assert f"of which config.json is not at {bucket.location} any more" in gone.what
    bucket.put("model.safetensors", b"another model")
    assert "of which model.safetensors is not at" in judged()[0].what
    away = FaultStore(bucket)
    away.fail("list", Unreachable("no network"), times=None)
    [unseen] = judged(lambda url, store: away)
    assert unseen.weight == "CANNOT TELL"
    assert "cannot be looked at: no network" in unseen.what
    (tmp_path / "base" / "config.json").write_text("{}")
    make_checkpoint(MemoryStore(url), 2, {"a": b"a"}, identity={"base_model": base_in(tmp_path / "base")})
    [changed] = judge_base_model(look_at_run(MemoryStore(url), lambda: 1_700_001_000.0), lambda name: False, open_store, None)
    assert "whether that is anywhere else is not known" in changed.what, "it is not what was pulled any more"
