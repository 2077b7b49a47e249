"""``stagekit run`` with real processes: what was saved is in the bucket, whoever is killed, and the next line goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.runs import Run
from stagekit.store.directory import DirectoryStore
from stagekit.testing.proxy import FaultProxy, Status, Throttle

from ..rigs.servers import S3Server
from .machine import ROOT, TOY, Machine
from .test_child import eventually, is_alive, parent_of


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine", str(tmp_path / "bucket" / "run"))


@contextmanager
def small_disk(machine: Machine, size: int) -> Iterator[Path]:
    disk = machine.directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield disk / "spool"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_an_unmodified_trainer_goes_on_on_another_machine(tmp_path: Path, machine: Machine) -> None:
    done = machine.run("3")
    assert done.code == 0, done.err
    assert done.out == f"from 0 of {machine.url} in nothing\ndone\n", "the command's own output, and nothing else"
    assert machine.steps() == [3, 2, 1]
    assert f"stagekit: the command ended with 0; step 3 is in {machine.url}" in done.err
    other = Machine(tmp_path / "other", machine.url)
    done = other.run("5")
    assert done.code == 0, done.err
    assert done.out.startswith(f"from 3 of {machine.url} in {other.out}/checkpoint-3\n")
    assert (other.out / "checkpoint-3" / "pytorch_model.bin").read_bytes() == (
        machine.out / "checkpoint-3" / "pytorch_model.bin"
    ).read_bytes()
    assert machine.steps() == [5, 4, 3, 2, 1]
    assert not (other.out / "checkpoint-2").exists()


def test_what_it_prints_and_what_lies_beside_the_checkpoints_is_in_the_logs(machine: Machine) -> None:
    assert machine.run("1").code == 0
    assert machine.logs("stdout.log") == [f"from 0 of {machine.url} in nothing\ndone\n"]
    assert machine.logs("stderr.log") == [""]
    assert machine.logs("out/train.log") == ["trained to 1\n"]
    assert list((machine.directory / "home" / "wrapped").iterdir()) == [], "nothing is left on this machine"
    no_logs = machine.run("2", options=("--no-logs",))
    assert no_logs.out.endswith("done\n")
    assert len(machine.logs("stdout.log")) == 1


def test_the_commands_own_code_comes_back_and_its_saves_are_kept(machine: Machine) -> None:
    assert machine.run("2", "--exit", "7").code == 7
    assert machine.steps() == [2, 1]


def test_a_trainer_that_is_killed_while_it_saves(machine: Machine) -> None:
    done = machine.run("5", "--kill-self-in", "3")
    assert done.code == 137
    assert f"{machine.out}/checkpoint-3 is not finished and stays local: it lacks trainer_state.json" in done.err
    assert machine.steps() == [2, 1]
    again = machine.run("5")
    assert again.code == 0
    assert "checkpoint-3 was never finished" in again.err
    assert again.out.startswith(f"from 2 of {machine.url} in {machine.out}/checkpoint-2\n")
    assert (machine.out / "aside-checkpoint-3.incomplete").is_dir()
    assert machine.steps() == [5, 4, 3, 2, 1]


def test_a_watched_directory_that_stayed_empty_is_told(machine: Machine) -> None:
    done = machine.stagekit(*machine.line([sys.executable, TOY, "out", "1"], "--watch", "outt"))
    assert done.code == 0
    text = f"{machine.directory}/outt stayed empty: nothing was saved below it; is it the directory that the command saves into?"
    assert done.err.count("stayed empty") == 1
    assert text in done.err


def test_a_save_that_is_not_finished_is_no_success(machine: Machine) -> None:
    half = "mkdir out/checkpoint-2; echo '{\"global_step\": 2}' > out/checkpoint-2/trainer_state.json"
    done = machine.stagekit(*machine.line(["bash", "-c", f"{sys.executable} {TOY} out 1; {half}"]))
    assert done.code == 1
    assert done.err.count(f"{machine.out}/checkpoint-2 is not finished and stays local: it lacks the weights") == 1
    assert machine.steps() == [1]


def test_a_file_whose_name_no_store_takes_is_told_and_keeps_no_other_from_the_bucket(machine: Machine) -> None:
    script = f"{sys.executable} {TOY} out 1; echo 1 > out/a.log; echo 2 > $'out/bad\\xff.txt'; echo 3 > out/z.log"
    done = machine.stagekit(*machine.line(["bash", "-c", script]))
    assert done.code == 1
    told = f"{machine.out}/bad\\xff.txt is in no bucket, as 'logs/"
    assert told in done.err
    assert "it is not valid Unicode; rename it, then: stagekit teardown" in done.err
    assert machine.logs("out/a.log") == ["1\n"]
    assert machine.logs("out/z.log") == ["3\n"]
    looked = machine.stagekit("teardown", *machine.durable)
    assert looked.code == 3, looked.out
    Path(os.fsdecode(bytes(machine.out / "bad") + b"\xff.txt")).rename(machine.out / "good.txt")
    done = machine.stagekit("teardown", *machine.durable)
    assert done.code == 0, done.out
    assert machine.logs("out/good.txt") == ["2\n"]


def test_a_script_that_saves_into_the_same_run_by_itself_is_refused_before_its_first_step(machine: Machine) -> None:
    script = "import stagekit, sys\nfor epoch in stagekit.Run(sys.argv[1]).epochs(1, state={}): print('step')"
    done = machine.stagekit(*machine.line([sys.executable, "-c", script, machine.url]))
    assert done.code == 1
    assert "the stagekit run around this training saves into that run already" in done.err
    assert "step" not in done.out
    done = machine.stagekit(*machine.line([sys.executable, "-c", script, f"{machine.url}-of-its-own"]))
    assert done.code == 0, done.err


def test_logs_alone_are_no_yes_since_the_command_may_have_saved_elsewhere(machine: Machine) -> None:
    done = machine.stagekit(*machine.line(["bash", "-c", "mkdir model; echo 1 > out/train.log; echo weights > model/model.safetensors"]))
    assert done.code == 0
    assert f"no checkpoint was found below {machine.out}; is it where the command saves?" in done.err
    judged = machine.stagekit("teardown", *machine.durable)
    assert judged.code == 4, judged.out
    assert "files were seen below it, and its run has no checkpoint: the training may have saved to another directory" in judged.out
    assert machine.stagekit("teardown", *machine.durable, "--ignore", machine.url).code == 4, "a model lies beside it"
    assert machine.stagekit("teardown", *machine.durable, "--ignore", machine.url, "--ignore", "model").code == 0
    assert machine.stagekit("teardown", *machine.durable, "--run", machine.url, "--watch", "model").code == 3


def test_weights_that_no_rule_takes_for_a_checkpoint_are_told_with_the_option_that_does(machine: Machine) -> None:
    done = machine.stagekit(*machine.line(["bash", "-c", "echo 1 > out/last.pt"]))
    assert done.code == 0
    told = f"no checkpoint was found, and {machine.out}/last.pt went to the logs, from where nothing is fetched at the next start; "
    assert told + "if it is what the training goes on from: --pattern '*.pt'" in done.err
    done = machine.stagekit(*machine.line(["true"], "--pattern", "*.pt"))
    assert "no checkpoint was found" not in done.err
    assert len(machine.steps()) == 1


def test_a_trainer_that_crashes(machine: Machine) -> None:
    done = machine.stagekit(*machine.line([sys.executable, "-c", "import torch_that_is_not_there"]))
    assert done.code == 1
    assert "ModuleNotFoundError" in done.err
    assert machine.steps() == []


def test_a_command_that_is_not_there(machine: Machine) -> None:
    done = machine.stagekit(*machine.line(["no-such-trainer"]))
    assert done.code == 2
    assert "starting no-such-trainer: No such file or directory" in done.err
    assert list((machine.directory / "home" / "wrapped").iterdir()) == []


def test_one_that_hangs_at_exit_is_ended_by_stall(machine: Machine) -> None:
    done = machine.run("2", "--hang", "--deaf", options=("--stall", "5s", "--grace", "300ms"))
    assert done.code == 5, done.err
    assert "has printed nothing and written nothing below --watch for" in done.err
    assert machine.steps() == [2, 1]
    assert machine.logs("stdout.log")[0].endswith("done\n")


def test_max_hours_ends_a_job_after_a_drain(machine: Machine) -> None:
    done = machine.run("2", "--hang", options=("--max-hours", "0.0015"))
    assert done.code == 6, done.err
    assert "--max-hours allows no more" in done.err
    assert machine.steps() == [2, 1]


# -------------------------------------------------------------------------------------------------------------------- signals


def test_sigterm_lets_the_trainer_save_and_sends_what_it_saved(machine: Machine) -> None:
    process = machine.running("2", "--hang", "--save-on-term", options=("--grace", "60s"))
    machine.until_step(2)
    process.send_signal(signal.SIGTERM)
    code, out, err = finished(process)
    assert code == 0, err
    assert out.count("saved on SIGTERM") == 1
    assert machine.steps() == [3, 2, 1]


def test_a_bash_wrapper_that_does_not_pass_signals_on(machine: Machine) -> None:
    (machine.directory / "train.sh").write_text(f"{sys.executable} {TOY} out 2 --hang --save-on-term\necho never\n")
    process = machine.begin(*machine.line(["bash", "train.sh"], "--grace", "60s"))
    machine.until_step(2)
    process.send_signal(signal.SIGTERM)
    code, out, err = finished(process)
    assert code == 143, err
    assert out.count("saved on SIGTERM") == 1
    assert machine.steps() == [3, 2, 1]


def test_ctrl_c_reaches_the_command_once(machine: Machine) -> None:
    listener = "import os, signal, time\n"
    listener += "signal.signal(signal.SIGINT, lambda *_: open('got', 'a').write('x'))\nprint('ready', flush=True)\n"
    listener += "while not os.path.exists('end'): time.sleep(0.02)\n"
    process = machine.begin(*machine.line([sys.executable, "-c", listener]))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to its whole foreground group
    got = machine.directory / "got"
    eventually(lambda: got.exists() and got.read_text() != "")
    (machine.directory / "end").touch()
    assert finished(process)[0] == 0
    assert got.read_text() == "x"


def test_sigterm_with_a_short_grace_on_a_throttled_store_ends_in_time_and_loses_nothing(
    tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/run"
    with FaultProxy(moto_server.endpoint_url) as proxy:
        machine = Machine(tmp_path / "machine", url, {"AWS_ENDPOINT_URL": proxy.endpoint_url, "AWS_PROFILE": moto_server.name})
        proxy.fault(Throttle(2_000, "request"), method="PUT", key="*/files/pytorch_model.bin", times=None)  # half a minute for each
        process = machine.running("2", "--hang", "--deaf", options=("--grace", "8s"))
        entries = machine.directory / "home" / "spool" / "entries"
        eventually(lambda: len(list(entries.glob("*"))) == 2)
        asked_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, _, err = finished(process)
        assert code == 137, err
        assert time.monotonic() - asked_s < 8 + 1.5, "what ends a run is within its grace, not behind it"
        assert "steps 1, 2 are not in s3://" in err
        assert "`stagekit teardown`, sends them" in err
        assert len(list(entries.glob("*"))) == 2, "pinned until they are in the bucket"
        proxy.clear()
        again = machine.run("3")
        assert again.code == 0, again.err
        assert again.out.startswith(f"from 2 of {url}")
        assert [one.step for one in Run(url, store=config).checkpoints()] == [3, 2, 1]


def test_logs_that_take_too_long_are_left_to_teardown_after_the_drain_and_after_the_grace(
    tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/run"
    with FaultProxy(moto_server.endpoint_url) as proxy:
        machine = Machine(tmp_path / "machine", url, {"AWS_ENDPOINT_URL": proxy.endpoint_url, "AWS_PROFILE": moto_server.name})
        proxy.fault(Throttle(100, "request"), method="PUT", key="*/out/model.bin", times=None)  # ten minutes: longer than any test may take
        command = ["bash", "-c", "head -c 60000 /dev/zero > out/model.bin; touch ended"]
        done = machine.stagekit(*machine.line(command, "--drain", "1s"))
        assert done.code == 1
        assert f"logs are not all in {url}; the next start, or `stagekit teardown`, sends them" in done.err
        proxy.clear()
        assert machine.stagekit("teardown", "--ignore", url).code == 0
        (machine.directory / "ended").unlink()
        proxy.fault(Throttle(100, "request"), method="PUT", key="*/out/model.bin", times=None)
        process = machine.begin(*machine.line(command, "--grace", "2s"))
        eventually(lambda: (machine.directory / "ended").exists())
        process.terminate()
        code, _, err = finished(process)
        assert code in (1, 143), err
        assert f"logs are not all in {url}" in err
        proxy.clear()
        assert machine.stagekit("teardown", "--ignore", url).code == 0


def test_saves_that_there_was_no_time_to_look_at_are_told_and_teardown_says_no_until_they_are_sent(machine: Machine) -> None:
    end = "b'PK\\x05\\x06' + bytes(18)"
    program = f"import pathlib, time; pathlib.Path('out/weights-3.pt').write_bytes({end}); print('saved', flush=True); time.sleep(600)"
    process = machine.begin(*machine.line([sys.executable, "-c", program], "--pattern", "*.pt", "--grace", "0s"))
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    process.terminate()
    code, _, err = finished(process)
    assert code in (137, 143), err
    assert f"the time after SIGTERM was over before all below {machine.out} was looked at, from {machine.out} on; the next start, or" in err
    assert machine.steps() == []
    looked = machine.stagekit("teardown", "--check", *machine.durable)
    assert looked.code == 3
    assert "stagekit run has ended here before everything was sent" in looked.out
    done = machine.stagekit("teardown", *machine.durable)
    assert done.code == 0, done.out
    assert machine.steps() == [3]


def test_a_folder_that_cannot_be_read_is_told_and_is_no_success(machine: Machine) -> None:
    if os.getuid() == 0:  # permissions bind root only without these
        machine.before = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    closed = machine.out / "closed"
    done = machine.stagekit(*machine.line(["bash", "-c", f"{sys.executable} {TOY} out 1; mkdir out/closed; chmod 0 out/closed"]))
    assert done.code == 1, done.err
    told = f"{closed} cannot be read (Permission denied), so whether what lies there is in the bucket cannot be told; "
    lines = [line.partition(told)[2] for line in done.err.splitlines() if told in line]
    assert lines == [f"look at its mode and owner: ls -ld {closed}", "make it readable for this user, then: stagekit teardown"]
    assert machine.steps() == [1]
    judged = machine.stagekit("teardown", *machine.durable)
    assert judged.code == 3
    assert f"CANNOT TELL  {closed}: it cannot be read: Permission denied" in judged.out
    again = machine.stagekit(*machine.line(["true"]))
    assert again.code == 1
    assert told in again.err
    closed.chmod(0o755)
    done = machine.stagekit("teardown", *machine.durable)
    assert done.code == 0, done.out


def test_a_file_that_cannot_be_read_is_named_with_the_checkpoint_that_was_not_sent(machine: Machine) -> None:
    if os.getuid() == 0:
        machine.before = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    script = "for n in 1 2; do mkdir out/checkpoint-$n; echo x > out/checkpoint-$n/data.npz; done; echo x > out/notes.txt; "
    script += "chmod 0 out/checkpoint-2/data.npz out/notes.txt"
    done = machine.stagekit(*machine.line(["bash", "-c", script]))
    assert done.code == 1
    closed = machine.out / "checkpoint-2" / "data.npz"
    assert f"{closed.parent} is not sent and stays local: it holds what cannot be read, {closed} (Permission denied)" in done.err
    assert f"{machine.out}/notes.txt cannot be read (Permission denied)" in done.err
    assert machine.steps() == [1]
    machine.out.chmod(0)
    again = machine.stagekit(*machine.line(["true"]))
    assert again.code == 1
    assert f"{machine.out} cannot be read (Permission denied)" in again.err
    machine.out.chmod(0o755)


def test_a_home_that_cannot_be_written_is_one_sentence_before_the_command_starts(machine: Machine) -> None:
    with small_disk(machine, 16_384) as spool:
        home = spool.parent / "home"
        home.mkdir()
        machine.environ["STAGEKIT_HOME"] = str(home)
        what = f"stagekit: error: stagekit run: {home}, where this machine notes what runs on it, cannot be written"
        with suppress(OSError), (spool.parent / "rest").open("wb", buffering=0) as rest:
            while rest.write(bytes(4096)):
                pass
        full = machine.run("1")
        assert full.code == 1
        assert full.err == f"{what}: the disk is full; free some space, or set STAGEKIT_HOME to a directory on another disk\n"
        subprocess.run(["mount", "-o", "remount,ro", str(spool.parent)], check=True)
        fixed = machine.run("1")
        assert fixed.code == 2
        assert fixed.err == f"{what} (Read-only file system); set STAGEKIT_HOME to a directory that can be\n"
        assert list(home.rglob("*.json")) == []
    assert machine.steps() == []
    assert not machine.out.exists(), "it was not started"


# ------------------------------------------------------------------------------------------------------------------- kill -9


def kill_wrapper(machine: Machine) -> int:
    """``kill -9`` of ``stagekit run`` when step 1 is in the bucket and step 2 was saved and not seen. Returns the trainer's process."""
    go = machine.directory / "go"
    process = machine.running("2", "--hang", "--wait-for", str(go))
    machine.until_step(1)
    os.kill(process.pid, signal.SIGSTOP)
    go.touch()
    eventually(lambda: (machine.out / "train.log").exists())
    (trainer,) = trainers(machine)
    process.kill()
    process.communicate(timeout=60)
    return trainer


