"""A store in which some keys lead elsewhere: a data set's own objects beside shards that were indexed where they lie."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ..config import StoreConfig
from ..location import Location
from ..progress import Subscriber, ignore
from . import open_store
from .base import Data, ObjectInfo, Store, WrappedStore


class RoutedStore(WrappedStore):
    """``inner``, in which ``get`` and ``head`` of a key in ``routes`` reach the object at that location instead.

    Everything else is ``inner``'s: nothing is ever written or deleted elsewhere, and listings show ``inner`` alone. Each place is opened
    with ``config`` when it is first read. Errors name the object where it lies. A pickled copy reports to nobody.
    """

    def __init__(
        self, inner: Store, routes: Mapping[str, Location], config: StoreConfig | None = None, *, on_event: Subscriber = ignore
    ) -> None:
        super().__init__(inner)
        self._routes = dict(routes)
        self._config = config
        self._on_event = on_event
        self._opened: dict[Location, Store] = {}
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        store, there = self._route(key)
        return store.get(there, start, length, if_match=if_match)

    def head(self, key: str) -> ObjectInfo:
        store, there = self._route(key)
        found = store.head(there)
        return ObjectInfo(key, found.size, found.etag, found.modified_s)

    def _route(self, key: str) -> tuple[Store, str]:
        location = self._routes.get(key)
        if location is None:
            return self.inner, key
        folder = location.parent
        with self._lock:
            store = self._opened.get(folder)
            if store is None:
                store = self._opened[folder] = open_store(folder, self._config, on_event=self._on_event)
        return store, location.name

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "_routes": self._routes, "_config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["inner"], state["_routes"], state["_config"])  # type: ignore[misc]  # the one place that knows all attributes
