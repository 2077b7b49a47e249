"""Saves on their way: verified or pinned, in order, whatever the store does meanwhile."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import pytest

import stagekit
from stagekit.errors import CheckpointError, Denied, Fenced, SourceError, StoreError, Unreachable, UploadFailed, UsageError
from stagekit.processes import Process
from stagekit.progress import Message, Progress
from stagekit.runs import Run, catalog, lease, sync
from stagekit.runs.layout import SUPERSEDED, CheckpointName, SupersededRecord
from stagekit.runs.spool import Entry, Spool, pending
from stagekit.runs.sync import SyncSettings, Upload, Uploader
from stagekit.testing.faults import FaultStore

from .conftest import Events, Gate, fill

Make = Callable[..., Run]
ELSEWHERE = Process("other-host", "other-boot", "pid:[1]", 77, "12345")


def save(run: Run, tmp_path: Path, step: int, content: bytes | None = None, **options: object) -> sync.Upload:
    source = fill(tmp_path / f"out-{step}", content or b"weights of %d" % step)
    try:
        return run.submit(source, step=step, **options)  # type: ignore[arg-type]  # handed on as they are
    finally:
        shutil.rmtree(source)


def stuck(run: Run) -> None:
    """Wait until everything that is pending was refused."""
    deadline = time.monotonic() + 20
    while len(run.status().errors) < len(run.status().pending) or run.status().sending is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def die(run: Run) -> None:
    """As dead as a run can be in this process: made with ``drain_s=0``, it leaves what is pending to the next one."""
    with pytest.raises(UploadFailed):
        run.close()
    assert run._uploader is not None
    run._uploader.stop(60)  # close() waits two seconds, which a busy disk may take for one sync


def lose_network_behind_a_commit(store: FaultStore) -> threading.Event:
    """Nothing reaches the store any more once a checkpoint was committed there; then the event is set."""
    gone = threading.Event()

    def lose(_: object) -> None:
        store.fail("*", Unreachable("no network"), times=None)
        gone.set()

    store.act("put", lose, "commits/*", after=True)
    return gone


def steps(store: FaultStore) -> list[int]:
    return [one.step for one in catalog.read_all(store).checkpoints]


def test_making_a_run_and_reading_it_writes_nothing(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    assert store.calls == []
    assert run.latest() is None
    assert run.checkpoints() == []
    assert run.restore(tmp_path / "new") is None
    assert run.status().pending == ()
    run.close()
    assert {call.operation for call in store.calls} == {"children", "list", "get", "head"}
    assert list(tmp_path.iterdir()) == []


def test_files_are_verified_before_the_manifest_and_the_manifest_is_last(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    run = make_run()
    upload = save(run, tmp_path, 1200, epoch=3, metrics={"loss": 0.5})
    assert upload.wait(60)
    run.close()
    puts = [call.key for call in store.calls if call.operation == "put" and call.key.startswith("checkpoints/")]
    [checkpoint] = run.checkpoints()
    folder = f"checkpoints/000000001200-000001-000001-{checkpoint.name.owner}/"
    assert sorted(puts[:2]) == [folder + "files/model.bin", folder + "files/sub/config.json"], "these go at once"
    assert puts[2:] == [folder + "manifest.json"]
    heads = [index for index, call in enumerate(store.calls) if call.operation == "head" and call.key.startswith(folder + "files/")]
    manifest = next(index for index, call in enumerate(store.calls) if call.operation == "put" and call.key.endswith("manifest.json"))
    assert len(heads) == 2
    assert max(heads) < manifest
    looks = [index for index, call in enumerate(store.calls) if (call.operation, call.key) == ("list", "owners/")]
    assert max(heads) < max(index for index in looks if index < manifest), "a fresh look comes right before the commit"
    assert (checkpoint.step, checkpoint.epoch, dict(checkpoint.metrics)) == (1200, 3, {"loss": 0.5})
    assert checkpoint.files[0].sha256 == hashlib.sha256(b"weights of 1200").hexdigest()
    assert checkpoint.manifest.identity["numpy"]
    order = ["checkpoint.pinned", "checkpoint.recorded", "checkpoint.file-sent", "checkpoint.files-sent", "checkpoint.manifest-sent"]
    order += ["checkpoint.verified", "checkpoint.unpinned"]
    seen = [getattr(event, "name", "") for event in events]
    assert [seen.index(name) for name in order] == sorted(seen.index(name) for name in order)
    assert pending(tmp_path / "spool") == []


def test_a_checkpoint_block_hands_over_without_a_copy_and_an_exception_saves_nothing(
    store: FaultStore, make_run: Make, tmp_path: Path
) -> None:
    run = make_run()
    with run.checkpoint(step=1) as directory:
        (directory / "model.bin").write_bytes(b"one")
        inode = (directory / "model.bin").stat().st_ino
        gate = Gate()
        store.act("put", gate, "checkpoints/*")
    assert gate.reached.wait(60)
    [entry] = pending(tmp_path / "spool")
    assert entry.file_path(entry.files[0]).stat().st_ino == inode
    gate.opened.set()
    with pytest.raises(ZeroDivisionError), run.checkpoint(step=2) as directory:
        (directory / "model.bin").write_bytes(b"two")
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="step 3: nothing was written"), run.checkpoint(step=3):
        pass
    run.drain()
    assert steps(store) == [1]
    assert not any((tmp_path / "spool" / "incoming").iterdir())


def test_metrics_that_are_no_numbers_are_refused_before_anything_is_pinned(make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    with pytest.raises(UsageError, match="metric 'loss' is 'low', which is no number"):
        save(run, tmp_path, 1, metrics={"loss": "low"})
    assert pending(tmp_path / "spool") == []


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.5])
def test_steps_that_are_none_are_refused(make_run: Make, tmp_path: Path, step: object) -> None:
    with pytest.raises(UsageError, match="is no step"):
        make_run().submit(fill(tmp_path / "out"), step=step)  # type: ignore[arg-type]  # that is the test


def test_what_is_passing_heals_by_itself(store: FaultStore, make_run: Make, events: Events, tmp_path: Path) -> None:
    store.fail("put", Unreachable("no answer"), "*/files/model.bin", times=3)
    store.fail("head", Unreachable("no answer"), "*/manifest.json")
    run = make_run()
    upload = save(run, tmp_path, 1)
    assert upload.wait(60)
    run.drain()
    assert steps(store) == [1]
    told = events.texts("warning")
    assert len(told) == 4
    assert all("step 1 is not in the bucket yet: no answer. It is tried again in" in text for text in told)
    assert run.status().synced


def test_an_answer_that_got_lost_is_no_conflict(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    store.fail("put", Unreachable("the answer got lost"), "*/manifest.json", after=True)
    run = make_run()
    save(run, tmp_path, 1)
    run.close()
    assert steps(store) == [1]


def test_what_is_refused_is_not_hammered_raised_at_the_next_save_and_tried_with_it(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    store.fail("put", Denied("uploading: the key may not write here"), "*/files/*", times=1)
    run = make_run()
    first = save(run, tmp_path, 1)
    stuck(run)
    run.drain()
    assert first.state == "verified", "a drain tries again what was refused"

    store.fail("put", Denied("uploading: the key may not write here"), "*/files/*", times=None)
    save(run, tmp_path, 2)
    stuck(run)
    before = len(store.calls)
    with pytest.raises(UploadFailed, match=r"step 2 is not in memory://.* yet, its local copy is kept: .* may not write here"):
        save(run, tmp_path, 3)
    stuck(run)
    assert len([call for call in store.calls[before:] if call.operation == "put"]) <= 4, "one try for each save that is pending"
    assert [entry.step for entry in pending(tmp_path / "spool")] == [2, 3]
    assert run.status().errors[0] == (2, "uploading: the key may not write here")
    with pytest.raises(UploadFailed, match=r"steps 2, 3 are not in .*copies are kept in .*spool.*stagekit teardown.*may not write"):
        run.close()
    assert steps(store) == [1]
    # The key was mended; the next start on this disk finishes it.
    store.clear()
    after = make_run()
    after.drain()
    assert steps(store) == [3, 2, 1]
    assert any("ended before steps 2, 3 were in" in text for text in events.texts("warning"))


def test_restoring_the_newest_sends_first_what_the_last_process_here_left(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    store.fail("put", Denied("uploading: the key may not write here"), "*/files/*", times=None)
    run = make_run()
    save(run, tmp_path, 1)
    stuck(run)
    with pytest.raises(UploadFailed):
        run.close()
    store.clear()
    with pytest.raises(CheckpointError):
        make_run().restore(tmp_path / "elsewhere", 7)
    assert steps(store) == [], "only the newest may be among them"
    found = make_run().restore(tmp_path / "restored")
    assert found is not None
    assert found.step == 1
    assert any("ended before step 1 was in" in text for text in events.texts("warning"))


@pytest.mark.usefixtures("no_reflinks")
def test_a_file_that_was_rewritten_in_place_is_told_never_committed_and_made_up_for_by_the_next(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    run = make_run()
    gate = Gate()
    store.act("put", gate, "run.json")
    source = fill(tmp_path / "out", os.urandom(2 * 2**20))
    run.submit(source, step=1)
    assert gate.reached.wait(60)
    second = run.submit(source, step=2)
    with (source / "model.bin").open("r+b") as file:
        file.write(b"rewritten")
    third = run.submit(source, step=3)
    gate.opened.set()
    assert third.wait(60)
    second.wait(60)
    if second.state == "unsaved":
        assert isinstance(second.error, SourceError)
        assert any("was rewritten in place before it had been sent, so this step is lost" in text for text in events.texts("error"))
    assert 3 in steps(store)
    for checkpoint in run.checkpoints():
        for record in checkpoint.files:
            assert hashlib.sha256(bytes(store.get(record.key(checkpoint.name)))).hexdigest() == record.sha256
    run.close()  # a newer step is there, so nothing is missing


def test_a_loss_that_no_newer_step_made_up_for_is_raised_at_close(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    gate = Gate()
    store.act("put", gate, "run.json")
    save(run, tmp_path, 1)
    assert gate.reached.wait(60)
    [entry] = pending(tmp_path / "spool")
    with entry.file_path(entry.files[0]).open("ab") as file:
        file.write(b"x")
    gate.opened.set()
    with pytest.raises(UploadFailed, match="rewritten in place"):
        run.close()
    assert steps(store) == []


def test_a_change_while_the_file_is_sent_is_noticed(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    pinned: list[Path] = []

    def rewrite(_call: object) -> None:
        with pinned[0].open("r+b") as file:
            file.write(b"x")

    store.act("put_part", rewrite, "*/model.bin", skip=1)
    gate = Gate()
    store.act("put", gate, "run.json")
    upload = save(run, tmp_path, 1, os.urandom(40 * 2**20))
    assert gate.reached.wait(60)
    [entry] = pending(tmp_path / "spool")
    pinned.append(entry.file_path(entry.files[0]))
    gate.opened.set()
    upload.wait(60)
    assert upload.state == "unsaved"
    assert steps(store) == []
    assert not [info for info in store.list("checkpoints/") if info.key.endswith("model.bin")], "the object never became visible"


def test_coalescing_drops_intermediate_saves_only_and_says_which(store: FaultStore, make_run: Make, events: Events, tmp_path: Path) -> None:
    run = make_run(keep_every=100, keep_best=("loss", "min", 1))
    gate = Gate()
    store.act("put", gate, "run.json")
    uploads = {}
    losses = {1: 9.0, 2: 8.0, 100: 7.0, 101: 0.1, 102: 5.0, 103: float("nan"), 104: 4.0, 105: 3.0}
    for step, loss in losses.items():
        uploads[step] = save(run, tmp_path, step, metrics={"loss": loss}, final=step == 104)
        assert gate.reached.wait(60)
    assert [step for step, upload in uploads.items() if upload.state == "superseded"] == [2, 102, 103]
    assert run.status().superseded == (2, 102, 103)
    assert uploads[1].state == "sending", "what is on its way goes on"
    gate.opened.set()
    run.close()
    assert steps(store) == [105, 101, 100], "and retention removed what only the backlog had to keep"
    told = [text for text in events.texts("warning") if "more than 4 saves wait to be sent" in text]
    assert [text.split("step ")[1].split(" ")[0] for text in told] == ["2", "102", "103"]


def test_what_was_dropped_leaves_a_record_with_its_hashes(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    gate = Gate()
    store.act("put", gate, "run.json")
    for step in range(1, 7):
        save(run, tmp_path, step)
        assert gate.reached.wait(60)
    gate.opened.set()
    run.close()
    records = [SupersededRecord.from_bytes(bytes(store.get(info.key)), source=info.key) for info in store.list(SUPERSEDED)]
    assert [record.step for record in records] == [2, 3]
    assert records[0].reason == "dropped before it was sent, since newer saves were waiting"
    assert records[0].files[0] == ("model.bin", 12, hashlib.sha256(b"weights of 2").hexdigest())
    assert steps(store) == [6, 5, 4, 1]
    assert pending(tmp_path / "spool") == []


def test_records_of_what_was_dropped_do_not_keep_checkpoints_waiting(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    gate = Gate()
    store.act("put", gate, "*/files/*", times=1)
    run = make_run()
    for step in range(1, 41):
        save(run, tmp_path, step)
    gate.opened.set()
    run.drain()
    records = [
        call.key.startswith(SUPERSEDED) for call in store.calls if call.operation == "put" and call.key.startswith((SUPERSEDED, "commits/"))
    ]
    commits = [place for place, is_record in enumerate(records) if not is_record]
    assert len(records) == 40
    assert len(commits) >= 4
    assert all(after - before <= 10 for before, after in pairwise(commits)), "a few records in between, not all"


def test_saves_from_the_middle_of_an_epoch_give_way_before_those_at_its_end(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    run = make_run()
    gate = Gate()
    store.act("put", gate, "run.json")
    for step in range(1, 12):
        with run._checkpoint(step, step // 3, None, False, passing=step % 3 != 0) as directory:
            (directory / "model.bin").write_bytes(b"%d" % step)
        assert gate.reached.wait(60)
    assert run.status().superseded == (2, 4, 5, 7, 8, 10), "and not one of 3, 6, 9, while any of these was there"
    gate.opened.set()
    run.close()
    assert steps(store) == [11, 9, 6, 3, 1]
    commits = [int(call.key.split("/")[1][:12]) for call in store.calls if call.operation == "put" and call.key.endswith("manifest.json")]
    assert commits == [1, 3, 6, 9, 11], "an epoch's end is sent before what lies inside one"


def test_what_a_checkpoint_costs_in_requests(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    for step in (1, 2):
        store.calls.clear()
        with run.checkpoint(step=step) as directory:
            for number in range(6):
                (directory / f"{number}.bin").write_bytes(b"%d" % step)
        run.drain()
    told = Counter(call.operation for call in store.calls)
    assert told == {"put": 6 + 2, "head": 6 + 1, "list": 1, "get": 1}, "docs/checkpoints.md says 2 for each file and 5 more"


def test_small_files_are_sent_at_the_same_time(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    together = threading.Barrier(6)
    store.act("put", lambda _: together.wait(20), "*/files/*", times=6)
    run = make_run()
    with run.checkpoint(step=1) as directory:
        for number in range(6):
            (directory / f"{number}.bin").write_bytes(b"x")
    run.close()
    assert steps(store) == [1], "none of the six was waited for by another"


def test_progress_says_what_a_crash_would_cost(store: FaultStore, make_run: Make, events: Events, tmp_path: Path) -> None:
    now = [1000.0]
    run = make_run(clock=lambda: now[0])
    save(run, tmp_path, 1)
    run.drain()
    now[0] += 420.0
    save(run, tmp_path, 2)
    run.close()
    notes = [event.note for event in events if isinstance(event, Progress) and event.task == "sending step 2" and event.note]
    assert set(notes) == {"a crash now loses 7 min"}


def test_up_to_four_pending_saves_are_never_dropped(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    gate = Gate()
    store.act("put", gate, "run.json")
    for step in range(1, 5):
        save(run, tmp_path, step)
    gate.opened.set()
    run.close()
    assert steps(store) == [4, 3, 2, 1]


def test_the_disk_budget_drops_too_and_says_when_it_cannot_be_kept(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    run = make_run(disk="5kB")
    gate = Gate()
    store.act("put", gate, "run.json")
    for step in range(1, 4):
        save(run, tmp_path, step, bytes(2000))
        assert gate.reached.wait(60)
    save(run, tmp_path, 4, bytes(9000))
    assert run.status().superseded == (2, 3)
    assert any("over the budget of 5.00 kB; all of them are to be kept" in text for text in events.texts("warning"))
    gate.opened.set()
    run.close()
    assert steps(store) == [4, 1]


def test_waiting_instead_of_dropping(store: FaultStore, make_run: Make, events: Events, tmp_path: Path) -> None:
    run = make_run(backlog="wait")
    gate = Gate()
    store.act("put", gate, "run.json")
    for step in range(1, 5):
        save(run, tmp_path, step)
    blocked = threading.Thread(target=save, args=(run, tmp_path, 5))
    blocked.start()
    assert gate.reached.wait(60)
    while not any("waiting for the network: 5 saves are pending" in text for text in events.texts()):
        assert blocked.is_alive()
    gate.opened.set()
    blocked.join(60)
    run.close()
    assert steps(store) == [5, 4, 3, 2, 1]


def test_a_store_that_refuses_does_not_block_a_waiting_save_for_ever(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    store.fail("put", Denied("no"), "*/files/*", times=None)
    run = make_run(backlog="wait")
    with pytest.raises(UploadFailed, match="its local copy is kept: no"):
        for step in range(1, 7):
            save(run, tmp_path, step)


def test_a_zombie_is_fenced_at_its_next_commit_and_keeps_its_local_data(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    zombie = make_run()
    assert save(zombie, tmp_path, 1).wait(20)
    lease.take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 0.0)
    late = save(zombie, tmp_path, 2)
    assert not late.wait(0.5)
    with pytest.raises(Fenced, match="taken over by process 77 on other-host"):
        save(zombie, tmp_path, 3)
    with pytest.raises(Fenced):
        save(zombie, tmp_path, 4)
    with pytest.raises(UploadFailed, match=r"steps 2, 3, 4 are not in .*Reason: .*taken over by process 77 on other-host"):
        zombie.close()
    assert steps(store) == [1]
    assert [entry.step for entry in pending(tmp_path / "spool")] == [2, 3, 4]
    assert not [info.key for info in store.list("owners/") if info.key.endswith(".closed")]


def test_a_zombie_drops_nothing_however_long_it_saves_unless_its_disk_is_bounded(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    zombie = make_run(disk="10kB")
    assert save(zombie, tmp_path, 1).wait(20)
    lease.take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 0.0)
    late = save(zombie, tmp_path, 2)
    while not isinstance(late.error, Fenced):
        late.wait(0.01)
    for step in range(3, 13):
        with suppress(Fenced):
            save(zombie, tmp_path, step)
    assert zombie.status().superseded == ()
    for step in (13, 14):
        with suppress(Fenced):
            save(zombie, tmp_path, step, bytes(4995))
    assert zombie.status().superseded == tuple(range(2, 13)), "as many as the disk asks for"
    assert not [text for text in events.texts("warning") if "wait to be sent" in text]
    assert [text for text in events.texts("warning") if "pending saves hold more than 10.0 kB" in text]
    with pytest.raises(UploadFailed, match=r"steps 13, 14 are not in .*Reason: .*taken over by process 77 on other-host"):
        zombie.close()


def test_the_second_machine_is_told_and_newest_means_its_generation(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    lease.take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 0.0)
    run = make_run()
    save(run, tmp_path, 1)
    run.close()
    assert any(
        "was last written by process 77 on other-host (generation 1), which did not say that it has finished" in text
        for text in events.texts("warning")
    )
    assert catalog.attempts(store)[0].generation == 2


def test_a_backlog_is_no_reason_to_take_a_run_from_another_machine(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    store.fail("put", Unreachable("no network"), "*/files/*", times=None)
    first = make_run(drain_s=0)
    save(first, tmp_path, 1)
    with pytest.raises(UploadFailed):
        first.drain(0.2)
    die(first)
    store.clear()
    lease.take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 0.0)
    second = make_run()
    with pytest.raises(UploadFailed, match=r"since then process 77 on other-host \(generation 2\) writes to .*Its local copy is kept"):
        second.drain()
    assert lease.look(store).newest == (2, "bbbbbbbb")
    # A training that starts here on purpose takes the run over, and then finishes the old save, too: under its old generation.
    save(second, tmp_path, 5)
    second.drain()
    assert [(one.generation, one.step) for one in catalog.attempts(store)] == [(3, 5), (1, 1)]


def be_replaced(make_run: Make, tmp_path: Path, steps: Iterable[int]) -> None:
    """A process that saved step 1, kept ``steps`` since another machine had trained to step 9 and ended, and died."""
    replaced = make_run()
    save(replaced, tmp_path, 1)
    replaced.drain()
    other = make_run(spool_dir=tmp_path / "other-machine")
    save(other, tmp_path, 9)
    other.close()
    for step in steps:
        with suppress(Fenced):
            save(replaced, tmp_path, step)
    die(replaced)


def test_what_a_replaced_machine_left_is_kept_beside_what_was_trained_since(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    be_replaced(make_run, tmp_path, (10, 11))  # more steps than the other machine has, and still not what training goes on from
    later = make_run()
    later.drain()
    newest = later.latest()
    assert newest is not None
    assert newest.step == 9
    assert [(one.generation, one.step) for one in catalog.attempts(store)] == [(2, 9), (1, 11), (1, 10), (1, 1)]
    assert pending(tmp_path / "spool") == []
    told = [text for text in events.texts("warning") if "has gone on to step 9 without" in text]
    assert [text.split()[1] for text in told] == ["11"], "10 had its place when it was refused"
    save(later, tmp_path, 12)
    later.drain()
    assert catalog.attempts(store)[0].step == 12


def test_what_was_moved_to_another_disk_and_back_is_what_was_handed_over(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    leave_two_saves(store, make_run, tmp_path)
    shutil.copytree(tmp_path / "spool", tmp_path / "moved")
    shutil.rmtree(tmp_path / "spool")
    (tmp_path / "moved").rename(tmp_path / "spool")
    make_run().drain()
    assert steps(store) == [2, 1]


@pytest.mark.parametrize("harm", ["touched", "cut short", "removed"])
def test_what_is_left_of_a_changed_save_of_a_dead_process_stays_until_a_later_one_is_safe(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path, harm: str
) -> None:
    leave_two_saves(store, make_run, tmp_path)
    second = max(pending(tmp_path / "spool"), key=lambda entry: entry.step)
    file = next(one for one in second.files if one.path == "model.bin")
    path = second.file_path(file)
    {"touched": path.touch, "cut short": lambda: os.truncate(path, 1), "removed": path.unlink}[harm]()
    for _ in range(2):  # the next start tells it again
        run = make_run()
        with pytest.raises(UploadFailed):
            run.drain()
        die(run)
        assert steps(store) == [1]
        assert [entry.step for entry in pending(tmp_path / "spool")] == [2]
        assert f"kept in {second.directory}" in events.texts("error")[-1]
    later = make_run()
    save(later, tmp_path, 3)
    with suppress(UploadFailed):
        later.drain()
    assert steps(store) == [3, 1]
    assert pending(tmp_path / "spool") == []


@pytest.mark.parametrize("looked", ["here before", "by a look", "not at all"])
def test_what_goes_on_without_a_restore_and_dies_before_the_bucket_answers_continues_what_it_knew(
    store: FaultStore, make_run: Make, tmp_path: Path, looked: str
) -> None:
    spool = {"here before": "spool", "by a look": "b", "not at all": "c"}[looked]
    first = make_run()
    save(first, tmp_path, 5)
    first.close()
    second = make_run(spool_dir=tmp_path / spool, drain_s=0)
    if looked == "by a look":
        assert second.latest() is not None
    store.fail("put", Unreachable("no network"), times=None)
    for step in (6, 7):  # from a directory of its own
        save(second, tmp_path, step)
    die(second)
    store.clear()
    third = make_run(spool_dir=tmp_path / spool)
    third.drain()
    newest = third.latest()
    assert newest is not None
    assert newest.step == (5 if looked == "not at all" else 7)


def test_what_another_line_had_left_is_not_newer_than_what_is_trained_here_now(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    replaced = make_run()
    save(replaced, tmp_path, 1)
    replaced.drain()
    lease.take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 0.0)  # which goes on training
    for step in (16, 17):
        with suppress(Fenced):
            save(replaced, tmp_path, step)
    die(replaced)
    again = make_run()
    again.restore(tmp_path / "back")
    assert save(again, tmp_path, 2).wait(60), "it takes the run over, from step 1 on"
    again.drain()
    assert [(one.generation, one.step) for one in catalog.attempts(store)] == [(3, 2), (1, 17), (1, 16), (1, 1)]


def test_what_was_kept_for_the_bucket_is_neither_dropped_at_the_next_start_nor_pruned_as_steps_of_the_run(
    store: FaultStore, make_run: Make, tmp_path: Path
) -> None:
    be_replaced(make_run, tmp_path, range(10, 20))
    later = make_run(keep_last=1)
    gate = Gate()
    store.act("put", gate, "*/files/*")
    upload = save(later, tmp_path, 30)  # ten are waiting already
    assert gate.reached.wait(60)
    gate.opened.set()
    assert upload.wait(60)
    later.drain()
    assert later.status().superseded == ()
    assert [(one.generation, one.step) for one in catalog.attempts(store)] == [(3, 30), (1, 19)], "the newest of each"
    assert pending(tmp_path / "spool") == []
    save(later, tmp_path, 31)
    later.close()
    assert [one.step for one in catalog.attempts(store)] == [31, 19]
    stagekit.prune(store, keep_last=1)
    assert [one.step for one in catalog.attempts(store)] == [31]


def leave_two_saves(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    """A process that saved steps 1 and 2 without a network, and died."""
    store.fail("put", Unreachable("no network"), times=None)
    first = make_run(drain_s=0)
    for step in (1, 2):
        save(first, tmp_path, step)
    die(first)
    store.clear()


def test_what_a_process_left_stays_in_order_when_the_next_one_is_killed_between_its_saves(
    store: FaultStore, make_run: Make, tmp_path: Path
) -> None:
    leave_two_saves(store, make_run, tmp_path)
    gone = lose_network_behind_a_commit(store)
    second = make_run(drain_s=0)
    with pytest.raises(UploadFailed):
        second.drain(0)
    assert gone.wait(60)
    die(second)
    store.clear()
    third = make_run()
    third.drain()
    assert steps(store) == [2, 1], "step 1 came under the second process's generation, and step 2 was trained behind it"


def test_it_stays_in_order_also_when_one_is_killed_between_their_names(
    store: FaultStore, make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_two_saves(store, make_run, tmp_path)
    keep, reached = Spool.save, threading.Event()

    def killed(spool: Spool, entry: Entry, **options: bool) -> None:
        if entry.step == 2 and entry.name is not None:
            store.fail("*", Unreachable("killed"), times=None)
            reached.set()
            raise Unreachable("killed")
        keep(spool, entry, **options)

    with monkeypatch.context() as patched:  # step 1 has its name, step 2 has none
        patched.setattr(Spool, "save", killed)
        second = make_run(drain_s=0)
        with pytest.raises(UploadFailed):
            second.drain(0)
        assert reached.wait(60)
        die(second)
    store.clear()
    assert steps(store) == []
    gone = lose_network_behind_a_commit(store)
    third = make_run(drain_s=0)
    with pytest.raises(UploadFailed):
        third.drain(0)
    assert gone.wait(60)
    die(third)
    store.clear()
    fourth = make_run()
    fourth.drain()
    assert steps(store) == [2, 1], "step 2 was trained behind step 1"


def test_the_first_of_what_a_dead_process_left_is_not_sent_before_the_others_are_known(
    store: FaultStore, make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_two_saves(store, make_run, tmp_path)
    began, add = threading.Event(), Uploader.add
    store.act("*", lambda _: began.set(), times=None)

    def slowly(uploader: Uploader, entry: Entry, *, adopted: bool = False) -> Upload:
        upload = add(uploader, entry, adopted=adopted)
        assert not began.wait(0.5), "its thread did not wait for the other one"
        return upload

    monkeypatch.setattr(Uploader, "add", slowly)
    second = make_run()
    second.drain()
    assert steps(store) == [2, 1]


def test_an_older_save_of_a_dead_process_does_not_pass_over_its_own_later_one(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    first = make_run()
    save(first, tmp_path, 3)
    first.drain()
    entry = first._entry(first._uploader, 2, None, None, False)  # type: ignore[arg-type]  # killed before this one was sent
    first._spool.pin(fill(tmp_path / "out-2"), entry)  # type: ignore[union-attr]
    first._uploader.stop(2)  # type: ignore[union-attr]
    first._spool.close()  # type: ignore[union-attr]
    second = make_run()
    second.drain()
    assert [one.step for one in catalog.attempts(store)] == [3, 2]


def test_an_older_save_does_not_pass_over_a_later_one_that_its_process_had_begun_to_send(
    store: FaultStore, make_run: Make, tmp_path: Path
) -> None:
    first = make_run(drain_s=0)
    save(first, tmp_path, 1)
    first.drain(20)
    entry = first._entry(first._uploader, 2, None, None, False)  # type: ignore[arg-type]  # it waits while the newest goes first
    first._spool.pin(fill(tmp_path / "out-2"), entry)  # type: ignore[union-attr]
    store.fail("put", Unreachable("no network"), "*/manifest.json", times=None)
    save(first, tmp_path, 3)
    deadline = time.monotonic() + 20
    while [left.step for left in pending(tmp_path / "spool") if left.name is not None] != [3]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    die(first)
    store.clear()
    second = make_run()
    second.drain()
    assert [one.step for one in catalog.attempts(store)] == [3, 2, 1]


def test_a_restart_sends_only_what_is_missing_and_aborts_its_own_uploads(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    store.fail("put", Unreachable("no network"), "*/files/sub/config.json", times=None)
    first = make_run(drain_s=0)
    save(first, tmp_path, 1)
    deadline = time.monotonic() + 20
    while [file.sha256 is not None for left in pending(tmp_path / "spool") for file in left.files if file.path == "model.bin"] != [True]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    die(first)
    [entry] = pending(tmp_path / "spool")
    assert entry.name is not None
    aborted: list[str] = []
    others = CheckpointName(1, 1, 1, "bbbbbbbb")
    with ExitStack() as stack:
        stack.enter_context(suppress(StoreError))  # what an aborted upload says when it is completed
        for name in (others, entry.name):
            stack.enter_context(store.inner.multipart(name.file_key("x"), part_size=5))
        store.clear()
        store.act("abort_upload", lambda call: aborted.append(call.key), times=None)
        second = make_run()
        second.drain()
        assert aborted == [entry.name.file_key("x")]
        puts = [call.key for call in store.calls if call.operation == "put" and call.key.startswith("checkpoints/")]
        assert puts == [entry.name.file_key("sub/config.json"), entry.name.manifest_key]
    assert steps(store)[-1:] == [1]


def test_a_large_file_that_an_earlier_checkpoint_has_is_referred_to(
    store: FaultStore, make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "LARGE", 2**20)  # the rule is the same for 64 MiB, the test is quicker
    base = os.urandom(2 * 2**20)
    changed = bytearray(base)
    changed[12_345] ^= 1  # between the pieces that are sampled
    run = make_run()
    save(run, tmp_path, 1, base)
    run.drain()
    for step, content in ((2, base), (3, bytes(changed)), (4, base)):
        store.calls.clear()
        save(run, tmp_path, step, content)
        run.drain()
        sent = [call.key for call in store.calls if call.operation == "put" and call.key.endswith("model.bin")]
        assert len(sent) == (1 if step == 3 else 0)
    run.close()
    # A new process knows it from the manifests alone.
    again = make_run()
    save(again, tmp_path, 5, base)
    again.close()
    newest, *_, oldest = again.checkpoints()
    assert newest.files[0].object == oldest.name.file_key("model.bin")
    assert newest.files[1].object is None
    restored = again.restore(tmp_path / "restored")
    assert restored is not None
    assert (tmp_path / "restored" / "model.bin").read_bytes() == base


def test_a_reference_whose_object_went_is_sent_after_all(
    store: FaultStore, make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "LARGE", 2**20)
    base = os.urandom(2 * 2**20)
    run = make_run()
    save(run, tmp_path, 1, base)
    run.drain()
    store.delete(run.checkpoints()[0].name.file_key("model.bin"))
    save(run, tmp_path, 2, base)
    run.drain()
    newest = run.checkpoints()[0]
    assert newest.files[0].object is None
    catalog.confirm(store, newest)


def test_several_ranks_one_commit_with_everybodys_files(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    ranks = [make_run(rank=rank, world_size=3, spool_dir=tmp_path / f"spool-{rank}") for rank in range(3)]
    with pytest.raises(UsageError, match=r"rank 1 of 3 saves to .*only rank 0 commits"):
        ranks[1].submit(fill(tmp_path / "no"), step=1)
    session = ranks[0].session()
    for run in ranks[1:]:
        run.join(session)
    for rank, run in enumerate(ranks):
        with run.checkpoint(step=7) as directory:
            (directory / f"rng-{rank}.pt").write_bytes(b"%d" % rank)
    for run in reversed(ranks):
        run.close()
    [checkpoint] = ranks[0].checkpoints()
    assert [record.path for record in checkpoint.files] == ["rng-0.pt", "rng-1.pt", "rng-2.pt"]
    puts = [call.key for call in store.calls if call.operation == "put" and "/files/" in call.key]
    assert len(puts) == len(set(puts)) == 3
    assert checkpoint.manifest.identity["world_size"] == 3


def test_a_rank_that_does_not_deliver_leaves_the_step_uncommitted_and_named(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    ranks = [make_run(rank=rank, world_size=3, spool_dir=tmp_path / f"spool-{rank}") for rank in range(3)]
    session = ranks[0].session()
    ranks[1].join(session)
    for rank in (1, 0):
        with ranks[rank].checkpoint(step=7) as directory:
            (directory / f"rng-{rank}.pt").write_bytes(b"%d" % rank)
        if rank == 1:
            ranks[1].drain()
    with pytest.raises(UploadFailed, match=r"step 7 stays uncommitted: rank 2 of 3 did not deliver within 0\.2 s"):
        ranks[0].drain(20)
    assert steps(store) == []
    assert catalog.read_all(store).uncommitted[0].step == 7
    ranks[2].join(session)
    with ranks[2].checkpoint(step=7) as directory:
        (directory / "rng-2.pt").write_bytes(b"2")
    ranks[2].drain()
    ranks[0].drain()
    assert steps(store) == [7]


def test_a_rank_that_leaves_out_a_step_does_not_hold_up_the_later_ones(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    settings = SyncSettings(retry_after_s=lambda _: 0.01, parts_timeout_s=600, sleep=lambda _: None)
    ranks = [make_run(rank=rank, world_size=2, spool_dir=tmp_path / f"spool-{rank}", settings=settings) for rank in range(2)]
    ranks[1].join(ranks[0].session())
    for step in (1, 2, 3):
        for rank in (1, 0):
            if (rank, step) != (1, 2):
                with ranks[rank].checkpoint(step=step) as directory:
                    (directory / f"rng-{rank}.pt").write_bytes(b"%d" % rank)
                if rank == 1:
                    ranks[1].drain()
    with suppress(UploadFailed):  # of which step 2 is told, unless a later one has made up for it already
        ranks[0].drain()
    ranks[0]._begin()[1].raise_sticky()  # it is told, and no reason to end a training
    ranks[0].drain()
    assert steps(store) == [3, 1]
    assert any("step 2 stays uncommitted: rank 1 of 2 did not deliver it, and has delivered a later one" in text for text in events.texts())
    assert pending(tmp_path / "spool-0") == []


def test_a_rank_that_delivers_two_steps_between_two_looks_has_left_out_none(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    settings = SyncSettings(retry_after_s=lambda _: 0.01, parts_timeout_s=600, sleep=lambda _: None)
    ranks = [make_run(rank=rank, world_size=2, spool_dir=tmp_path / f"spool-{rank}", settings=settings) for rank in range(2)]
    ranks[1].join(ranks[0].session())

    def save_both(rank: int) -> None:
        for step in (1, 2):
            with ranks[rank].checkpoint(step=step) as directory:
                (directory / f"rng-{rank}.pt").write_bytes(b"%d" % rank)

    def deliver(_call: object) -> None:
        save_both(1)
        ranks[1].drain()

    store.act("head", deliver, "*/000000000002-*/parts/*")  # rank 0 has seen that step 1 is not there, and asks for step 2
    save_both(0)
    ranks[0].drain()
    assert steps(store) == [2, 1]


@pytest.mark.parametrize("delivered", [True, False])
def test_what_a_training_of_several_ranks_left_is_committed_or_told_at_once(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path, delivered: bool
) -> None:
    settings = SyncSettings(retry_after_s=lambda _: 0.01, parts_timeout_s=600, sleep=lambda _: None)
    ranks = [make_run(rank=rank, world_size=2, spool_dir=tmp_path / f"spool-{rank}", settings=settings, drain_s=0) for rank in range(2)]
    ranks[1].join(ranks[0].session())
    store.fail("put", Unreachable("no network"), "*/files/rng-0.pt", times=None)
    for rank in (1, 0) if delivered else (0,):
        with ranks[rank].checkpoint(step=1) as directory:
            (directory / f"rng-{rank}.pt").write_bytes(b"%d" % rank)
        if rank == 1:
            ranks[1].drain()
    die(ranks[0])
    ranks[1].close()
    store.clear()
    alone = make_run(spool_dir=tmp_path / "spool-0", settings=settings)
    if delivered:
        alone.drain()
        assert steps(store) == [1]
        return
    with pytest.raises(UploadFailed, match="step 1 stays uncommitted: rank 1 of 2 never delivered it"):
        alone.drain()
    assert [entry.step for entry in pending(tmp_path / "spool-0")] == [1]
    save(alone, tmp_path, 0)  # of a training that began anew
    with pytest.raises(UploadFailed, match=r"It is committed once that rank's part is there \(`stagekit teardown` on its machine"):
        alone.drain()
    assert [entry.step for entry in pending(tmp_path / "spool-0")] == [1], "nothing that is later is safe"
    save(alone, tmp_path, 2)
    with suppress(UploadFailed):
        alone.drain()
    alone.drain()
    assert steps(store) == [2, 0]
    assert pending(tmp_path / "spool-0") == []


def test_a_manifest_that_is_gone_at_once_is_a_reason_to_look_who_owns_the_run(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    first, second = make_run(), make_run(store.inner, spool_dir=tmp_path / "other", keep_last=1)

    def take_over(call: object) -> None:
        save(second, tmp_path, 2)
        second.drain()
        assert [one.step for one in second.checkpoints()] == [2], "which has removed the one that was just committed"

    store.act("head", take_over, "checkpoints/000000000001-*/manifest.json")
    save(first, tmp_path, 1)
    with pytest.raises(UploadFailed, match="was taken over by"):
        first.drain()
    assert sum(call.operation == "head" and call.key.endswith("manifest.json") for call in store.calls) < 4, "and not to ask for minutes"
    for step in range(3, 9):
        with suppress(Fenced):
            save(first, tmp_path, step)
    assert [entry.step for entry in pending(tmp_path / "spool")] == [1, *range(3, 9)], "a fenced process keeps all that it saves"


def test_what_was_refused_and_then_gave_way_is_not_told_to_be_kept(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    store.fail("put", Denied("uploading: not allowed"), "*/files/*", times=None)
    save(run, tmp_path, 1)
    stuck(run)
    for step in range(2, 9):
        with pytest.raises(UploadFailed) as raised:
            save(run, tmp_path, step)
        told = int(str(raised.value).split()[1])
        assert ("its local copy is kept" in str(raised.value)) == (told not in run.status().superseded)
        assert ("has given way to newer saves" in str(raised.value)) == (told in run.status().superseded)
        stuck(run)
    assert len(run.status().superseded) > 2


def test_a_spool_that_was_removed_is_told_in_words_that_are_true(store: FaultStore, make_run: Make, events: Events, tmp_path: Path) -> None:
    run = make_run()
    store.fail("put", Denied("uploading: not allowed"), "*/files/*", times=None)
    save(run, tmp_path, 1)
    stuck(run)
    shutil.rmtree(tmp_path / "spool")
    with pytest.raises(SourceError, match=r"step 2 is not saved: .*spool, where saves wait .*, was removed or moved since this training"):
        save(run, tmp_path, 2)
    with pytest.raises(UploadFailed, match=r"step 1 is not in .*, and what was kept of that in .* is not there any more") as raised:
        run.drain()
    assert "kept in" not in str(raised.value).replace("what was kept of that in", "")
    assert "its local copy is not there any more" in events.texts()[-1]


def test_a_commit_needs_a_store_that_can_be_seen(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    assert save(run, tmp_path, 1).wait(20)
    store.fail("list", Denied("listing owners: not allowed"), "owners/", times=None)
    save(run, tmp_path, 2)
    with pytest.raises(UploadFailed, match="listing owners: not allowed"):
        run.close()
    assert [one.step for one in catalog.read_all(store.inner).checkpoints] == [1]


def test_a_step_is_named_once_however_many_ranks_saved_it() -> None:
    assert sync.about([1, 2, 1, 2], "is", "are") == "steps 1, 2 are"
    assert sync.about([3, 3], "is", "are") == "step 3 is"
    assert sync.about([*range(5, 30), *range(5, 30)], "is", "are") == "25 steps from 5 to 29 are"


def test_draining_shows_progress_and_a_time_that_is_over_is_an_error(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    run = make_run()
    gate = Gate()
    store.act("put", gate, "run.json")
    save(run, tmp_path, 1)
    with pytest.raises(UploadFailed, match="step 1 is not in"):
        run.drain(0.05)
    gate.opened.set()
    run.drain()
    shown = [event for event in events if isinstance(event, Progress) and event.task == "sending checkpoints"]
    assert (shown[-1].done, shown[-1].total, shown[-1].finished) == (1, 1, True)
    assert any(isinstance(event, Progress) and event.task == "sending step 1" and event.finished for event in events)


def test_newest_first_lets_go_of_an_older_one_that_is_on_its_way(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    gate = Gate()
    store.act("put_part", gate, "*/000000000001-*/files/model.bin")
    first = save(run, tmp_path, 1, os.urandom(80 * 2**20))
    assert gate.reached.wait(60)
    save(run, tmp_path, 2)
    run.finish_for_termination(0)
    gate.opened.set()
    run.drain()
    assert first.state == "verified"
    commits = [call.key.split("/")[1][:12] for call in store.calls if call.operation == "put" and call.key.endswith("manifest.json")]
    assert commits == ["000000000002", "000000000001"]


def test_a_closed_run_takes_no_more_saves_and_closing_twice_is_fine(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    with make_run() as run:
        save(run, tmp_path, 1)
    run.close()
    assert lease.look(store).closed
    with pytest.raises(UsageError, match="was closed; make a new Run"):
        save(run, tmp_path, 2)


def test_an_exception_in_the_block_survives_a_failing_close(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    store.fail("put", Denied("no"), "*/files/*", times=None)
    with pytest.raises(ZeroDivisionError) as raised, make_run() as run:
        save(run, tmp_path, 1)
        raise ZeroDivisionError
    assert "step 1 is not in" in raised.value.__notes__[0]


def test_a_forked_child_neither_saves_nor_uploads(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    assert save(run, tmp_path, 1).wait(20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert run.finish_at_exit() is None
            run.submit(tmp_path, step=2)
        except UsageError as error:
            code = 0 if "used in a forked child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    save(run, tmp_path, 2)
    run.close()
    assert steps(store) == [2, 1]


def test_the_run_and_the_directories_are_remembered_for_teardown(store: FaultStore, make_run: Make, tmp_path: Path, isolated: Path) -> None:
    from stagekit.runs import known_runs

    assert known_runs() == []
    run = make_run()
    source = fill(tmp_path / "out")
    run.submit(source, step=1)
    run.watch(tmp_path)
    run.close()
    [known] = known_runs()
    assert known.url == run.url
    assert known.spools == (tmp_path / "spool",)
    assert set(known.watched) == {source, tmp_path}


def test_a_subscriber_may_ask_the_run_for_its_status(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []
    run = make_run(on_event=lambda event: seen.append(run.status().pending) if isinstance(event, Message | Progress) else None)
    save(run, tmp_path, 1)
    run.close()
    assert (1,) in seen


def test_a_manifest_that_is_there_with_other_content_is_a_conflict_not_overwritten(
    store: FaultStore, make_run: Make, tmp_path: Path
) -> None:
    run = make_run()
    save(run, tmp_path, 1)
    run.drain()
    key = CheckpointName(1, 2, 2, run.checkpoints()[0].name.owner).manifest_key
    store.put(key, b"somebody else's")
    save(run, tmp_path, 2)
    with pytest.raises(UploadFailed, match="exists already"):
        run.close()
    assert bytes(store.get(key)) == b"somebody else's"


def test_a_subscriber_that_raises_costs_no_checkpoint_and_is_told(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    def broken(event: object) -> None:
        if getattr(event, "name", "") == "checkpoint.file-sent":
            raise ZeroDivisionError("in the subscriber")

    run = make_run(on_event=broken)
    assert save(run, tmp_path, 1).wait(20)
    with pytest.raises(ZeroDivisionError, match="in the subscriber"):
        save(run, tmp_path, 2)
    run.close()
    assert steps(store) == [2, 1]
