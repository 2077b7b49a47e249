"""Repeating what failed for a passing reason. Time is an argument: the ten-minute back-off here takes a millisecond."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stagekit.errors import BadDigest, Conflict, Denied, InvalidReply, NotFound, StoreError, Throttled, Unreachable
from stagekit.progress import Event, Message, Stage
from stagekit.store import open_store
from stagekit.store.base import Data, Multipart, ObjectInfo, Store, WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.store.retry import RetryStore

from .contract import StoreContract, keys_of


def memory() -> MemoryStore:
    return MemoryStore(f"memory://{uuid.uuid4().hex}/base")


class Failing(WrappedStore):
    """Raises the errors in ``errors`` before (or, with ``after``, in place of the answer of) the calls that follow."""

    def __init__(self, inner: Store, *errors: StoreError, after: bool = False) -> None:
        super().__init__(inner)
        self.errors = list(errors)
        self.after = after
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        if not self.after:
            self._fail()
        info = self.inner.put(key, data, if_absent=if_absent)
        if self.after:
            self._fail()
        return info

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        self._fail()
        return self.inner.get(key, start, length, if_match=if_match)

    def head(self, key: str) -> ObjectInfo:
        self._fail()
        return self.inner.head(key)

    def delete(self, key: str) -> None:
        self._fail()
        self.inner.delete(key)


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def retrying(inner: Store, clock: Clock, budget_s: float = 300, random: Callable[[], float] = lambda: 1.0, **more: object) -> RetryStore:
    return RetryStore(inner, budget_s, clock=clock, sleep=clock.sleep, random=random, **more)  # type: ignore[arg-type]


class TestRetryStore(StoreContract):
    """It is a store like its inner one."""

    @pytest.fixture
    def store(self) -> Store:
        return RetryStore(memory())


def test_a_passing_error_is_repeated_with_exponential_waits() -> None:
    clock = Clock()
    inner = Failing(memory(), *(Unreachable("cut") for _ in range(9)))
    retrying(inner, clock).put("a", b"1")
    assert clock.slept == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert bytes(inner.inner.get("a")) == b"1"


def test_waits_have_full_jitter() -> None:
    clock = Clock()
    given = iter([0.0, 0.25, 0.5])
    retrying(Failing(memory(), *(Unreachable("cut") for _ in range(3))), clock, random=lambda: next(given)).delete("a")
    assert clock.slept == [0.0, 0.25, 1.0]


def test_the_server_s_own_wish_is_waited_out() -> None:
    clock = Clock()
    retrying(Failing(memory(), Throttled("slow down", retry_after_s=17)), clock).delete("a")
    assert clock.slept == [17.5]


@pytest.mark.parametrize("error", [NotFound("gone"), Denied("no"), Conflict("changed"), InvalidReply("beyond", transient=False)])
def test_a_permanent_error_passes_at_once_and_unchanged(error: StoreError) -> None:
    clock = Clock()
    store = retrying(Failing(memory(), error), clock)
    with pytest.raises(type(error)) as caught:
        store.get("a")
    assert caught.value is error
    assert str(caught.value) in ("gone", "no", "changed", "beyond")
    assert clock.slept == []


def test_the_budget_is_in_seconds_and_the_last_error_tells_how_often_was_tried() -> None:
    clock = Clock()
    inner = Failing(memory(), *(Unreachable(f"reading s3://b/a: cut {number}") for number in range(100)))
    with pytest.raises(Unreachable, match=r"^reading s3://b/a: cut 12 \(tried 13 times in 3 min 32 s\)$"):
        retrying(inner, clock, 240).get("a")
    assert sum(clock.slept) <= 240


def test_a_wait_that_would_exceed_the_budget_is_not_begun() -> None:
    clock = Clock()
    with pytest.raises(Throttled, match=r"^slow down$"):
        retrying(Failing(memory(), Throttled("slow down", retry_after_s=60)), clock, 10).head("a")
    assert clock.slept == []


def test_a_budget_of_nothing_tries_once() -> None:
    clock = Clock()
    inner = Failing(memory(), Unreachable("cut"))
    with pytest.raises(Unreachable):
        retrying(inner, clock, 0).head("a")
    assert inner.calls == 1


def test_each_repetition_is_told_and_the_answer_in_the_end() -> None:
    told: list[Event] = []
    inner = memory()
    root = inner.location.root_name
    assert root == str(inner.location).removesuffix("/base")
    retrying(Failing(inner, Unreachable("reading s3://b/a: cut")), Clock(), on_event=told.append).delete("a")
    assert told == [Message("reading s3://b/a: cut; trying again in 0.5 s", "warning", root), Stage("store.answered", root)]
    inner.put("a", b"old")
    asking: list[Callable[[Store], object]] = [
        lambda store: store.put("a", b"new"),
        lambda store: store.get("a"),
        lambda store: store.head("a"),
    ]
    for ask in asking:
        told.clear()
        ask(retrying(Failing(inner, Unreachable("cut"), Unreachable("cut again")), Clock(), on_event=told.append))
        assert [type(event) for event in told] == [Message, Message, Stage], "that it answered is told once"


def test_a_stumble_of_the_server_is_told_when_it_repeats() -> None:
    told: list[Event] = []
    stumble = Unreachable("writing s3://b/a: it has an internal problem", momentary=True)
    inner = memory()
    retrying(Failing(inner, stumble), Clock(), on_event=told.append).delete("a")
    assert told == []
    retrying(Failing(inner, stumble, stumble), Clock(), on_event=told.append).delete("a")
    text, root = "writing s3://b/a: it has an internal problem; trying again in 1.0 s", inner.location.root_name
    assert told == [Message(text, "warning", root), Stage("store.answered", root)]


class Cutting(WrappedStore):
    """Every ``get`` ends after ``after`` bytes, as a cut connection does."""

    def __init__(self, inner: Store, after: int) -> None:
        super().__init__(inner)
        self.after = after
        self.asked: list[tuple[int, int | None, str | None]] = []
        self.between: Callable[[], object] = lambda: None

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        self.asked.append((start, length, if_match))
        etag = self.inner.head(key).etag
        data = self.inner.get(key, start, length, if_match=if_match)
        if len(data) > self.after:
            self.between()
            raise Unreachable("cut", received=bytes(data[: self.after]), etag=etag)
        return data


@pytest.mark.parametrize(("start", "length"), [(0, None), (0, 100), (7, 80), (7, None), (95, 5)])
def test_a_cut_get_goes_on_behind_what_arrived(start: int, length: int | None) -> None:
    data = bytes(range(100))
    inner = Cutting(memory(), 30)
    etag = inner.put("a", data).etag
    end = 100 if length is None else start + length
    clock = Clock()
    assert bytes(retrying(inner, clock).get("a", start, length)) == data[start:end]
    expected = [(at, None if length is None else end - at) for at in range(start, max(end, start + 1), 30)][: len(inner.asked)]
    assert [(at, left) for at, left, _ in inner.asked] == expected
    assert [same for *_, same in inner.asked] == [None] + [etag] * (len(inner.asked) - 1)


def test_bytes_that_arrive_renew_the_budget() -> None:
    data = bytes(1000)
    inner = Cutting(memory(), 10)
    inner.put("a", data)
    clock = Clock()
    assert bytes(retrying(inner, clock, 1.0).get("a")) == data
    assert sum(clock.slept) > 40


def test_an_object_replaced_after_a_cut_is_read_from_its_beginning() -> None:
    inner = Cutting(memory(), 30)
    inner.put("a", b"o" * 50)

    def replace() -> None:
        inner.put("a", b"n" * 40)
        inner.after, inner.between = 1000, lambda: None

    inner.between = replace
    assert bytes(retrying(inner, Clock()).get("a")) == b"n" * 40


def test_an_object_replaced_after_a_cut_is_a_conflict_for_who_asked_for_the_old_one() -> None:
    inner = Cutting(memory(), 30)
    etag = inner.put("a", b"o" * 50).etag
    inner.between = lambda: inner.put("a", b"n" * 50)
    with pytest.raises(Conflict, match="was replaced"):
        retrying(inner, Clock()).get("a", if_match=etag)


def test_bytes_of_an_unknown_object_are_not_continued() -> None:
    inner = Failing(memory(), Unreachable("cut", received=b"????"))
    inner.inner.put("a", b"right")
    assert bytes(retrying(inner, Clock()).get("a")) == b"right"


def test_a_creation_whose_answer_was_lost_never_claims_to_be_exclusive() -> None:
    inner = Failing(memory(), Unreachable("cut"), after=True)
    with pytest.raises(Conflict, match=r"exists already \(an earlier try of this call got no answer and may have created it itself\)"):
        retrying(inner, Clock()).put("claim", b"mine", if_absent=True)
    assert bytes(inner.inner.get("claim")) == b"mine"


def test_a_conflict_under_way_is_repeated() -> None:
    inner = Failing(memory(), Conflict("another request is under way", transient=True))
    retrying(inner, Clock()).put("claim", b"mine", if_absent=True)
    assert bytes(inner.inner.get("claim")) == b"mine"


class FlakyUploads(WrappedStore):
    """Parts and completion fail the first time they are tried, and so does the start."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.started = False

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[Multipart]:
        if not self.started:
            self.started = True
            raise Unreachable("starting: cut")
        with self.inner.multipart(key, part_size=part_size) as upload:
            yield _FlakyUpload(upload)


