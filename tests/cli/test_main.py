"""The command line as a whole: exit codes, one line per error, lazy commands, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import stagekit.cli
from stagekit.cli import COMMANDS, main
from stagekit.cli.exits import MEANINGS, Exit
from stagekit.config import StoreConfig, home_directory
from stagekit.store.directory import DirectoryStore

from ..made import make_checkpoint, make_dataset, make_run
from ..rigs.servers import S3Server

STAGEKIT = [sys.executable, "-m", "stagekit"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A bucket with a data set and a run."""
    make_dataset(DirectoryStore(str(tmp_path / "bucket" / "digits")))
    run = DirectoryStore(str(tmp_path / "bucket" / "run"))
    make_run(run)
    make_checkpoint(run, 100, {"model.pt": b"m" * 1000}, metrics={"loss": 0.5})
    make_checkpoint(run, 1200, {"model.pt": b"n" * 1000}, epoch=3)
    return tmp_path / "bucket"


def test_every_command_has_the_sentence_that_help_shows() -> None:
    group = stagekit.cli.stagekit
    context = click.Context(group)
    for name, (_, sentence) in COMMANDS.items():
        command = group.get_command(context, name)
        assert command is not None
        assert (command.help or "").split("\n\n")[0].replace("\n", " ") == sentence, name


def test_every_command_takes_json_and_says_what_its_options_do() -> None:
    group = stagekit.cli.stagekit
    context = click.Context(group)
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        options = [param for param in command.params if isinstance(param, click.Option)]
        assert any("--json" in option.opts for option in options), name
        assert all(option.help for option in options), name


def test_no_option_takes_for_a_number_what_is_none() -> None:
    group = stagekit.cli.stagekit
    context = click.Context(group)
    tried = 0
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.types.FloatParamType):
                tried += 1
                for text in ("nan", "inf", "-1"):
                    with pytest.raises(click.BadParameter):
                        option.type.convert(text, option, context)
    assert tried >= 4


def test_help_and_version_load_nothing_heavy() -> None:
    program = (
        "import sys; from stagekit.cli import main\n"
        "assert main(['--help']) == 0 and main(['--version']) == 0 and main([]) == 0\n"
        "heavy = ('torch', 'botocore', 'rich', 'fsspec', 'numpy', 'stagekit.store')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert "stagekit 0." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nosuch"], Exit.USAGE, "No such command 'nosuch'"),
        (["ls"], Exit.USAGE, "Missing argument 'URL'"),
        (["ls", "s3:/bucket"], Exit.USAGE, "looks like a URL without its two slashes"),
        (["info", "--peek", "x", "here"], Exit.USAGE, "'x' is not a valid integer range"),
        (["ls", "here", "--anonymous", "--profile", "p"], Exit.USAGE, "contradict each other"),
        (["info", "/no/such/place"], Exit.FAILED, "neither a data set nor a run"),
        (["verify", "/no/such/place"], Exit.FAILED, "neither a data set nor a run"),
        (
            ["pull", "/no/such/place", "x"],
            Exit.FAILED,
            "/no/such/place: there is no object of this name, and none below it; stagekit ls /no/such tells",
        ),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    arguments: list[str], code: Exit, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("stagekit: error: ")
    assert words in shown.err
    assert main([*arguments, "--json"]) == code
    shown = capsys.readouterr()
    assert shown.err == ""
    record = json.loads(shown.out)
    assert record["event"] == "error"
    assert words in record["message"]


def test_an_option_before_its_command_is_told_where_to_stand(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--json", "info", "/x"], "--json goes behind the command: stagekit info --json …"),
        (["--json"], "--json goes behind the command: stagekit COMMAND --json …"),
    ):
        assert main(arguments) == 2
        assert json.loads(capsys.readouterr().out)["message"] == words
    assert main(["--peek", "3", "info", "/x"]) == 2
    assert capsys.readouterr().err == "stagekit: error: --peek goes behind the command: stagekit info --peek …\n"
    assert main(["--peek", "3", "ls", "/x"]) == 2
    assert "No such option '--peek'" in capsys.readouterr().err
    assert main(["info", "--nosuch", "/x"]) == 2
    assert "No such option '--nosuch'" in capsys.readouterr().err


def test_json_behind_two_dashes_belongs_to_somebody_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nosuch", "--", "--json"]) == 2
    assert capsys.readouterr().err.startswith("stagekit: error: ")


def test_ls(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(place)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"data set  27.6 kB  24 samples, 3 shards              {place}/digits",
        f"run       2.00 kB  2 checkpoints, newest step 1,200  {place}/run",
    ]
    assert main(["ls", f"{place}/run", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["url"].removeprefix(str(place)) for record in records] == ["/run", "/run@100", "/run@1200"]


def test_ls_says_so_when_nothing_is_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(place / "digist")]) == 0
    assert capsys.readouterr() == ("", f"nothing lies below {place}/digist\n")
    assert main(["ls", "--json", str(place / "digist")]) == 0
    assert json.loads(capsys.readouterr().out) == {"event": "message", "level": "info", "text": f"nothing lies below {place}/digist"}


