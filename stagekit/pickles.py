"""What is in a pickle, read without running anything of it: every class and function it names is replaced by an inert stand-in.

Checkpoints of PyTorch hold pickles. Whoever only wants to know which files and steps they tell of need not trust them, nor load torch.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any


class Stand:
    """What a pickle says about one object: ``args`` it was made with, its ``state``, and ``items`` put into it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.items: dict[Any, Any] = {}
        self.members: list[Any] = []

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Stand:
        made = super().__new__(cls)
        Stand.__init__(made)  # protocol 2 and later never call __init__
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """One more member of a list."""
        self.members.append(value)

    def extend(self, values: Any) -> None:
        """More members of a list."""
        self.members.extend(values)

    def add(self, value: Any) -> None:
        """One more member of a set."""
        self.members.append(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Stand:
        return Stand(*args, **kwargs)

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute ``name`` of the object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict  # what torch makes a state of; it takes attributes, and does nothing
        return type(name, (Stand,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - a tensor's bytes, which lie elsewhere
        return None


def may_be(head: bytes) -> bool:
    """Whether a file that begins with ``head``, of four bytes or more, may be a pickle, or a zip of ``torch.save`` with one in it.

    True for every container and object that ``pickle`` and ``torch.save`` write. Old protocols have no mark of their own, so bytes that
    mean something else may look like one, and a pickle that was made by hand to hide may look like none.
    """
    return head.startswith((b"PK\x03\x04", b"c", b"(", b"}", b"]")) or (head[:1] == b"\x80" and b"\x02" <= head[1:2] <= b"\x0f")


def read(data: bytes) -> Any:
    """The plain values of a pickle, with a ``Stand`` for every other object. Raises ``ValueError`` when it is damaged or no pickle."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # what a cut or hostile pickle ends in cannot be listed
        raise ValueError(f"it is no whole pickle ({type(error).__name__}: {error})") from None


def read_saved(path: Path) -> Any:
    """The same for a file of ``torch.save``, whose tensors are left out. Raises ``ValueError``, or ``OSError`` when it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"), None)
            if name is None:
                raise ValueError(f"{path} is a zip and not what torch.save writes")
            return read(archive.read(name))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not what torch.save writes, or is cut ({error})") from None
