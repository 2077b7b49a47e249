"""Batches made in other processes, for transforms in which Python itself is the bottleneck.

Each process gets the raw samples of whole batches, in turns, and gives back finished ones: decoded, transformed, put together. What is
large goes through memory that both sides map and that has no name, so that nothing is left of it whichever process is killed; only its
descriptor and a few bytes of description are sent. Reading, order and state stay in the process that trains.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import pickle
import queue
import random
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import numpy as np
import torch

from ..dataset import Sample
from ..errors import UsageError, WorkerDied
from .batches import Assembly
from .pipeline import running
from .plan import Made, Maker
from .turns import anonymous_file

_JOIN_S = 1.0
_AHEAD = 2  # batches of each process that are made before they are asked for
_ALIGNED = 64
_LARGE = 16 << 10  # what is smaller is sent with the description

Group = Sequence[Sample | None]


class Workers:
    """Iterate over ``(batch, counts)`` for every group of ``groups``, in order, made in ``count`` processes.

    An error of ``maker`` or ``assembly`` is raised in its batch's place, with the traceback of its process as a note. A process that ends
    (killed for its memory, or by ``os._exit`` in a transform) raises ``WorkerDied``; nothing waits for it. ``close()`` ends all processes
    and waits for them; they also end by themselves when this process does, however it does.

    Before the batch with number ``n``, counted from 0, ``random``, ``numpy.random`` and torch are seeded with ``seed(n)`` there, so that a
    transform that draws from them gives the same whatever the number of processes.

    Processes are spawned: ``maker`` and ``assembly`` must be picklable (``UsageError``), and a script needs its
    ``if __name__ == "__main__":``. ``stop_groups`` is called to wake a thread that waits inside ``groups``; ``filler`` as in ``Assembly``.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        maker: Maker,
        assembly: Assembly,
        *,
        count: int,
        seed: Callable[[int], int],
        filler: Callable[[], Any],
        stop_groups: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited_s = 0.0
        self._groups, self._assembly, self._filler = groups, assembly, filler
        self._stop_groups = stop_groups
        self._clock = clock
        self._stopped = False
        self._room = threading.Semaphore(_AHEAD * count)
        self._sent: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self.process = os.getpid()
        self._seed = seed
        job = _pickled(maker, assembly)
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._end = weakref.finalize(self, _end, self._processes, self._connections, os.getpid())
        try:
            for number in range(count):
                here, there = context.Pipe()
                self._connections.append(here)
                process = context.Process(target=_serve, args=(there, job), name=f"stagekit-worker-{number}", daemon=True)
                self._processes.append(process)
                process.start()
                there.close()
        except BaseException:
            self._end()
            raise
        running.add(self)
        self._thread = threading.Thread(target=self._feed, name="stagekit-read", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Any, Made]]:
        while True:
            began = self._clock()
            sent = self._sent.get()
            if sent is None:
                return
            if isinstance(sent, BaseException):
                raise sent
            batch, made, error = self._receive(sent)
            self.waited_s += self._clock() - began
            self._room.release()
            if error is not None:
                raise error
            if not made.samples:
                batch = self._assembly([], self._filler)  # here, where what stands for no batch is the same object
            yield batch, made
            del batch, made

    def close(self) -> None:
        """End the processes, and drop what was not taken. May be called twice."""
        running.discard(self)
        self._stopped = True
        self._stop_groups()
        self._room.release()
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _feed(self) -> None:
        groups = iter(self._groups)
        try:
            number = 0
            while True:
                self._room.acquire()
                if self._stopped:
                    return
                group = next(groups, None)
                if group is None:
                    return
                worker = number % len(self._connections)
                # Told first: when the process is gone, whoever waits for its answer finds out why.
                self._sent.put(worker)
                _send(self._connections[worker], *_flat(self._seed(number), group))
                number += 1
        except OSError as error:
            if not self._stopped and not isinstance(error, BrokenPipeError | ConnectionResetError):
                self._sent.put(error)
        except BaseException as error:
            self._sent.put(error)
        finally:
            close = getattr(groups, "close", None)
            if close is not None:
                close()
            self._sent.put(None)

    def _receive(self, worker: int) -> tuple[Any, Made, BaseException | None]:
        connection, process = self._connections[worker], self._processes[worker]
        try:
            wait([connection, process.sentinel])
            if connection.poll():  # also what a process sent before it died
                message = _receive(connection)
                if message is not None:
                    answer: tuple[Any, Made, BaseException | None] = _unpacked(*message)
                    return answer
        except (EOFError, OSError):
            pass
        process.join(_JOIN_S)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        hint = ": perhaps the machine ran out of memory; use fewer workers, or a smaller batch" if code == -signal.SIGKILL else ""
        raise WorkerDied(
            f"worker process {worker} of {len(self._processes)} (pid {process.pid}) {how} while it made a batch{hint}. "
            'A script that uses workers= needs `if __name__ == "__main__":` around what it does'
        )


def _end(processes: list[Any], connections: list[Connection], owner: int) -> None:
    """End ``processes``, which belong to the process ``owner``: by a signal, then by force."""
    if os.getpid() != owner:
        return  # in a forked child, which has a copy of what is not its own
    for connection in connections:
        connection.close()
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    deadline = time.monotonic() + _JOIN_S
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(_JOIN_S)
        if not process.is_alive():
            process.close()
    processes.clear()
    connections.clear()


def _pickled(maker: Maker, assembly: Assembly) -> bytes:
    try:
        return pickle.dumps((maker, assembly))
    except Exception as error:
        raise UsageError(
            f"workers: transform, decode and collate are sent to other processes, and one of them cannot be ({error}); define it at the "
            "top of a module instead of inside a function, or use threads="
        ) from error


