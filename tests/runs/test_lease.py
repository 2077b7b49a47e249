"""Who owns a run: generations only grow, a zombie is fenced by a fresh look, and nobody is taken for dead without proof."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable

import pytest

from stagekit import processes
from stagekit.errors import BucketNotFound, CheckpointError, Denied, Fenced, ManifestError
from stagekit.processes import Process
from stagekit.runs import lease
from stagekit.runs.lease import Lease, check, close, look, take
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from .conftest import NoConditions

HERE = Process.current()
ELSEWHERE = Process("other-host", "other-boot", "pid:[1]", 77, "12345")


def test_each_writer_takes_the_next_generation(store: FaultStore) -> None:
    first, before = take(store, "aaaaaaaa", HERE, clock=lambda: 1.0)
    assert (first.generation, before) == (1, None)
    second, before = take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 2.0)
    assert second.generation == 2
    assert before == first
    check(store, second)
    assert {info.key for info in store.list("owners/")} == {
        "owners/000001-aaaaaaaa.json",
        "owners/000001.claim",
        "owners/000002-bbbbbbbb.json",
        "owners/000002.claim",
    }


def test_a_zombie_is_fenced_and_told_by_whom(store: FaultStore) -> None:
    zombie, _ = take(store, "aaaaaaaa", HERE, clock=lambda: 1.0)
    take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 2.0)
    with pytest.raises(Fenced, match=r"taken over by process 77 on other-host \(generation 2, ours is 1\).*local copies are kept"):
        check(store, zombie)


def test_one_that_has_finished_is_not_told_about(store: FaultStore) -> None:
    first, _ = take(store, "aaaaaaaa", HERE, clock=lambda: 1.0)
    close(store, first)
    assert look(store).closed
    _, before = take(store, "bbbbbbbb", ELSEWHERE, clock=lambda: 2.0)
    assert before is None
    assert not look(store).closed


def test_not_seeing_is_never_nobody(store: FaultStore) -> None:
    store.fail("list", Denied("listing: no"))
    with pytest.raises(Denied):
        take(store, "aaaaaaaa", HERE, clock=lambda: 1.0)
    store.fail("list", BucketNotFound("no such bucket"))
    with pytest.raises(BucketNotFound):
        look(store)
    assert not list(store.inner.list())


@pytest.mark.parametrize("wrap", [lambda store: store, NoConditions], ids=["conditional", "unconditional"])
def test_of_many_at_once_one_is_left_and_no_two_share_a_name(wrap: Callable[[MemoryStore], MemoryStore]) -> None:
    store = wrap(MemoryStore(f"memory://{uuid.uuid4().hex}/run"))
    barrier = threading.Barrier(8)
    taken: list[Lease] = []

    def race(number: int) -> None:
        barrier.wait()
        taken.append(take(store, f"{number:08x}", HERE, clock=lambda: 0.0)[0])

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.key for one in taken}) == 8
    if store.conditional_create():
        assert len({one.generation for one in taken}) == 8
    alive = []
    for one in taken:
        try:
            check(store, one)
            alive.append(one)
        except Fenced:
            continue
    assert [(one.generation, one.owner) for one in alive] == [look(store).newest]


def test_a_claim_that_lost_its_process_costs_a_generation_only(store: FaultStore) -> None:
    store.put("owners/000001.claim", b"", if_absent=True)
    held, _ = take(store, "aaaaaaaa", HERE, clock=lambda: 1.0)
    assert held.generation == 2


def test_endless_rivals_end_in_an_error(store: FaultStore) -> None:
    def rival(_call: object) -> None:
        newest = look(store.inner).highest
        store.inner.put(f"owners/{newest + 1:06d}-ffffffff.json", b"")

    store.act("put", rival, "owners/*.json", times=None, after=True)
    with pytest.raises(CheckpointError, match="took it 50 times in a row"):
        take(NoConditions(store), "aaaaaaaa", HERE, clock=lambda: 1.0)


def test_a_lease_comes_back_as_it_was() -> None:
    held = Lease(3, "aaaaaaaa", HERE, 12.5)
    assert Lease.from_bytes(held.to_bytes(), source="here") == held
    with pytest.raises(ManifestError, match="here is damaged"):
        Lease.from_bytes(held.to_bytes().replace(b'"pid": ', b'"pid": 1'), source="here")


def test_strange_names_under_owners_are_passed_over(store: FaultStore) -> None:
    for name in ("readme.txt", "1-a.json", "000009-XYZ.json", "sub/000009-aaaaaaaa.json"):
        store.put(f"owners/{name}", b"")
    assert look(store) == lease.Owners(None, False, 0)


def test_this_process_lives_and_a_collected_one_is_dead() -> None:
    assert not HERE.is_dead()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = processes._start_of(child.pid)
    assert started
    other = dataclasses.replace(HERE, pid=child.pid, started=started)
    assert not other.is_dead()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert other.is_dead(), "a zombie does nothing any more"
    child.communicate()
    assert other.is_dead()


def test_another_process_with_the_same_number_is_not_the_same() -> None:
    assert dataclasses.replace(HERE, started="1").is_dead()


@pytest.mark.parametrize(
    "change",
    [{"host": "x"}, {"boot_id": "x"}, {"pid_namespace": "pid:[1]"}, {"boot_id": ""}, {"started": ""}],
    ids=lambda change: str(change),
)
def test_what_runs_elsewhere_is_never_taken_for_dead(change: dict[str, str]) -> None:
    # The same kernel under another container is "elsewhere": its process numbers mean something else.
    gone = dataclasses.replace(HERE, pid=2**22 + 5, started="1")
    assert gone.is_dead()
    assert not dataclasses.replace(gone, **change).is_dead()