def trainers(machine: Machine) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_trainer(path, machine)]


def _is_trainer(path: Path, machine: Machine) -> bool:
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
        return words[1:2] == [TOY.encode()] and (path / "cwd").readlink() == machine.directory
    except OSError:
        return False


def test_after_kill_9_of_stagekit_run_the_command_ends_and_the_next_start_sends_what_was_saved(machine: Machine) -> None:
    trainer = kill_wrapper(machine)
    eventually(lambda: not is_alive(trainer), "the trainer would go on without anyone to see its saves")
    assert machine.steps() == [1]
    again = machine.run("3")
    assert again.code == 0, again.err
    assert "the last stagekit run here was killed before it saw checkpoint-2; sending that now" in again.err
    assert again.out.startswith(f"from 2 of {machine.url} in {machine.out}/checkpoint-2\n")
    assert machine.steps() == [3, 2, 1]
    printed = machine.logs("stdout.log")
    assert [text.splitlines()[0] for text in printed] == [
        f"from 0 of {machine.url} in nothing",
        f"from 2 of {machine.url} in {machine.out}/checkpoint-2",
    ]
    assert list((machine.directory / "home" / "wrapped").iterdir()) == []


def test_a_start_right_after_kill_9_waits_until_the_old_command_has_ended(machine: Machine) -> None:
    go = machine.directory / "go"
    process = machine.running("2", "--hang", "--deaf", "--wait-for", str(go), options=("--grace", "5s"))
    machine.until_step(1)
    process.kill()
    process.wait(timeout=60)
    again = machine.run("2")
    assert again.code == 0, again.err
    assert "the last stagekit run here was killed, and its command is being ended; waiting for that, at most 5 s" in again.err
    assert again.out.startswith("from 1 of")
    assert machine.steps() == [2, 1]
    process.communicate(timeout=60)


