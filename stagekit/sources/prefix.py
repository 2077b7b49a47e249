"""Objects below a URL as a source: listed once, fetched by parallel GET when their turn comes, never copied to this disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..config import StoreConfig
from ..errors import Conflict, Denied, InvalidReply, NotFound, SourceError
from ..location import Location
from ..shards.plan import PlannedField, PlannedSample
from ..store import open_store
from ..store.base import Data, Store
from ..transfer.fetch import fetch_pieces
from .base import Listing, Payload
from .files import FileRules, Files, text_of

_SMALL = 2**20  # a sample up to this size is fetched whole, several at a time
_READERS = 16


@dataclass(frozen=True)
class PrefixSource:
    """The objects below ``where`` that ``rules`` let through, sorted by name, as if they were files in a folder.

    ``where`` is a location, or a store that is open already. Objects with a ``/`` at the end (a web console's "folders") are passed over.
    """

    where: Location | Store
    rules: FileRules = field(default_factory=FileRules)
    config: StoreConfig | None = None

    @property
    def name(self) -> str:
        return str(self.location)

    @property
    def location(self) -> Location:
        return self.where if isinstance(self.where, Location) else self.where.location

    @property
    def readers(self) -> int:
        return _READERS

    def _store(self) -> Store:
        return open_store(self.where, self.config)

    def listing(self) -> Listing:
        files = Files(self.name, self.rules)
        refused: set[str] = set()
        entered: set[str] = set()
        empty = True
        for info in self._store().list():
            empty = False
            if info.key.endswith("/"):
                continue
            if self._enter(files, info.key, entered, refused):
                files.add(info.key, info.size, info.etag)
        if empty:
            self._refuse_object()
        return files.listing()

    def _refuse_object(self) -> None:
        """Say so when the URL is that of one object, with nothing below it."""
        if not isinstance(self.where, Location) or not self.where.path:
            return
        try:
            open_store(self.where.parent, self.config).head(self.where.name)
        except (NotFound, Denied):
            return
        raise SourceError(f"reading {self.location}: it is one object; a source is the prefix below which the files to pack lie")

    def _enter(self, files: Files, key: str, entered: set[str], refused: set[str]) -> bool:
        """Whether every directory on the way to ``key``, and itself, may be packed; each directory is asked for and counted once."""
        slash = key.find("/")
        while slash >= 0:
            directory = key[:slash]
            if directory in refused:
                return False
            if directory not in entered:
                if not files.may_enter(directory):
                    refused.add(directory)
                    return False
                entered.add(directory)
                files.add_directory(directory)
            slash = key.find("/", slash + 1)
        return files.may_enter(key)

    def read(self, sample: PlannedSample) -> Payload:
        store = self._store()
        small = sum(planned.size for planned in sample.fields) <= _SMALL
        payload: Payload = []
        for planned in sample.fields:
            text = text_of(planned.ref)
            if text is not None:
                payload.append((planned.field, planned.size, (text,)))
            elif small:
                payload.append((planned.field, planned.size, (self._whole(store, planned),)))
            else:
                payload.append((planned.field, planned.size, self._pieces(store, planned)))
        return payload

    def _whole(self, store: Store, planned: PlannedField) -> Data:
        key = planned.ref
        try:
            try:
                data = store.get(key, if_match=_etag(planned))
            except Conflict:
                info = store.head(key)
                if info.size != planned.size or info.etag is not None:
                    raise
                data = store.get(key)  # a store that tells etags in its listings alone
        except Conflict as error:
            if info.size != planned.size:
                raise self._changed(key, planned.size, info.size) from error
            raise self._error(key, error) from error
        except (NotFound, Denied) as error:
            raise self._error(key, error) from error
        if len(data) != planned.size:
            raise self._changed(key, planned.size, len(data))
        return data

    def _pieces(self, store: Store, planned: PlannedField) -> Iterator[Data]:
        key, size = planned.ref, planned.size
        try:
            info = store.head(key)
            if info.size != size:
                raise self._changed(key, size, info.size)
            listed = _etag(planned)
            yield from fetch_pieces(store, key, size=size, etag=listed if listed and info.etag else info.etag)
        except (NotFound, Denied, Conflict, InvalidReply) as error:
            raise self._error(key, error) from error

    def _error(self, key: str, error: Exception) -> SourceError:
        if isinstance(error, NotFound):
            reason = "it was there when the source was listed and is gone"
        elif isinstance(error, Denied):
            reason = f"it may not be read ({error})"
        else:
            reason = "it was replaced after the source was listed"
        return self._source_error(key, reason)

    def _changed(self, key: str, size: int, found: int) -> SourceError:
        return self._source_error(
            key, f"it {'shrank' if found < size else 'grew'} from {size} to {found} bytes after the source was listed"
        )

    def _source_error(self, key: str, reason: str) -> SourceError:
        return SourceError(
            f"reading {self.location / key}: {reason}; run again once the source stands still, or with --on-bad skip to count such "
            "objects and go on"
        )


def _etag(planned: PlannedField) -> str | None:
    """The etag that the object had when it was listed, where the store told one."""
    return planned.mark if isinstance(planned.mark, str) else None
