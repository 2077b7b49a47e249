"""Every error Stagekit raises on purpose, as one tree.

Where Python already has a word for what happened, the class is that as well, so ``except FileNotFoundError`` keeps working in user code.

::

    StagekitError
    ├── UsageError (ValueError)             an argument or option that cannot be meant
    │   └── LocationError                   a URL or path that does not parse
    ├── StoreError                          an object store said no, or said nothing
    │   ├── NotFound (FileNotFoundError)    the object is provably not there
    │   ├── BucketNotFound                  the bucket is not there; never a kind of NotFound, since a missing bucket is not an empty one
    │   ├── Denied (PermissionError)        the credentials are known and may not do this
    │   │   └── WrongCredentials            the credentials themselves are missing, unknown or wrong
    │   ├── Unreachable (ConnectionError)   no answer, a cut answer, or a 5xx
    │   │   └── TLSFailed                   the endpoint answered, its certificate is not trusted
    │   ├── Throttled                       slow down (503 SlowDown, 429)
    │   ├── ClockSkew                       the server refuses our signatures because the clocks differ
    │   ├── Conflict                        a condition did not hold: the object exists already, or is no longer the one meant
    │   ├── BadDigest                       what arrived is not what was sent
    │   ├── InvalidReply                    an answer that no object store gives (an HTML page, a wrong range)
    │   └── OutOfSpace                      no space or quota left at the destination
    ├── SourceError                         raw data that cannot be read, or that changed while it was read
    ├── ManifestError                       a manifest that is missing, damaged, or of an unknown version
    ├── PublishError                        a destination that must not be written to
    ├── ShardError                          a shard that is not what its manifest says
    │   ├── CorruptShard                    bytes that differ from their digest, or a broken tar
    │   ├── DuplicateKey                    two samples with one key, or one sample with a field twice
    │   └── KeyNotAllowed                   a name that a shard cannot hold
    ├── MountRefused                        random access to an object store behind FUSE
    ├── RandomAccessRefused                 map-style use of a sequential loader
    ├── DoubleSplit                         a framework split the data a second time
    ├── StateMismatch                       a loader state that belongs to other data or another order
    ├── StallTimeout (TimeoutError)         no data for longer than the caller wants to wait
    ├── WorkerDied (RuntimeError)           a worker process ended in the middle of its work
    ├── CheckpointError                     saving or restoring a run's state
    │   ├── DamagedCheckpoint               a committed checkpoint whose files are not what its manifest says
    │   ├── NoValidCheckpoint               checkpoints exist and none is whole
    │   ├── UploadFailed                    a checkpoint that did not reach the bucket
    │   └── Fenced                          another machine has taken the run over
    └── MissingExtra (ImportError)          an optional package is needed; the message holds the install line

"Cannot tell" is an error of its own kind (``Denied``, ``Unreachable``, …) and is never reported as ``NotFound``.
"""

from __future__ import annotations

from .installing import install_line


class StagekitError(Exception):
    """Base of all errors that Stagekit raises on purpose. The message says what was attempted, on which object, and what to try next."""


class UsageError(StagekitError, ValueError):
    """An argument or option that cannot be meant."""


class LocationError(UsageError):
    """A URL or path that does not parse."""


class StoreError(StagekitError):
    """An object store said no, or said nothing.

    ``transient`` tells whether the same call may succeed later; it is decided once, where the vendor's error is translated.
    ``retry_after_s`` is what the server asked to wait, if it did.
    ``momentary`` says that the server calls it a stumble of its own, and asks to be asked again: worth a word only when it repeats.
    ``received`` holds the bytes that arrived before a body was cut, so that a retry continues behind them; ``etag`` tells of which
    object they are.
    """

    transient: bool = False

    def __init__(
        self,
        message: str,
        *,
        transient: bool | None = None,
        momentary: bool = False,
        retry_after_s: float | None = None,
        received: bytes = b"",
        etag: str | None = None,
    ) -> None:
        super().__init__(message)
        if transient is not None:
            self.transient = transient
        self.momentary = momentary
        self.retry_after_s = retry_after_s
        self.received = received
        self.etag = etag


class NotFound(StoreError, FileNotFoundError):
    """The object is provably not there."""


class BucketNotFound(StoreError):
    """The bucket (or the root directory of a directory store that must exist) is not there."""


class Denied(StoreError, PermissionError):
    """The credentials are known and may not do this."""


class WrongCredentials(Denied):
    """The credentials are missing, unknown to the endpoint, or wrong."""


class Unreachable(StoreError, ConnectionError):
    """No answer, a cut answer, or a 5xx."""

    transient = True


class TLSFailed(Unreachable):
    """The endpoint's certificate is not trusted. Trying again does not change that."""

    transient = False


class Throttled(StoreError):
    """The store asks to slow down."""

    transient = True


class ClockSkew(StoreError):
    """The server refuses our signatures because its clock and ours differ."""


class Conflict(StoreError):
    """A condition did not hold: the object exists already, or is no longer the one that was meant."""


class BadDigest(StoreError):
    """What arrived is not what was sent. Nothing of it is visible, so the call may be repeated."""

    transient = True


class InvalidReply(StoreError):
    """An answer that no object store gives: an HTML page from a proxy, a range that was not asked for."""

    transient = True


class OutOfSpace(StoreError):
    """No space or quota is left at the destination."""


class SourceError(StagekitError):
    """Raw data that cannot be read, or that changed while it was read."""


class ManifestError(StagekitError):
    """A manifest that is missing, damaged, or of an unknown version."""


class PublishError(StagekitError):
    """A destination that must not be written to, such as one that holds another data set."""


class ShardError(StagekitError):
    """A shard that is not what its manifest says."""


class CorruptShard(ShardError):
    """Bytes that differ from their digest, or a tar that is broken."""


class DuplicateKey(ShardError):
    """Two samples with one key, or one sample that has a field twice."""


class KeyNotAllowed(ShardError):
    """A name that a shard cannot hold."""


class MountRefused(StagekitError):
    """Random access to an object store behind FUSE, or a mount that does not answer."""


class RandomAccessRefused(StagekitError):
    """Map-style use of a loader that reads in sequence."""


class DoubleSplit(StagekitError):
    """A framework is about to split data that is already split by rank."""


class StateMismatch(StagekitError):
    """A loader state that belongs to other data, another seed, or another order."""


class StallTimeout(StagekitError, TimeoutError):
    """No data for longer than the caller wants to wait."""


class WorkerDied(StagekitError, RuntimeError):
    """A worker process ended in the middle of its work, killed or by itself. The message says how."""


class CheckpointError(StagekitError):
    """Saving or restoring a run's state."""


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint whose files are not what its manifest says. The message names the file and what differs."""


class NoValidCheckpoint(CheckpointError):
    """The run has checkpoints and none of them is whole."""


class UploadFailed(CheckpointError):
    """A checkpoint did not reach the bucket. Its local copy is kept."""


class Fenced(CheckpointError):
    """Another machine has taken this run over."""


class MissingExtra(StagekitError, ImportError):
    """An optional package is needed. The message holds the line that installs it."""

    @classmethod
    def of(cls, extra: str, package: str, purpose: str) -> MissingExtra:
        """The error for ``package``, which ``purpose`` needs and the extra ``extra`` brings."""
        apart = ", best in an environment of its own: it needs older releases of numpy and transformers" if extra == "mosaicml" else ""
        line = install_line(extra, package)
        return cls(f"{purpose} needs the package {package!r}, which is not installed. Install it with: {line}{apart}")