def test_what_survives_a_kill_of_all_that_guards_it_is_found_and_ended_by_the_next_start(machine: Machine) -> None:
    script = f"{sys.executable} {TOY} out 1 --hang --deaf; echo after"
    process = machine.begin(*machine.line(["bash", "-c", script], "--grace", "1s"))
    machine.until_step(1)
    (trainer,) = trainers(machine)
    tree = [trainer]
    while tree[-1] != process.pid:
        tree.append(parent_of(tree[-1]))
    for pid in tree[:0:-1]:
        os.kill(pid, signal.SIGSTOP)
    for pid in tree[:0:-1]:
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert is_alive(trainer)
    judged = machine.stagekit("teardown", "--check", *machine.durable)
    assert judged.code == 3
    assert "started lives on: nobody sends what it saves" in judged.out
    again = machine.run("2")
    assert again.code == 0, again.err
    assert not is_alive(trainer)
    assert machine.steps() == [2, 1]
    process.communicate(timeout=60)


def test_after_kill_9_of_stagekit_run_teardown_needs_no_flags_and_sends_what_was_saved(machine: Machine) -> None:
    trainer = kill_wrapper(machine)
    eventually(lambda: not is_alive(trainer))
    looked = machine.stagekit("teardown", "--check", *machine.durable)
    assert looked.code == 3
    assert "stagekit run has ended here before everything was sent; what" in looked.out
    assert f"fix: stagekit teardown --run {machine.url}" in looked.out
    assert machine.steps() == [1]
    done = machine.stagekit("teardown", *machine.durable)
    assert done.code == 0, done.out
    assert machine.steps() == [2, 1]
    assert f"watching  {machine.out}\n" in done.out
    assert machine.logs("stdout.log")[0].endswith("done\n")


