"""Fixtures for everyone: real S3 servers, started when first asked for, and an environment in which the user's own is out of reach."""

from __future__ import annotations

import importlib.util
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from stagekit.config import StoreConfig

from .rigs import available, servers
from .rigs import chromium as chromium_rig
from .rigs import fuse as fuse_rig
from .rigs import nginx as nginx_rig
from .rigs import rgw as rgw_rig
from .rigs.chromium import Browser
from .rigs.fuse import FuseMount
from .rigs.nginx import Nginx
from .rigs.rgw import Rgw
from .rigs.servers import S3Server

T = TypeVar("T")

# Only the environment that tools/test makes for them has MosaicML's package.
collect_ignore = [] if importlib.util.find_spec("streaming") else ["mosaicml"]

# A shell that starts the tests in the background has them ignore ctrl-C, and so would every program that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("stagekit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stagekit")

# ---------------------------------------------------------------------------------------------------------------- the environment


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's keys, settings and state out of every test. Returns the test's own home directory."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "STAGEKIT_", "RCLONE_", "XDG_")) or name == "S3_ENDPOINT_URL":
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("STAGEKIT_HOME", str(home / "stagekit"))
    # Without this, looking for keys that are not there asks a cloud's metadata address and waits for it.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return home


# -------------------------------------------------------------------------------------------------------------------- the servers


def start_rig(name: str, rig: AbstractContextManager[T]) -> Iterator[T]:
    """The body of a rig's fixture. A rig that does not start fails the tests that need it; it never skips them."""
    failure = ""
    with ExitStack() as running:
        try:
            server = running.enter_context(rig)
        except Exception as error:
            failure = str(error)
        else:
            yield server
    if failure:
        pytest.fail(f"The test rig {name!r} did not start: {failure}", pytrace=False)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    yield from start_rig("moto", servers.moto())


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from start_rig("rclone", servers.rclone(tmp_path_factory.mktemp("rclone")))


@pytest.fixture(scope="session")
def rgw() -> Iterator[Rgw]:
    """A real Ceph RGW: ``.http`` and ``.https`` are its two doors."""
    yield from start_rig("rgw", rgw_rig.rgw())


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """nginx, fast and as over a WAN: put files below ``.root``."""
    yield from start_rig("nginx", nginx_rig.nginx(tmp_path_factory.mktemp("nginx")))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser without a window."""
    yield from start_rig("chromium", chromium_rig.chromium(tmp_path_factory.mktemp("chromium")))


@pytest.fixture
def fuse(rclone_server: S3Server, tmp_path: Path) -> Iterator[FuseMount]:
    """A new bucket of ``rclone_server`` behind a real FUSE mount."""
    yield from start_rig("fuse", fuse_rig.mounted(rclone_server, rclone_server.create_bucket(), tmp_path / "fuse"))


@pytest.fixture
def credentials_for(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server | Rgw], StoreConfig]:
    """A function from a server to a ``StoreConfig`` for it, whose keys lie in a profile of an AWS credentials file."""
    directory = tmp_path_factory.mktemp("aws")
    credentials = directory / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(directory / "config"))
    known: dict[str, S3Server] = {}

    def config(server: S3Server | Rgw) -> StoreConfig:
        if isinstance(server, Rgw):
            server = server.http
        known[server.name] = server
        credentials.write_text(
            "".join(
                f"[{name}]\naws_access_key_id = {one.access_key}\naws_secret_access_key = {one.secret_key}\n" for name, one in known.items()
            )
        )
        return StoreConfig(endpoint_url=server.endpoint_url, profile=server.name, ca_bundle=server.ca_bundle)

    return config


@pytest.fixture
def fresh_bucket() -> Callable[[S3Server | Rgw], str]:
    """A function from a server to the name of a new, empty bucket on it."""

    def create(server: S3Server | Rgw) -> str:
        return (server.http if isinstance(server, Rgw) else server).create_bucket()

    return create


class S3Place(NamedTuple):
    """A new bucket on a real server: the URL to put things below, and how to get there."""

    url: str
    config: StoreConfig


ANY_S3 = (
    pytest.param("moto", id="moto"),
    pytest.param("rclone", id="rclone"),
    pytest.param("rgw-http", id="rgw-http", marks=pytest.mark.rig("rgw")),
    pytest.param("rgw-https", id="rgw-https", marks=pytest.mark.rig("rgw")),
)


@pytest.fixture
def s3_server(request: pytest.FixtureRequest) -> Callable[[str], S3Server]:
    """A function from ``moto``, ``rclone``, ``rgw-http`` or ``rgw-https`` to that server, started when first asked for."""

    def server(name: str) -> S3Server:
        fixture = {"moto": "moto_server", "rclone": "rclone_server"}.get(name, "rgw")
        found = request.getfixturevalue(fixture)
        if isinstance(found, Rgw):
            return {"rgw-http": found.http, "rgw-https": found.https}[name]
        assert isinstance(found, S3Server)
        return found

    return server


@pytest.fixture(params=ANY_S3)
def any_s3(
    request: pytest.FixtureRequest, s3_server: Callable[[str], S3Server], credentials_for: Callable[[S3Server], StoreConfig]
) -> S3Place:
    """Runs the test on every S3 server there is, each time in a new bucket."""
    server = s3_server(request.param)
    return S3Place(f"s3://{server.create_bucket()}", credentials_for(server))


# ---------------------------------------------------------------------------------------------------------------- what is left out

_left_out: dict[str, int] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests that are marked slow or need an installed server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine cannot run when a person without root asked, and what ``--quick`` leaves out. It is counted."""
    reasons = available.reasons_to_leave_out(quick=config.getoption("--quick"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        needed = available.rigs_of(item) & reasons.keys()
        (left_out if needed else kept).append(item)
        for rig in needed:
            _left_out[rig] = _left_out.get(rig, 0) + 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (told := getattr(session.config, "workeroutput", None)) is not None:  # one of several processes, under ``-n``
        told["left_out"] = _left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process collects all tests and counts the same ones."""
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = available.reasons_to_leave_out(quick=config.getoption("--quick"))
    for rig, tests in sorted(_left_out.items()):
        terminalreporter.write_line(f"LEFT OUT: {tests} tests that need {rig!r}. {reasons[rig]}", yellow=True)


@pytest.fixture
def as_nobody(tmp_path: Path) -> Callable[[Callable[[], str]], str]:
    """A function that runs another one in a child process without root's rights, and returns its text. Permissions bind nobody else."""
    # pytest's own directories are closed to others, all the way up.
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o005 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)

    def run(function: Callable[[], str]) -> str:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads of other tests' servers may run; this child calls nothing that could need them
            child = os.fork()
        if not child:
            try:
                if os.getuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                os.write(writer, function().encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read().decode()
        os.waitpid(child, 0)
        return text

    return run
