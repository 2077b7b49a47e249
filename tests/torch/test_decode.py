"""From bytes to values, by extension; and from values to a batch."""

from __future__ import annotations

import gzip
import io
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image

from stagekit.errors import ShardError, UsageError
from stagekit.torch import collate
from stagekit.torch.decode import Decoder


def decoded(field: str, data: bytes, decode: Any = "auto") -> Any:
    return Decoder(decode, [field])({"__key__": "k", field: data})[field]


def image(mode: str, kind: str, *, size: tuple[int, int] = (5, 3), **options: Any) -> tuple[bytes, Any]:
    """An image as a file, and its pixels."""
    rng = np.random.default_rng(0)
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = rng.integers(0, 256, (size[1], size[0], bands) if bands > 1 else (size[1], size[0]), dtype=np.uint8)
    made = Image.fromarray(values, mode if mode != "P" else "L")
    if mode == "P":
        made.putpalette([channel for entry in range(256) for channel in (entry, 255 - entry, 7)])
    file = io.BytesIO()
    made.save(file, kind, **options)
    return file.getvalue(), values


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def array(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


class TestImages:
    @pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4)])
    def test_png_keeps_its_channels_and_every_pixel(self, mode: str, channels: int) -> None:
        data, values = image(mode, "PNG")
        pixels = decoded("png", data)
        assert pixels.shape == (channels, 3, 5)
        assert pixels.dtype is torch.uint8
        assert pixels.is_contiguous()
        assert np.array_equal(pixels.permute(1, 2, 0).squeeze(-1).numpy(), values)

    def test_a_palette_becomes_colours(self) -> None:
        data, values = image("P", "PNG")
        pixels = decoded("png", data)
        assert pixels.shape == (3, 3, 5)
        assert np.array_equal(pixels[0].numpy(), values)
        assert np.array_equal(pixels[1].numpy(), 255 - values)
        transparent, _ = image("P", "PNG", transparency=3)
        assert decoded("png", transparent).shape == (4, 3, 5)

    def test_one_bit_and_sixteen_bit_grey(self) -> None:
        file = io.BytesIO()
        Image.new("1", (5, 3), 1).save(file, "PNG")
        assert decoded("png", file.getvalue()).tolist() == [[[255] * 5] * 3]
        deep = np.arange(15, dtype=np.uint16).reshape(3, 5) * 4000
        file = io.BytesIO()
        Image.fromarray(deep).save(file, "PNG")
        pixels = decoded("png", file.getvalue())
        assert pixels.dtype is torch.int32
        assert np.array_equal(pixels[0].numpy(), deep.astype(np.int32))

    @pytest.mark.parametrize("field", ["jpg", "jpeg", "webp", "left.jpg"])
    @pytest.mark.parametrize("mode", ["L", "RGB"])
    def test_photos_are_rgb_whatever_the_file_holds(self, field: str, mode: str) -> None:
        data, _ = image(mode, "WEBP" if field == "webp" else "JPEG")
        pixels = decoded(field, data)
        assert (pixels.shape, pixels.dtype) == ((3, 3, 5), torch.uint8)

    def test_cmyk(self) -> None:
        data, _ = image("CMYK", "JPEG")
        assert decoded("jpg", data).shape == (3, 3, 5)

    def test_a_damaged_image_names_key_and_field(self) -> None:
        data, _ = image("RGB", "PNG", size=(50, 30))
        with pytest.raises(ShardError, match=r"field 'png' of the sample 'k' cannot be decoded"):
            decoded("png", data[: len(data) // 2])
        with pytest.raises(ShardError, match=r"UnidentifiedImageError"):
            decoded("jpg", b"<html>")


class TestOthers:
    @pytest.mark.parametrize(
        ("field", "data", "value"),
        [
            ("cls", b"7", 7),
            ("cls", b" 12\n", 12),
            ("id", b"-3", -3),
            ("index", b"0", 0),
            ("txt", "grüße".encode(), "grüße"),
            ("caption.txt", b"a", "a"),
            ("json", b'{"a": [1, null]}', {"a": [1, None]}),
            ("json.gz", gzip.compress(b"[1]", mtime=0), [1]),
            ("cls.gz", gzip.compress(b"4", mtime=0), 4),
            ("gz", gzip.compress(b"raw", mtime=0), b"raw"),
            ("bin.gz", gzip.compress(b"raw", mtime=0), b"raw"),
            ("bin", b"\0\1", b"\0\1"),
            ("mp4", b"video", b"video"),
        ],
    )
    def test_by_extension(self, field: str, data: bytes, value: Any) -> None:
        found = decoded(field, data)
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool", "float16"])
    def test_npy_is_a_tensor_of_its_type(self, dtype: str) -> None:
        value = np.arange(6).reshape(2, 3).astype(dtype)
        found = decoded("npy", array(value))
        assert isinstance(found, torch.Tensor)
        assert np.array_equal(found.numpy(), value)
        assert found.numpy().dtype == value.dtype

    def test_npy_that_torch_has_no_type_for_stays_an_array(self) -> None:
        assert decoded("npy", array(np.array(["a", "b"]))).tolist() == ["a", "b"]
        assert decoded("npy", array(np.arange(3, dtype=">i4"))).tolist() == [0, 1, 2]

    def test_npy_with_objects_is_refused(self) -> None:
        file = io.BytesIO()
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)
        with pytest.raises(ShardError, match="allow_pickle=False"):
            decoded("npy", file.getvalue())

    def test_npz(self) -> None:
        file = io.BytesIO()
        np.savez(file, a=np.ones(2), b=np.array(3))
        found = decoded("npz", file.getvalue())
        assert found["a"].tolist() == [1, 1]
        assert found["b"].item() == 3

    def test_pt_is_loaded_with_weights_only(self) -> None:
        assert decoded("pt", saved({"x": torch.ones(2)}))["x"].tolist() == [1, 1]

        with pytest.raises(ShardError, match=r"field 'pt' .*[Ww]eights.only"):
            decoded("pt", saved(Decoder))

    def test_an_integer_that_is_none(self) -> None:
        with pytest.raises(ShardError, match=r"field 'cls' of the sample 'k' .*'cat'.*decode=\{'cls': your_function\}"):
            decoded("cls", b"cat")

    def test_the_key_is_left_alone(self) -> None:
        assert Decoder("auto", ["txt"])({"__key__": "a/b", "txt": b"x"}) == {"__key__": "a/b", "txt": "x"}


class TestChoosing:
    def test_nothing_is_decoded(self) -> None:
        assert decoded("cls", b"1", None) == b"1"
        assert not Decoder(None, ["cls"]).active

    def test_names_that_mean_no_field(self) -> None:
        assert Decoder({"cls": None, "png": None, "seg.png": None}, ["cls", "seg.png"]).unused == []
        assert Decoder({"json": None}, ["meta.json.gz"]).unused == []
        assert Decoder({"jpg": None, "cls": None}, ["cls"]).unused == ["jpg"]
        assert Decoder({"jpg": None}, None).unused == []

    def test_functions_of_ones_own_by_field_or_last_extension(self) -> None:
        assert decoded("seg.png", b"x", {"seg.png": len, "png": str}) == 1
        assert decoded("seg.png", b"x", {"png": len}) == 1
        assert decoded("cls", b"1", {"png": len}) == 1
        assert decoded("cls", b"1", {"cls": None}) == b"1"
        assert decoded("raw", b"123", {"raw": int}) == 123

    @pytest.mark.parametrize("field", ["pkl", "x.pickle", "pyd", "pkl.gz"])
    def test_pickles_are_refused_when_the_loader_is_made(self, field: str) -> None:
        with pytest.raises(UsageError, match=r"holds pickles, and unpickling runs whatever code they name.*pickle\.loads"):
            Decoder("auto", [field])

    def test_pickles_are_loaded_when_named(self) -> None:
        assert decoded("pkl", pickle.dumps([1]), {"pkl": pickle.loads}) == [1]
        assert decoded("x.pkl", pickle.dumps([1]), {"pkl": pickle.loads}) == [1]
        assert decoded("pkl.gz", gzip.compress(pickle.dumps([1])), {"pkl": pickle.loads}) == [1]
        assert decoded("pkl", b"raw", {"pkl": None}) == b"raw"

    def test_msgpack_only_where_the_package_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        value = {"text": "ü", "numbers": [1, 2.5, None], "bytes": b"\x00"}
        packed = msgpack.packb(value)
        assert decoded("msgpack", packed) == decoded("msg", packed) == value
        assert decoded("msgpack.gz", gzip.compress(packed, mtime=0)) == value
        with pytest.raises(ShardError, match=r"the field 'msgpack' of the sample .* cannot be decoded"):
            decoded("msgpack", packed[:-1])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert decoded("msgpack", packed) == packed


class TestCollate:
    def test_tensors_and_arrays_of_one_shape_are_stacked(self) -> None:
        batch = collate([{"a": torch.ones(2), "b": np.ones(3, np.float32)}] * 2)
        assert batch["a"].shape == (2, 2)
        assert batch["b"].shape == (2, 3)
        assert batch["b"].dtype is torch.float32

    def test_ragged_ones_stay_a_list(self) -> None:
        batch = collate([{"a": torch.ones(2), "b": np.ones(2)}, {"a": torch.ones(3), "b": np.ones(3)}])
        assert [len(item) for item in batch["a"]] == [2, 3]
        assert isinstance(batch["b"], list)
        assert isinstance(collate([{"a": torch.ones(2)}, {"a": torch.ones(2).int()}])["a"], list)

    @pytest.mark.parametrize(
        ("values", "dtype"), [([1, 2], torch.int64), ([True, False], torch.bool), ([0.5, 1.0], torch.float32), ([np.int32(4)], torch.int32)]
    )
    def test_numbers_become_one_tensor(self, values: list[Any], dtype: torch.dtype) -> None:
        batch = collate([{"x": value} for value in values])
        assert batch["x"].dtype is dtype
        assert batch["x"].tolist() == values

    def test_what_does_not_fit_into_a_tensor_stays_a_list(self) -> None:
        assert collate([{"x": 2**70}, {"x": 1}])["x"] == [2**70, 1]
        assert collate([{"x": 1}, {"x": 0.5}])["x"] == [1, 0.5]
        assert collate([{"x": b"1"}, {"x": b"2"}])["x"] == [b"1", b"2"]
        assert collate([{"x": "a"}, {"x": None}])["x"] == ["a", None]
        assert collate([{"x": np.array(["a"])}])["x"][0].tolist() == ["a"]
        assert collate([{"x": {"n": 1}}, {"x": {"n": 2}}])["x"] == [{"n": 1}, {"n": 2}]

    def test_dicts_of_arrays_are_put_together_by_name(self) -> None:
        batch = collate([{"npz": {"a": torch.ones(2), "b": torch.zeros(1)}}] * 3)
        assert batch["npz"]["a"].shape == (3, 2)

    def test_a_field_that_some_samples_lack(self) -> None:
        batch = collate([{"a": 1, "b": "x"}, {"a": 2}])
        assert batch["a"].tolist() == [1, 2]
        assert batch["b"] == ["x", None]

    def test_tuples_and_bare_values(self) -> None:
        numbers, texts = collate([(1, "a"), (2, "b")])
        assert numbers.tolist() == [1, 2]
        assert texts == ["a", "b"]
        assert collate([torch.ones(2), torch.ones(2)]).shape == (2, 2)