def test_teardown_says_no_while_a_command_runs_and_yes_after_it(machine: Machine) -> None:
    process = machine.running("1", "--hang")
    machine.until_step(1)
    done = machine.stagekit("teardown", *machine.durable)
    assert done.code == 3
    assert f"process {process.pid} runs" in done.out
    assert f"stop it: kill {process.pid}" in done.out
    process.terminate()
    assert finished(process)[0] == 143
    done = machine.stagekit("teardown", *machine.durable)
    assert done.code == 0, done.out


def test_a_watched_directory_on_another_disk_has_its_own_spool(machine: Machine) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as volume:
        line = ["run", "--to", machine.url, "--watch", volume, "--no-record", "--", sys.executable, TOY, volume, "2"]
        done = machine.stagekit(*line)
        assert done.code == 0, done.err
        assert (Path(volume) / ".stagekit-spool").is_dir()
        assert not (machine.directory / "home" / "spool").exists()
        judged = machine.stagekit("teardown", *machine.durable)
        assert judged.code == 0, judged.out
        assert f"spool     {volume}/.stagekit-spool" in judged.out


def test_saves_that_find_no_room_in_the_spool_are_pinned_when_others_are_sent(machine: Machine) -> None:
    with small_disk(machine, 300_000) as spool:
        done = machine.run("8", options=("--spool", str(spool)))
        assert done.code == 0, done.err
        assert "is not saved yet, and is tried again: " in done.err
        assert machine.steps() == [8, 7, 6, 5, 4, 3, 2, 1]
        assert machine.stagekit("teardown", *machine.durable).code == 0