def test_a_checkpoint_that_is_misnamed_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("abc", "-1", "1200.0", "Latest"):
        url = f"{place}/run@{name}"
        for arguments in (["info", url], ["verify", url], ["pull", url, str(place / "out")]):
            assert main(arguments) == 1
            assert (
                f"If a checkpoint of {place}/run is meant, {name!r} is none of a step's number, latest and best" in capsys.readouterr().err
            )
        assert main(["ls", url]) == 0
        assert f"{name!r} is none of" in capsys.readouterr().err
    assert main(["ls", f"{place}/run@1200"]) == 0
    assert f"For a checkpoint of the run {place}/run: stagekit info {place}/run@1200\n" in capsys.readouterr().err


def test_info(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", f"{place}/digits", "--peek", "1"]) == 0
    assert "sample     000000: txt '0'" in capsys.readouterr().out
    assert main(["info", f"{place}/digits", "--urls"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{place}/digits/shards/00000{number}.tar" for number in range(3)]
    for no_data_set in (f"{place}/run", f"{place}/run@1200"):
        assert main(["info", no_data_set, "--urls"]) == Exit.USAGE
        assert f"{no_data_set} is no data set, and only those have shards" in capsys.readouterr().err
    assert main(["info", f"{place}/run@1200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["event"], record["step"], record["epoch"]) == ("checkpoint", 1200, 3)


def test_verify(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{place}/digits", "--deep"]) == 0
    assert "9 objects, 27.6 kB: whole (every byte read)" in capsys.readouterr().out
    shard = place / "digits" / "shards" / "000001.tar"
    damaged = bytearray(shard.read_bytes())
    damaged[600] ^= 1
    shard.write_bytes(damaged)
    assert main(["verify", f"{place}/digits"]) == 0
    capsys.readouterr()
    assert main(["verify", f"{place}/digits", "--deep"]) == 1
    assert f"fault: {shard}: block 0 at offset 0 " in capsys.readouterr().out
    assert main(["verify", f"{place}/digits", "--deep", "--json"]) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (finding,) = [record for record in records if record["event"] == "finding"]
    assert (finding["shard"], finding["block"], finding["offset"]) == ("shards/000001.tar", 0, 0)
    assert records[-1]["ok"] is False


def test_pull(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", f"{place}/run@100", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "model.pt").read_bytes() == b"m" * 1000
    assert f"{place}/run@100 is in {tmp_path}/back: 1 file, 1.00 kB, every byte verified" in capsys.readouterr().out
    assert main(["pull", f"{place}/run@7", str(tmp_path / "other")]) == 1
    assert "no checkpoint of step 7" in capsys.readouterr().err


def test_endpoint_and_profile_reach_the_store(
    moto_server: S3Server,
    fresh_bucket: Callable[[S3Server], str],
    credentials_for: Callable[[S3Server], StoreConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"s3://{fresh_bucket(moto_server)}"
    config = credentials_for(moto_server)
    assert main(["ls", url, "--endpoint-url", moto_server.endpoint_url, "--profile", str(config.profile)]) == 0
    assert capsys.readouterr().out == ""
    limits = home_directory() / "limits"
    assert not limits.exists()
    options = ["--endpoint-url", moto_server.endpoint_url, "--profile", str(config.profile)]
    assert main(["ls", url, *options, "--max-requests-per-s", "250", "--max-bytes-per-s", "80Mbit/s"]) == 0
    assert len(list(limits.iterdir())) == 1
    assert main(["ls", url, "--max-bytes-per-s", "fast"]) == 2
    assert "--max-bytes-per-s: 'fast' is not a rate" in capsys.readouterr().err
    assert main(["ls", url, "--endpoint-url", "nowhere"]) == 2
    assert "is no endpoint" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback(place: Path) -> None:
    for number in range(400):
        (place / f"object-{number:05d}-{'x' * 150}").write_bytes(b"")
    command = f"{sys.executable} -m stagekit ls {place} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_closed_streams_are_no_traceback(place: Path) -> None:
    """As a daemon starts its children: there is nowhere to write to, and the exit code still counts."""
    for redirection in (">&-", "2>&-", ">&- 2>&-", "<&-"):
        for url, code in ((place, 0), (place / "digits" / "manifest.json", 2)):
            ended = subprocess.run(["sh", "-c", f'"$@" {redirection}', "sh", *STAGEKIT, "ls", str(url)], capture_output=True, text=True)
            assert ended.returncode == code, (redirection, ended)
            assert "Traceback" not in ended.stderr + ended.stdout, redirection


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["info", "--peek", "3"], ["--help"]])
def test_a_full_disk_behind_standard_output_is_named(arguments: list[str], place: Path) -> None:
    url = [] if arguments == ["--help"] else [str(place / "digits")]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        ended = subprocess.run([*STAGEKIT, *arguments, *url], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "stagekit: error: writing to standard output: No space left on device; what was to be shown is cut short\n"


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_ends_with_its_code_and_one_line(number: int, code: int, word: str, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "something"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [*STAGEKIT, "pull", "s3://bucket/run", str(tmp_path / "x"), "--endpoint-url", endpoint]
        process = subprocess.Popen(command, env={**os.environ, **keys}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()
        with connection:
            began_s = time.monotonic()
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert err.strip().count("\n") == 0
    assert err.strip().startswith("stagekit: error: ")
    assert word in err
    assert time.monotonic() - began_s < 10
    assert not (tmp_path / "x").exists()


def test_the_table_of_exit_codes_is_complete() -> None:
    assert set(MEANINGS) == set(Exit)
    assert [int(code) for code in Exit] == [0, 1, 2, 3, 4, 5, 6, 130, 143]


def test_sigterm_means_what_it_meant_before_once_main_has_returned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["ls", str(tmp_path)]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
