"""From a field's bytes to the value that its extension stands for.

======================  ==========================================================================================
``jpg jpeg webp``       uint8 tensor 3 x height x width: whatever the file holds is converted to RGB
``png``                 uint8 tensor channels x height x width: grey 1, grey and alpha 2, RGB 3, RGBA 4; a palette becomes RGB or RGBA;
                        16 bit grey an int32 tensor
``cls id index``        int
``txt text``            str (UTF-8)
``json``                the parsed value
``npy``                 tensor where torch has the type, else numpy array
``npz``                 dict of the same
``pt pth``              what was saved, loaded with ``weights_only=True``
``msgpack``             the unpacked value where the package ``msgpack`` is installed, else bytes
``….gz``                unpacked, then by the extension before it
``pkl pickle``          refused: unpickling runs whatever code the file names. ``decode={"pkl": pickle.loads}`` allows it by name
anything else           bytes
======================  ==========================================================================================

The last extension decides: ``seg.png`` is a ``png``.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from ..dataset import Sample
from ..errors import MissingExtra, ShardError, UsageError

Decode = Literal["auto"] | Mapping[str, Callable[[bytes], Any] | None] | None
Function = Callable[[bytes], Any]

_PICKLES = ("pkl", "pickle", "pyd")


class Decoder:
    """Turns samples of raw bytes into samples of values.

    ``decode`` is ``"auto"`` (by extension), ``None`` (bytes stay bytes), or a mapping from field (or last extension) to a function of
    the bytes, ``None`` meaning that they stay; fields it does not name are decoded by extension. ``fields`` are the data set's: one that
    holds pickles and is not named is refused here, before anything is read (``UsageError``). Where they are not known (``None``), each is
    looked at when it is first met. ``unused`` are the names in ``decode`` that mean no field.
    """

    def __init__(self, decode: Decode, fields: Iterable[str] | None) -> None:
        if not (decode is None or decode == "auto" or isinstance(decode, Mapping)):
            raise UsageError(f"decode: {decode!r} is none of 'auto', None, or a mapping from field to function")
        if isinstance(decode, Mapping):
            for name, function in decode.items():
                if function is not None and not callable(function):
                    raise UsageError(f"decode: {function!r} for {name!r} is no function of the field's bytes; None keeps them as they are")
        self._functions: dict[str, Function | None] = {}
        self._decode = decode
        self._learns = fields is None and decode is not None
        self._used: set[str] = set()
        if decode is not None:
            for field in fields or ():
                self._functions[field] = self._choose(field)
        self.unused = [] if fields is None or not isinstance(decode, Mapping) else sorted(map(str, decode.keys() - self._used))
        self.active = self._learns or any(self._functions.values())

    def __reduce__(self) -> tuple[type[Decoder], tuple[Decode, tuple[str, ...] | None]]:
        # Some functions are made here, and could not be sent.
        return Decoder, (self._decode, None if self._learns else tuple(self._functions))

    def _choose(self, field: str) -> Function | None:
        last = field.rpartition(".")[2]
        if isinstance(self._decode, Mapping):
            named = [name for name in (field, last) if name in self._decode]
            self._used.update(named)  # an extension is of use even where each field that has it is named itself
            if named:
                return self._decode[named[0]]
        if last in _PICKLES:
            raise UsageError(
                f"the field {field!r} holds pickles, and unpickling runs whatever code they name; if you trust whoever made this data set, "
                f"pass decode={{{field!r}: pickle.loads}}, else decode={{{field!r}: None}} to get the bytes"
            )
        if last == "gz":
            inner = self._choose(field.removesuffix(".gz")) if "." in field else None
            return gzip.decompress if inner is None else lambda data: inner(gzip.decompress(data))
        if last in ("msgpack", "msg"):
            return _msgpack() if importlib.util.find_spec("msgpack") else None
        return _BY_EXTENSION.get(last)

    def __call__(self, sample: Sample) -> Sample:
        """The decoded sample. Raises ``ShardError`` naming key and field when the bytes are not what the extension says."""
        functions = self._functions
        if not self.active:
            return sample
        if self._learns:
            for field in sample:
                if field not in functions:
                    functions[field] = None if field.startswith("__") else self._choose(field)
        for field, value in sample.items():
            function = functions.get(field)
            if function is not None:
                try:
                    sample[field] = function(value)
                except MissingExtra:
                    raise
                except Exception as error:
                    raise ShardError(
                        f"the field {field!r} of the sample {sample['__key__']!r} cannot be decoded ({type(error).__name__}: {error}); "
                        f"pass decode={{{field!r}: your_function}} when it is of another kind, or on_bad='skip' to leave such samples out"
                    ) from error
        return sample


def _photo(data: bytes) -> torch.Tensor:
    with _open_image(data) as image:
        return _pixels(image if image.mode == "RGB" else image.convert("RGB"))


def _png(data: bytes) -> torch.Tensor:
    with _open_image(data) as image:
        if image.mode == "P":
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        elif image.mode == "1":
            image = image.convert("L")
        return _pixels(image)


def _open_image(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra.of("torch", "pillow", "decoding images") from error
    return Image.open(io.BytesIO(data))


def _pixels(image: Any) -> torch.Tensor:
    values = np.array(image)
    if values.dtype == np.uint16:
        values = values.astype(np.int32)
    pixels = torch.from_numpy(values)
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def _text(data: bytes) -> str:
    return data.decode()


def _integer(data: bytes) -> int:
    return int(data.decode("ascii"))


def _npy(data: bytes) -> Any:
    return _tensor(np.load(io.BytesIO(data), allow_pickle=False))


def _npz(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: _tensor(arrays[name]) for name in arrays.files}


def _tensor(array: Any) -> Any:
    """``array`` as a tensor; itself where torch has no such type (text, dates, foreign byte order)."""
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return array


def _pt(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _msgpack() -> Function:
    unpack: Function = importlib.import_module("msgpack").unpackb
    return unpack


_BY_EXTENSION: dict[str, Function] = {
    "jpg": _photo,
    "jpeg": _photo,
    "webp": _photo,
    "png": _png,
    "cls": _integer,
    "id": _integer,
    "index": _integer,
    "txt": _text,
    "text": _text,
    "json": json.loads,
    "npy": _npy,
    "npz": _npz,
    "pt": _pt,
    "pth": _pt,
}