def test_a_save_that_finds_no_room_at_all_is_a_failure_and_the_next_start_sends_it(machine: Machine) -> None:
    with small_disk(machine, 30_000) as spool:
        done = machine.run("1", options=("--spool", str(spool)))
        assert done.code == 1
        assert f"{machine.out}/checkpoint-1 is not saved yet, and is tried again: " in done.err
        assert f"1 finished save not pinned and only here, such as {machine.out}/checkpoint-1" in done.err
        looked = machine.stagekit("teardown", *machine.durable)
        assert looked.code == 3
        assert "stagekit run has ended here before everything was sent" in looked.out
    (spool / "entries").mkdir(parents=True)  # on a disk that has room
    done = machine.stagekit("teardown", *machine.durable)
    assert machine.steps() == [1], done.out + done.err
    assert done.code == 0, done.out
    assert "the last stagekit run here ended before all was sent, such as checkpoint-1; sending that now" in done.err


def test_a_second_start_beside_a_living_one_is_refused(machine: Machine) -> None:
    process = machine.running("1", "--hang")
    machine.until_step(1)
    second = machine.run("2")
    assert second.code == 2
    assert f"stagekit run: process {process.pid} runs" in second.err
    assert f"stop it: kill {process.pid}" in second.err
    around = machine.stagekit("run", "--to", f"{machine.url}-2", "--watch", "out/below", "--", "true")
    assert around.code == 2
    assert f"stagekit run: process {process.pid} runs" in around.err
    process.terminate()
    assert finished(process)[0] == 143


# ------------------------------------------------------------------------------------------------------------------- resuming


def test_what_the_run_has_gone_on_without_is_neither_continued_nor_lost(tmp_path: Path, machine: Machine) -> None:
    assert machine.run("5").code == 0
    other = Machine(tmp_path / "other", machine.url)
    done = other.run("2", options=("--resume", "never"))
    assert done.code == 0, done.err
    script = "import toy, pathlib; toy.save(pathlib.Path('out'), 6)"  # by somebody whom nobody watched
    subprocess.run(
        [sys.executable, "-c", script], cwd=machine.directory, env={**os.environ, "PYTHONPATH": str(Path(TOY).parent)}, check=True
    )
    again = machine.run("3")
    assert again.code == 0, again.err
    assert (
        f"{machine.url} has gone on elsewhere without {machine.out}/checkpoint-6 and 3 more, and its newest is step 2: going on"
        in again.err
    )
    assert again.out.startswith(f"from 2 of {machine.url} in ")
    assert (machine.out / "aside-checkpoint-6.abandoned" / "optimizer.pt").exists()
    assert machine.steps()[0] == 3
    assert 6 not in machine.steps()


KILLED_WHILE_SENDING = """
import os, sys
from pathlib import Path
from stagekit.errors import Unreachable
from stagekit.runs import Run
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore
from tests.wrapping import toy
store = FaultStore(DirectoryStore(sys.argv[1]))
store.fail("put", Unreachable("no answer"), times=None)
toy.save(Path("out"), 2)
run = Run(store, on_event=lambda event: None)
run.go_on_with(run.latest())
run.submit("out/checkpoint-2", step=2)
toy.save(Path("out"), 3)  # in its grace, and nobody looked any more
os.kill(os.getpid(), 9)
"""