class _FlakyUpload:
    def __init__(self, upload: Multipart) -> None:
        self.upload = upload
        self.part_size = upload.part_size
        self.seen: set[object] = set()

    def _once(self, what: object, error: StoreError) -> None:
        if what not in self.seen:
            self.seen.add(what)
            raise error

    def put_part(self, number: int, data: Data) -> None:
        self._once(number, BadDigest("part arrived wrong"))
        self.upload.put_part(number, data)

    def complete(self) -> ObjectInfo:
        self._once("complete", Unreachable("completing: cut"))
        return self.upload.complete()

    @property
    def info(self) -> ObjectInfo:
        return self.upload.info


def test_start_parts_and_completion_of_an_upload_are_repeated_each_for_itself() -> None:
    inner = memory()
    clock = Clock()
    with retrying(FlakyUploads(inner), clock).multipart("a", part_size=3) as upload:
        upload.put_part(1, b"45")
        upload.put_part(0, b"123")
    assert bytes(inner.get("a")) == b"12345"
    assert upload.info.size == 5
    assert clock.slept == [0.5] * 4
    assert list(inner.open_uploads()) == []


def test_an_upload_that_cannot_be_completed_is_aborted() -> None:
    inner = memory()
    with (
        pytest.raises(Unreachable, match="completing: cut"),
        retrying(FlakyUploads(inner), Clock(), 1).multipart("a", part_size=3) as upload,
    ):
        upload._store.budget_s = 0  # type: ignore[attr-defined]  # what is left is not enough
    assert keys_of(inner.list()) == []
    assert list(inner.open_uploads()) == []


class BrokenListing(WrappedStore):
    """A listing that breaks off after three objects, twice."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.left = 2

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(self.inner.list(prefix)):
            if number == 3 and self.left:
                self.left -= 1
                raise Unreachable("listing: cut")
            yield info


def test_a_listing_goes_on_behind_the_last_key() -> None:
    inner = memory()
    for number in range(10):
        inner.put(f"k{number}", b"")
    assert keys_of(retrying(BrokenListing(inner), Clock()).list()) == [f"k{number}" for number in range(10)]


def test_a_pickled_copy_keeps_the_budget_and_tells_nobody() -> None:
    told: list[Event] = []
    store = RetryStore(memory(), 42, on_event=told.append)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.budget_s == 42
    assert copy.location == store.location


def test_stores_over_a_network_are_opened_with_retries_and_others_without() -> None:
    assert isinstance(open_store("s3://bucket/a", retry_s=7), RetryStore)
    assert open_store("s3://bucket/a", retry_s=7).budget_s == 7  # type: ignore[attr-defined]
    assert open_store("s3://bucket/a").budget_s == 300  # type: ignore[attr-defined]
    opened = open_store("memory://x/a")
    assert isinstance(opened, MemoryStore)
    assert open_store(opened) is opened