# ------------------------------------------------------------------------------------------------------------ in the worker process


def _serve(connection: Connection, job: bytes) -> None:
    """Make batches until nobody wants any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains; it ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    maker: Maker
    assembly: Assembly
    failure: BaseException | None = None
    try:
        maker, assembly = pickle.loads(job)
    except Exception as error:
        failure = _portable(error)
    while True:
        try:
            message = _receive(connection)
        except (EOFError, OSError):
            return
        if message is None:
            return
        made, batch, raised = Made(), None, failure
        if failure is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("default")
                    seed, group = _samples(*message)
                    _seed_all(seed)
                    made = maker(group)
                    if made.samples:
                        batch = assembly(made.samples, _never)
                made.samples = [None] * len(made.samples)  # the other side only counts them
            except Exception as error:
                made, batch, raised = Made(), None, _portable(error)
        del message
        try:
            _send(connection, *_packed((batch, made, raised)))
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            _send(connection, *_packed((None, Made(), _portable(error))))


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _never() -> NoReturn:
    raise AssertionError("a batch without samples is put together where it is used")


def _portable(error: Exception) -> BaseException:
    """``error`` in a form that can be sent, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    copy: BaseException
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error):
            raise TypeError("an exception that becomes another one")
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"raised in worker process {os.getpid()}:\n{trace}")
    return copy


# --------------------------------------------------------------------------------------------------------------------- the way across


def _flat(seed: int, group: Group) -> tuple[bytes, list[Any]]:
    """Raw samples as a description and the bytes of their fields, which lie one behind another."""
    description: list[list[tuple[str, int, Any]] | None] = []
    buffers: list[bytes] = []
    for sample in group:
        if sample is None:
            description.append(None)
            continue
        fields: list[tuple[str, int, Any]] = []
        for field, value in sample.items():
            if type(value) is bytes:
                fields.append((field, len(value), None))
                buffers.append(value)
            else:
                fields.append((field, -1, value))
        description.append(fields)
    return pickle.dumps((seed, description)), buffers


def _samples(description: bytes, memory: memoryview | None) -> tuple[int, Group]:
    seed, entries = pickle.loads(description)
    group: list[Sample | None] = []
    at = 0
    for entry in entries:
        if entry is None:
            group.append(None)
            continue
        sample: Sample = {}
        for field, length, value in entry:
            if length < 0:
                sample[field] = value
            else:
                sample[field] = bytes(memory[at : at + length]) if memory is not None else b""
                at += length
        group.append(sample)
    return seed, group


class _Pickler(pickle.Pickler):
    """Leaves the elements of arrays and tensors out, which go into the memory that is shared."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized:
            if value.requires_grad or value.is_conj() or value.is_neg():
                return NotImplemented
            flat = value.detach().contiguous()
            if flat.nbytes < _LARGE:
                raw: Any = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.nbytes else b""
            else:
                raw = pickle.PickleBuffer(flat.reshape(-1).view(torch.uint8).numpy().data)
            return _tensor, (raw, value.dtype, tuple(value.shape))
        return NotImplemented


def _tensor(raw: Any, kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=kind)
    # A copy of what came with the description; what lies in shared memory is used there, and keeps it mapped.
    elements = np.frombuffer(bytearray(raw) if isinstance(raw, bytes) else raw, np.uint8)
    return torch.from_numpy(elements).view(kind).reshape(shape)


def _packed(value: Any) -> tuple[bytes, list[Any]]:
    buffers: list[Any] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(value)
    sizes = [len(buffer) for buffer in buffers]
    aligned: list[Any] = []
    for buffer in buffers:
        aligned += [buffer, bytes(-len(buffer) % _ALIGNED)]
    return pickle.dumps((sizes, stream.getvalue())), aligned


def _unpacked(description: bytes, memory: memoryview | None) -> Any:
    sizes, pickled = pickle.loads(description)
    buffers = []
    at = 0
    for size in sizes:
        buffers.append(memory[at : at + size] if memory is not None else memoryview(bytearray(size)))
        at += size + -size % _ALIGNED
    return pickle.loads(pickled, buffers=buffers)


def _send(connection: Connection, description: bytes, buffers: Sequence[Any]) -> None:
    total = sum(len(buffer) for buffer in buffers)
    if not total:
        connection.send_bytes(b"\0" + description)
        return
    descriptor = anonymous_file("stagekit-batch")
    try:
        _write(descriptor, buffers)
        connection.send_bytes(b"\1" + description)
        reduction.send_handle(connection, descriptor, None)
    finally:
        os.close(descriptor)


def _write(descriptor: int, buffers: Sequence[Any]) -> None:
    at = 0
    for first in range(0, len(buffers), 512):
        views = [memoryview(buffer) for buffer in buffers[first : first + 512] if len(buffer)]
        while views:
            written = os.pwritev(descriptor, views, at)
            at += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]


def _receive(connection: Connection) -> tuple[bytes, memoryview | None] | None:
    """A description and the memory that belongs to it, which stays mapped as long as something uses it. ``None`` at the end."""
    data = connection.recv_bytes()
    if not data[0]:
        return data[1:], None
    descriptor = reduction.recv_handle(connection)
    try:
        return data[1:], _mapped(descriptor)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> memoryview:
    """The memory behind ``descriptor``, as long as something uses it. Private: what is written into it is the writer's own."""
    length = os.fstat(descriptor).st_size
    path = f"/proc/self/fd/{descriptor}"
    if os.path.exists(path):
        # Python's own mapping would keep a descriptor open for every batch that the trainer keeps.
        return torch.from_file(path, shared=False, size=length, dtype=torch.uint8).numpy().data
    return memoryview(mmap.mmap(descriptor, length, mmap.MAP_PRIVATE))