def test_what_was_saved_after_what_waited_when_all_was_killed_is_gone_on_from(machine: Machine) -> None:
    assert machine.run("1").code == 0
    environ = {**os.environ, "HOME": str(machine.directory), "STAGEKIT_HOME": str(machine.directory / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED_WHILE_SENDING, machine.url]
    assert subprocess.run(command, cwd=machine.directory, env=environ, check=False).returncode == -signal.SIGKILL
    again = machine.run("4")
    assert again.code == 0, again.err
    assert "step 2" in again.err
    assert "gone on elsewhere" not in again.err
    assert again.out.startswith("from 3 of ")
    assert machine.steps() == [4, 3, 2, 1]
    assert not list(machine.out.glob("*.abandoned"))


GOES_ON = """
import pathlib, shutil, time
from tests.wrapping import toy
out = pathlib.Path("out")
for step in range(1, 12):
    toy.save(out, step)
    shutil.rmtree(out / f"checkpoint-{step - 2}", ignore_errors=True)
    while step == 1 and not pathlib.Path("go").exists():
        time.sleep(0.02)
    while len(list(pathlib.Path("home/spool/entries").glob("*/record.json"))) < step - 1:  # until this one is pinned, too
        time.sleep(0.02)
"""


def test_a_machine_whose_run_was_taken_over_keeps_every_save_and_says_so_once(tmp_path: Path, machine: Machine) -> None:
    process = machine.begin(*machine.line([sys.executable, "-c", GOES_ON]))
    machine.until_step(1)
    other = Machine(tmp_path / "other", machine.url)
    assert other.run("2", options=("--resume", "never")).code == 0
    (machine.directory / "go").touch()
    code, _, err = finished(process)
    assert code == 1
    told = [line for line in err.splitlines() if "was taken over by" in line]
    assert len(told) == 2, err
    assert "not in the bucket yet" in told[0]
    assert "10 steps from 2 to 11 are not in" in told[1]
    assert "dropped" not in err
    assert machine.stagekit("teardown", "--check", *machine.durable).code == 3
    verdict = machine.stagekit("teardown", *machine.durable)
    assert verdict.code == 0, verdict.out + verdict.err
    assert machine.steps() == [2, 1, *range(11, 0, -1)], "all of them are in the bucket then, and the other machine's are the newest"


def test_checkpoints_that_another_program_left_where_the_run_is_to_lie_are_not_passed_over(machine: Machine) -> None:
    DirectoryStore(machine.url).put("checkpoint-900/step.txt", b"900")
    refused = machine.run("1")
    assert refused.code == 2
    assert "no run lies there, but checkpoint-900, which the training would neither go on from nor show" in refused.err
    assert f"stagekit cp {machine.url} {machine.out}" in refused.err
    assert machine.run("1", options=("--resume", "never")).code == 0
    assert machine.run("1").code == 0, "it is a run now"


def test_a_torn_file_is_out_of_the_way_at_the_next_start_and_a_save_of_another_training_is_told(machine: Machine) -> None:
    machine.out.mkdir()
    with zipfile.ZipFile(machine.out / "m-2.pt", "w") as whole:
        whole.writestr("data", b"weights" * 100)
    (machine.out / "m-3.pt").write_bytes((machine.out / "m-2.pt").read_bytes()[:-30])
    done = machine.stagekit(*machine.line(["bash", "-c", "ls out; echo $STAGEKIT_RESUME_FILE"], "--pattern", "*.pt"))
    assert done.code == 0, done.err
    assert done.out.split() == ["m-2.pt", "m-3.pt.incomplete", str(machine.out / "m-2.pt")]
    assert "m-3.pt was never finished (it lacks its end); it is called m-3.pt.incomplete now" in done.err
    assert f"going on from {machine.out}/m-2.pt, which lay here before" in done.err
    assert machine.steps() == [2]


def test_a_torn_save_is_no_checkpoint_when_a_shell_hides_that_its_trainer_was_killed(machine: Machine) -> None:
    script = """
import os, pathlib, sys
for step in range(1, 5):
    folder = pathlib.Path("out") / f"checkpoint-{step}"
    folder.mkdir()
    for name in (f"a-{step}.dat", "b.dat", "state.dat"):
        (folder / name).write_bytes(os.urandom(1000))
        if step == 4:
            os.kill(os.getpid(), 9)
    while step == 1 and not pathlib.Path("go").exists():
        pass
"""
    process = machine.begin(*machine.line(["bash", "-c", f"{sys.executable} -c '{script}' | cat"], "--quiet", "0.2"))
    machine.until_step(1)
    (machine.directory / "go").touch()
    code, _, err = finished(process)
    assert code == 1
    assert "checkpoint-4 lacks b.dat, state.dat, which the save before it has; it is no checkpoint" in err
    assert machine.steps() == [3, 2, 1]
    assert machine.stagekit("teardown", *machine.durable).code == 3


def test_a_training_of_another_home_on_this_machine_is_no_leftover_to_be_killed(tmp_path: Path, machine: Machine) -> None:
    process = machine.running("1", "--hang")
    machine.until_step(1)
    other = Machine(tmp_path / "other", machine.url)
    (other.directory / "weights.bin").write_bytes(b"w")
    judged = other.stagekit("teardown", "--run", machine.url, "--watch", str(other.directory), *machine.durable)
    assert judged.code == 3
    assert f"process {process.pid} (" in judged.out
    assert "trains here, with another home or for another user" in judged.out
    assert "lives on without that" not in judged.out
    process.terminate()
    assert finished(process)[0] == 143


def test_must_and_never(tmp_path: Path, machine: Machine) -> None:
    done = machine.run("1", options=("--resume", "must"))
    assert done.code == 1
    assert "has no checkpoint, and --resume must says that there is one" in done.err
    assert "from" not in done.out
    assert machine.run("1").code == 0
    other = Machine(tmp_path / "other", machine.url)
    assert other.run("1", options=("--resume", "never")).out.startswith(f"from 0 of {machine.url} in nothing\n")


def test_a_run_that_cannot_be_read_stops_before_the_command(
    tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    credentials_for(moto_server)
    with FaultProxy(moto_server.endpoint_url) as proxy:
        machine = Machine(
            tmp_path / "machine",
            f"s3://{moto_server.create_bucket()}/run",
            {"AWS_ENDPOINT_URL": proxy.endpoint_url, "AWS_PROFILE": moto_server.name},
        )
        proxy.fault(Status(403), method="GET", times=None)
        done = machine.run("1")
        assert done.code == 1
        assert "from" not in done.out, "it was not started"
        assert not list(machine.out.glob("*"))
        fresh = machine.run("1", options=("--allow-fresh", "--drain", "1s"))
        assert fresh.out.startswith("from 0")
        assert "starting from what is here, as --allow-fresh says, although" in fresh.err
        assert fresh.code == 1, "what could not be sent makes it fail"


def test_a_store_that_takes_no_writes_does_not_hold_the_training_back(
    tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/run"
    with FaultProxy(moto_server.endpoint_url) as proxy:
        machine = Machine(tmp_path / "machine", url, {"AWS_ENDPOINT_URL": proxy.endpoint_url, "AWS_PROFILE": moto_server.name}, options=())
        proxy.fault(Status(500), method="PUT", times=None)
        process = machine.running("1", "--hang", options=("--drain", "1s"))
        eventually(lambda: (machine.out / "train.log").exists(), "it was held back until the retries of five minutes were used up")
        process.terminate()
        code, _, err = finished(process)
        assert code == 143, err
        assert f"how this attempt was started is not noted in {url}: " in err


def test_damaged_checkpoints_stop_it_too(machine: Machine) -> None:
    assert machine.run("1").code == 0
    store = DirectoryStore(machine.url)
    for info in list(store.list("checkpoints/")):
        if info.key.endswith(".bin"):
            store.put(info.key, b"cut")
    machine.lose_the_disk()
    done = machine.run("2")
    assert done.code == 1
    assert "none of them is whole" in done.err
    assert "from" not in done.out


def test_deepspeed_on_another_number_of_ranks_is_refused_before_anything_is_fetched(tmp_path: Path, machine: Machine) -> None:
    program = (
        "import json, pathlib; out = pathlib.Path('out/checkpoint-4'); (out / 'global_step4').mkdir(parents=True)\n"
        "end = b'PK\\x05\\x06' + bytes(18)\n"
        "for rank in range(2):\n"
        "    (out / f'rng_state_{rank}.pth').write_bytes(end)\n"
        "    (out / 'global_step4' / f'zero_pp_rank_{rank}_mp_rank_00_optim_states.pt').write_bytes(end)\n"
        "(out / 'global_step4' / 'mp_rank_00_model_states.pt').write_bytes(end)\n"
        "(out / 'scheduler.pt').write_bytes(end)\n(out / 'latest').write_text('global_step4')\n"
        "(out / 'trainer_state.json').write_text(json.dumps({'global_step': 4}))\n"
    )
    assert machine.stagekit(*machine.line([sys.executable, "-c", program], "--world-size", "2")).code == 0
    assert machine.steps() == [4]
    other = Machine(tmp_path / "other", machine.url)
    for told, options in (
        (["torchrun", "--nproc-per-node=4", "train.py"], ()),
        (["bash", "-c", "deepspeed --num_gpus 4 train.py"], ()),
        (["true"], ("--world-size", "4")),
    ):
        done = other.stagekit(*other.line(told, *options))
        assert done.code == 1
        assert "was saved by 2 ranks in a layout that no other number can load (DeepSpeed's global_step4/" in done.err
        assert "this command starts 4; nothing was fetched" in done.err
        assert not list(other.out.glob("*"))
    unknown = other.stagekit(*other.line(["true"]))
    assert unknown.code == 0
    assert "can be loaded by 2 ranks only" in unknown.err
    assert (other.out / "checkpoint-4" / "latest").read_text() == "global_step4"


def test_other_layouts_come_back_under_their_own_names(tmp_path: Path, machine: Machine) -> None:
    program = "import pathlib; out = pathlib.Path('out/deep/iter_0000012'); out.mkdir(parents=True); (out / 'a.json').write_text('{}')"
    assert machine.stagekit(*machine.line([sys.executable, "-c", program], "--pattern", "iter_*")).code == 0
    other = Machine(tmp_path / "other", machine.url)
    shown = other.stagekit(*other.line(["bash", "-c", "echo $STAGEKIT_RESUME_DIR"], "--pattern", "iter_*"))
    assert shown.out == f"{other.out}/deep/iter_0000012\n", shown.err
    assert machine.steps() == [12]
    assert (other.out / "deep" / "iter_0000012" / "a.json").read_text() == "{}"


def test_a_file_that_was_cut_by_a_kill_is_no_checkpoint_when_its_format_does_not_tell(machine: Machine) -> None:
    program = "import os, pathlib; pathlib.Path('out/weights-3.npz').write_bytes(b'half'); os.kill(os.getpid(), 9)"
    done = machine.stagekit(*machine.line([sys.executable, "-c", program], "--pattern", "*.npz"))
    assert done.code == 137
    assert "weights-3.npz was written just before the command was killed or failed, and nothing tells whether it is whole" in done.err
    assert machine.steps() == []
    assert (machine.out / "weights-3.npz.incomplete").read_bytes() == b"half"
    again = machine.stagekit(*machine.line(["bash", "-c", "echo in $STAGEKIT_RESUME_DIR"], "--pattern", "*.npz"))
    assert again.out == "in\n"
    assert machine.steps() == []


TORN = """
import os, pathlib, sys, time
def save(step, *, whole):
    folder = pathlib.Path(f"out/checkpoint-{step}")
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes([step]) * 1000)
    if whole:
        (folder / "step.txt").write_text(str(step))
    time.sleep(0.05)  # the clock of a file system ticks every few milliseconds
"""


@pytest.mark.parametrize("end", ["raise OSError(28, 'No space left on device')", "os.kill(os.getpid(), 15)"], ids=["failed", "killed"])
def test_a_directory_that_a_failing_command_was_in_the_middle_of_is_no_checkpoint(machine: Machine, end: str) -> None:
    program = f"{TORN}\nsave(1, whole=True)\nsave(2, whole=True)\nsave(3, whole=False)\n{end}"
    done = machine.stagekit(*machine.line([sys.executable, "-c", program]))
    assert done.code == (1 if "raise" in end else 143)
    words = (
        "checkpoint-3 was written just before the command was killed or failed, and nothing tells whether it is whole; it is no checkpoint"
    )
    assert done.err.count(words) == 1, done.err
    assert "lacks" not in done.err
    assert machine.steps() == [2, 1], "what a later save followed is whole"
    assert machine.stagekit("teardown", *machine.durable).code == 3
    assert machine.stagekit(*machine.line(["bash", "-c", "echo in $STAGEKIT_RESUME_DIR"])).out.endswith("/checkpoint-2\n")
    (machine.out / "aside-checkpoint-3.incomplete").rename(machine.out / "checkpoint-3")
    assert machine.stagekit(*machine.line(["true"])).code == 0
    assert machine.steps() == [3, 2, 1], "somebody has vouched for it"


def test_what_a_trainer_below_bash_saves_at_sigterm_is_sent(machine: Machine) -> None:
    program = f"{TORN}\nimport signal\n"
    program += "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), save(50, whole=True), sys.exit(0)))\n"
    program += "print('ready', flush=True)\nwhile True: time.sleep(0.02)"
    (machine.directory / "train.py").write_text(program)
    process = machine.begin(*machine.line(["bash", "-c", f"{sys.executable} train.py; echo done"]))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    code, _, err = finished(process)
    assert code == 143
    assert machine.steps() == [50], err


def test_each_of_several_watched_directories_gets_its_own_back(tmp_path: Path, machine: Machine) -> None:
    def line(machine: Machine, command: str, *directories: str) -> list[str]:
        watched = [part for directory in directories for part in ("--watch", directory)]
        return ["run", "--to", machine.url, *watched, "--no-record", "--", "bash", "-c", command]

    script = "for d in a b; do mkdir -p $d/checkpoint-5; echo '{}' > $d/checkpoint-5/$d.json; done"
    assert machine.stagekit(*line(machine, script, "a", "b")).code == 0
    assert machine.steps() == [5, 5]
    other = Machine(tmp_path / "other", machine.url)
    shown = other.stagekit(*line(other, "find a b -type f | sort; echo $STAGEKIT_RESUME_DIR", "b", "a"))
    assert shown.out == f"a/checkpoint-5/a.json\nb/checkpoint-5/b.json\n{other.directory}/b/checkpoint-5\n", shown.err
    assert f"step 5 of {machine.url}, which was saved in {other.directory}/a, is now in {other.directory}/a/checkpoint-5" in shown.err
    assert machine.steps() == [5, 5], "and neither is sent again"
    third = Machine(tmp_path / "third", machine.url)
    (third.directory / "a").mkdir()
    (third.directory / "a" / "checkpoint-5").write_text("somebody's")
    kept = third.stagekit(*line(third, "cat a/checkpoint-5", "a", "b"))
    assert kept.out == "somebody's", kept.err
    assert f"{third.directory}/a/checkpoint-5 is in the way of step 5 of {machine.url}, so that is not fetched" in kept.err
    fourth = Machine(tmp_path / "fourth", machine.url)
    refused = fourth.stagekit(*line(fourth, "echo began", "a", "c"))
    assert (refused.code, refused.out) == (1, ""), refused.err
    assert "was saved in a directory called b, and of those that are watched none is (a, c)" in refused.err


def test_each_directory_keeps_its_own_last_one_and_a_number_that_is_no_step_is_a_checkpoint_too(machine: Machine) -> None:
    script = "for n in 1 2; do for d in a b; do mkdir -p $d/checkpoint-$n; echo $n > $d/checkpoint-$n/$d.txt; done; done; "
    script += "mkdir b/checkpoint-1796081842796195370; echo 3 > b/checkpoint-1796081842796195370/b.txt"
    line = ["run", "--to", machine.url, "--watch", "a", "--watch", "b", "--no-record", "--keep-last", "1", "--", "bash", "-c", script]
    done = machine.stagekit(*line)
    assert done.code == 0, done.err
    kept = {(one.manifest.identity["saved_in"], one.manifest.identity["saved_as"]) for one in Run(machine.url).checkpoints()}
    assert kept == {("a", "checkpoint-2"), ("b", "checkpoint-1796081842796195370")}


def test_of_many_saves_that_were_there_before_or_come_at_the_end_none_is_dropped(machine: Machine) -> None:
    saves = "for n in {1..7}; do mkdir -p out/checkpoint-$n; echo $n > out/checkpoint-$n/w.bin; done"
    subprocess.run(["bash", "-c", saves], cwd=machine.directory, check=True)
    go = machine.directory / "go"
    more = saves.replace("{1..7}", "{8..14}")
    process = machine.begin(*machine.line(["bash", "-c", f"until [ -e go ]; do sleep 0.02; done; {more}"], "--quiet", "0.1s"))
    eventually(lambda: machine.steps() == [7, 6, 5, 4, 3, 2, 1], "not all that was there before was sent")
    go.touch()
    code, _, err = finished(process)
    assert code == 0, err
    assert machine.steps() == [*range(14, 0, -1)]


def test_an_adapter_on_a_base_model_that_may_be_nowhere_else_is_no_yes(machine: Machine) -> None:
    (machine.directory / "base").mkdir()
    (machine.directory / "base" / "model.safetensors").write_bytes(b"weights")
    script = 'mkdir -p out/checkpoint-1; echo \'{"base_model_name_or_path": "base"}\' > out/checkpoint-1/adapter_config.json'
    assert machine.stagekit(*machine.line(["bash", "-c", script])).code == 0
    done = machine.stagekit("teardown", *machine.durable)
    assert done.code == 4
    assert "it continues the base model base, a directory of this machine, and whether that is anywhere else is not known" in done.out
    assert machine.stagekit("teardown", *machine.durable, "--ignore", "base").code == 0


def test_a_save_without_a_step_is_sent_again_when_its_content_is_another(machine: Machine) -> None:
    def start(program: str) -> None:
        done = machine.stagekit(*machine.line(["bash", "-c", program], "--pattern", "state.json"))
        assert done.code == 0, done.err

    start("echo '[1]' > out/state.json")
    start("true")
    assert machine.steps() == [1]
    (machine.out / "state.json").write_text("[2]\n")  # by somebody whom nobody watched
    start("true")
    assert machine.steps() == [2, 1]


def test_json_is_alone_on_standard_output(machine: Machine) -> None:
    done = machine.run("1", "--exit", "3", options=("--json",))
    assert done.code == 3
    assert "done" in done.err
    assert done.events[-1] == {
        "event": "ended",
        "url": machine.url,
        "attempt": done.events[-1]["attempt"],
        "code": 3,
        "reason": "ended",
        "resumed": None,
        "verified": 1,
        "problem": None,
    }


def test_arguments_that_cannot_be_meant(machine: Machine) -> None:
    for arguments, words in (
        (["run", "--to", machine.url, "--watch", "out"], "Missing argument 'COMMAND...'"),
        (["run", "--to", machine.url, "--", "true"], "Missing option '--watch'"),
        (["run", "--watch", "out", "--", "true"], "Missing option '--to'"),
        (["run", "--to", machine.url, "--watch", "", "--", "true"], "--watch: an empty text names no directory"),
        (["run", "--to", machine.url, "--watch", TOY, "--", "true"], "it is no directory"),
        (["run", "--to", f"{machine.url}@5", "--watch", "out", "--", "true"], f"names one checkpoint of {machine.url}, and a run"),
    ):
        done = machine.stagekit(*arguments)
        assert done.code == 2, done.err
        assert words in done.err
