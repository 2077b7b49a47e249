"""A store that repeats what failed for a passing reason, until a budget of seconds is used up."""

from __future__ import annotations

import random as _random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import Conflict, InvalidReply, NotFound, StoreError
from ..progress import ANSWERED, Message, Stage, Subscriber, ignore
from ..units import format_duration
from .abandon import abandoned
from .abandon import sleep as sleep_until_abandoned
from .base import Children, Data, Multipart, ObjectInfo, OpenUpload, Store, WrappedStore
from .extras import list_strictly
from .limits import waited_s

_T = TypeVar("_T")
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


class RetryStore(WrappedStore):
    """``inner``, with transient errors repeated for up to ``budget_s`` seconds per call; all other errors pass at once, unchanged.

    Waits grow exponentially with full jitter, so that many clients do not come back together; a ``Retry-After`` of the server is
    waited out in full. A wait that would exceed the budget is not begun: the last error is raised, saying how often was tried. A
    budget of 0 tries once. A ``get`` that was cut continues behind the bytes that arrived, on the condition that the object is still
    the same one, and its budget starts again whenever bytes arrive.

    ``put(if_absent=True)`` whose earlier try got no answer may raise ``Conflict`` against itself: never does it report an exclusive
    creation that somebody else made. That the object is not there is no answer to writing it, and is repeated as well.

    Each repetition is told to ``on_event`` as a warning, but for the first after a momentary error: nearly always that is all there was of
    it. The answer that comes in the end is the stage ``store.answered``. A pickled copy keeps the budget and reports to nobody.
    """

    def __init__(
        self,
        inner: Store,
        budget_s: float = 300,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_until_abandoned,
        random: Callable[[], float] = _random.random,
        on_event: Subscriber = ignore,
    ) -> None:
        super().__init__(inner)
        self.budget_s = budget_s
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._on_event = on_event
        self._root = inner.location.root_name

    def __reduce__(self) -> tuple[type[RetryStore], tuple[Store, float]]:
        return RetryStore, (self.inner, self.budget_s)

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        patience = _Patience(self)
        while True:
            try:
                return patience.answered(_never_missing(self, key, lambda: self.inner.put(key, data, if_absent=if_absent)))
            except Conflict as error:
                if not error.transient:
                    if patience.tries:
                        _add(error, "an earlier try of this call got no answer and may have created it itself")
                    raise
                patience.wait(error)
            except StoreError as error:
                patience.wait(error)

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[Multipart]:
        patience = _Patience(self)
        while True:
            block = self.inner.multipart(key, part_size=part_size)
            try:
                upload = patience.answered(_never_missing(self, key, block.__enter__))
                break
            except StoreError as error:
                patience.wait(error)
        repeating = _RetryMultipart(self, key, upload)
        try:
            yield repeating
            repeating.complete()
        except BaseException as error:
            if not block.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            block.__exit__(None, None, None)

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        patience = _Patience(self)
        pieces: list[Data] = []
        position, same = start, if_match
        while True:
            left = None if length is None else length - (position - start)
            try:
                rest = patience.answered(self.inner.get(key, position, left, if_match=same))
                return rest if not pieces else b"".join([*pieces, rest])
            except Conflict as error:
                if if_match is not None or not pieces:
                    raise
                # The object was replaced between two pieces, and the caller did not ask for the earlier one: begin with the new one.
                pieces, position, same = [], start, None
                patience.wait(error, even_so=True)
            except StoreError as error:
                if error.received and error.etag is not None and same in (None, error.etag):
                    pieces.append(error.received)
                    position += len(error.received)
                    same = error.etag
                    patience.progress()
                patience.wait(error)

    def head(self, key: str) -> ObjectInfo:
        return self._repeat(lambda: self.inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._resume(lambda: self.inner.list(prefix), lambda info: info.key)

    def list_strictly(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._resume(lambda: list_strictly(self.inner, prefix), lambda info: info.key)

    def children(self, prefix: str = "") -> Children:
        return self._repeat(lambda: self.inner.children(prefix))

    def delete(self, key: str) -> None:
        self._repeat(lambda: self.inner.delete(key))

    def conditional_create(self) -> bool:
        return self._repeat(self.inner.conditional_create)

    def checks_digest(self) -> bool:
        return self._repeat(self.inner.checks_digest)

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        # Uploads have no order to resume by, and there are few: each try collects all of them.
        return iter(self._repeat(lambda: tuple(self.inner.open_uploads(prefix))))

    def abort_upload(self, upload: OpenUpload) -> None:
        self._repeat(lambda: self.inner.abort_upload(upload))

    def _repeat(self, call: Callable[[], _T]) -> _T:
        patience = _Patience(self)
        while True:
            try:
                return patience.answered(call())
            except StoreError as error:
                patience.wait(error)

    def _resume(self, begin: Callable[[], Iterator[ObjectInfo]], key: Callable[[ObjectInfo], str]) -> Iterator[ObjectInfo]:
        """A listing that is begun again after an error, and goes on behind the last key that was handed out."""
        patience = _Patience(self)
        last: str | None = None
        while True:
            try:
                for info in begin():
                    patience.answered(info)
                    if last is None or key(info) > last:
                        patience.progress()
                        last = key(info)
                        yield info
                return
            except StoreError as error:
                patience.wait(error)


def after_writing(store: Store, key: str, question: Callable[[], _T], gone: Callable[[], None] = lambda: None) -> _T:
    """The answer to ``question``, which is about the object ``key`` that was just written to ``store``.

    That there is no such object is an answer of the moment then (`rclone serve s3` gives it when a folder is new), so it is asked again
    within the budget of the ``RetryStore`` that ``store`` is or holds. Raises ``InvalidReply`` when it stays so. Each time ``gone`` is
    called first, which raises what it knows to be the reason.
    """
    inner = store
    while isinstance(inner, WrappedStore):
        if isinstance(inner, RetryStore):
            return inner._repeat(lambda: _never_missing(store, key, question, gone))
        inner = inner.inner
    return _never_missing(store, key, question, gone)


def _never_missing(store: Store, key: str, call: Callable[[], _T], gone: Callable[[], None] = lambda: None) -> _T:
    """``call``, whose answer cannot be that the object ``key`` is not there."""
    try:
        return call()
    except NotFound as error:
        gone()
        raise InvalidReply(
            f"writing {store.location / key}: the store was given the object and answers that there is no such object; repeat the command, "
            "and if it stays so, look for what removes objects there",
            momentary=True,
        ) from error


class _RetryMultipart:
    def __init__(self, store: RetryStore, key: str, upload: Multipart) -> None:
        self._store = store
        self._key = key
        self._upload = upload

    @property
    def part_size(self) -> int:
        return self._upload.part_size

    def put_part(self, number: int, data: Data) -> None:
        store, key = self._store, self._key
        store._repeat(lambda: _never_missing(store, key, lambda: self._upload.put_part(number, data)))

    def complete(self) -> ObjectInfo:
        store, key = self._store, self._key
        return store._repeat(lambda: _never_missing(store, key, self._upload.complete))

    @property
    def info(self) -> ObjectInfo:
        return self._upload.info


class _Patience:
    """The budget of one call. What a limit on requests or bytes made it wait for is not taken from it."""

    def __init__(self, store: RetryStore) -> None:
        self._store = store
        self._began = store._clock()
        self._waited_s = waited_s()
        self._waits = 0
        self._told = False
        self.tries = 0

    def answered(self, answer: _T) -> _T:
        """``answer``, which is told to have come where it was told before that it did not."""
        if self._told:
            self._told = False
            self._store._on_event(Stage(ANSWERED, self._store._root))
        return answer

    def progress(self) -> None:
        """Bytes arrived, so the other side is alive: the budget and the waits start again."""
        self._began = self._store._clock()
        self._waited_s = waited_s()
        self._waits = 0

    def wait(self, error: StoreError, *, even_so: bool = False) -> None:
        """Return when it is time to try again; raise ``error`` when it is permanent (unless ``even_so``) or the budget does not last."""
        if not (error.transient or even_so) or abandoned():
            raise error
        store = self._store
        self.tries += 1
        wait_s = store._random() * min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**self._waits)
        if error.retry_after_s is not None:
            wait_s += error.retry_after_s
        spent_s = store._clock() - self._began - (waited_s() - self._waited_s)
        if spent_s + wait_s > store.budget_s:
            if self.tries > 1:
                _add(error, f"tried {self.tries} times in {format_duration(spent_s)}")
            raise error
        self._waits += 1
        if not error.momentary or self.tries > 1:
            self._told = True
            store._on_event(Message(f"{error}; trying again in {format_duration(wait_s)}", "warning", repeating=store._root))
        store._sleep(wait_s)
        if abandoned():
            raise error


def _add(error: StoreError, remark: str) -> None:
    """Put ``remark`` behind the error's message. The error stays the same object, with its cause and traceback."""
    error.args = (f"{error} ({remark})", *error.args[1:])
