"""The manifest: what comes back, and everything that is refused."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.errors import ManifestError
from stagekit.shards.index import FieldTotals
from stagekit.shards.manifest import Manifest, ShardRecord, blocks_name, index_name, shard_name, wids_json

from . import golden, handmade

SOURCE = "s3://bucket/digits/manifest.json"
GOLDEN: dict[str, Any] = json.loads((golden.FOLDER / "manifest.json").read_bytes())

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    shards = []
    urls = st.sampled_from([None, "s3://bucket/a b/x.tar", "/data/é.tar"])
    for number in range(draw(st.integers(1, 4))):
        counts = draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=4))
        size = sum(counts) * 512 * 3 + 1024 + draw(st.integers(0, 2**40))
        shards.append(ShardRecord(shard_name(number), size, sum(counts), draw(HEX), draw(HEX), draw(HEX), tuple(counts), draw(urls)))
    samples = sum(shard.samples for shard in shards)
    fields = {"jpg": FieldTotals(samples, draw(st.integers(0, samples)))}
    for name in draw(st.sets(st.text("abcé.", min_size=1, max_size=8), max_size=1)):
        fields[name] = FieldTotals(draw(st.integers(1, samples)), 0)
    largest = draw(st.integers(512, max(shard.bytes for shard in shards) - 1024))
    return Manifest(tuple(shards), fields, largest)


@given(manifests())
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    again = Manifest.from_bytes(data, source=SOURCE)
    assert again == manifest
    assert again.to_bytes() == data
    assert again.digest == manifest.digest
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert data.isascii()
    assert data.endswith(b"}\n")


@given(manifests(), st.data())
def test_any_changed_byte_and_any_cut_is_found(manifest: Manifest, data: st.DataObject) -> None:
    raw = manifest.to_bytes()
    at = data.draw(st.integers(0, len(raw) - 2))
    changed = raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
    with pytest.raises(ManifestError, match=SOURCE):
        Manifest.from_bytes(changed, source=SOURCE)
    with pytest.raises(ManifestError, match=SOURCE):
        Manifest.from_bytes(raw[:at], source=SOURCE)


@given(st.binary(max_size=200))
def test_rubbish_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError, match="is no valid manifest"):
        Manifest.from_bytes(data, source=SOURCE)


def test_the_digest_is_over_one_line_a_shard_without_names() -> None:
    lines = "".join(f"{s['bytes']} {s['samples']} {s['sha256']} {s['blocks_sha256']}\n" for s in GOLDEN["shards"])
    manifest = Manifest.from_bytes(handmade.manifest(GOLDEN), source=SOURCE)
    assert manifest.digest == handmade.sha256(lines.encode())
    renamed = tuple(ShardRecord(f"other/{number}.tar", *list(vars_of(shard))[1:]) for number, shard in enumerate(manifest.shards))
    assert Manifest(renamed, manifest.fields, manifest.largest_block).digest == manifest.digest
    assert Manifest(manifest.shards[::-1], manifest.fields, manifest.largest_block).digest != manifest.digest


def vars_of(shard: ShardRecord) -> list[Any]:
    return [getattr(shard, name) for name in ShardRecord.__slots__]


def test_blanks_and_another_order_of_keys_are_accepted() -> None:
    spaced = json.dumps({**dict(reversed(GOLDEN.items())), "checksum": "0" * 64}, indent=2).encode()
    raw = spaced.replace(b"0" * 64, handmade.sha256(spaced).encode())
    assert Manifest.from_bytes(raw, source=SOURCE).digest == GOLDEN["digest"]


def test_a_field_called_checksum_is_no_trouble() -> None:
    shard = ShardRecord("shards/000000.tar", 4096, 1, "0" * 64, "1" * 64, "2" * 64, (1,))
    manifest = Manifest((shard,), {"checksum": FieldTotals(1, 5), 'x"checksum":"': FieldTotals(1, 1)}, 1024)
    assert Manifest.from_bytes(manifest.to_bytes(), source=SOURCE) == manifest


@pytest.mark.parametrize("version", [2, 0, "1", None, True, 1.5])
def test_another_version_is_told(version: object) -> None:
    with pytest.raises(
        ManifestError, match=re.escape(f"{SOURCE} is a manifest of version {version!r}, and this release reads version 1. Install")
    ):
        Manifest.from_bytes(json.dumps({**GOLDEN, "version": version, "novelty": 1}).encode(), source=SOURCE)


def shards(**changes: object) -> dict[str, Any]:
    return {**GOLDEN, "shards": [{**GOLDEN["shards"][0], **changes}, GOLDEN["shards"][1]]}


def fields(**changes: object) -> dict[str, Any]:
    return {**GOLDEN, "fields": {**GOLDEN["fields"], **changes}}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOLDEN.items() if name != key}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({**GOLDEN, "format": "other"}, "its format is not 'stagekit-dataset'"),
        (without("samples"), "the manifest lacks 'samples'"),
        (without("fields"), "the manifest lacks 'fields'"),
        ({**GOLDEN, "novelty": 1}, "the manifest has 'novelty', which version 1 does not know"),
        ({**GOLDEN, "samples": 5}, "samples is 5, and its shards add up to 4"),
        ({**GOLDEN, "samples": True}, "samples is True, not a number"),
        ({**GOLDEN, "samples": 4.0}, "samples is 4.0, not a number"),
        ({**GOLDEN, "bytes": 1}, "bytes is 1, and its shards add up to 9728"),
        ({**GOLDEN, "digest": "0" * 63 + "1"}, "and its shards give"),
        ({**GOLDEN, "shards": []}, "it lists no shard"),
        ({**GOLDEN, "shards": {}}, "shards is not a list"),
        ({**GOLDEN, "shards": [1]}, "shard 0 is not an object"),
        ({**GOLDEN, "shards": [GOLDEN["shards"][0]] * 2}, "the shard 'shards/000000.tar' is listed twice"),
        ({**GOLDEN, "largest_block": 511}, "largest_block is 511, which fits no shard"),
        ({**GOLDEN, "largest_block": 6144 - 1023}, "largest_block is 5121, which fits no shard"),
        ({**GOLDEN, "largest_block": "8"}, "largest_block is '8', not a number"),
        (shards(name="../x.tar"), "shard 0 is called '../x.tar'; a name is relative, without '..', and ends in .tar"),
        (shards(name="/etc/x.tar"), "is called '/etc/x.tar'"),
        (shards(name="a//x.tar"), "is called 'a//x.tar'"),
        (shards(name="./x.tar"), "is called './x.tar'"),
        (shards(name="a\\x.tar"), "is called"),
        (shards(name="a\nx.tar"), "is called"),
        (shards(name="a\u202ex.tar"), "is called"),
        (shards(name="a/.tar"), "is called 'a/.tar'"),
        (shards(name="x.zip"), "is called 'x.zip'"),
        (shards(name=""), "is called ''"),
        (shards(name=7), "shard 0 has a name that is no text"),
        (shards(novelty=1), "shard 0 has 'novelty', which version 1 does not know"),
        (shards(bytes=-1), "bytes of shard 0 is -1, not a number"),
        (shards(bytes=2**63), "not a number from 0 to 2^63 - 1"),
        (shards(bytes=1000), "shard 0 has 1000 bytes, too few for 3 samples"),
        (shards(bytes="6144"), "bytes of shard 0 is '6144'"),
        (shards(samples=2), "shard 0 has 2 samples, and its blocks 3"),
        (shards(block_samples=[1, 1]), "shard 0 has 3 samples, and its blocks 2"),
        (shards(block_samples=[3, 0]), "shard 0 has a block without a sample"),
        (shards(block_samples=[4, -1]), "block_samples of shard 0 is -1"),
        (shards(block_samples=[]), "shard 0 has 3 samples, and its blocks 0"),
        (shards(block_samples=3), "block_samples of shard 0 is not a list"),
        (shards(block_samples=[[3]]), "block_samples of shard 0 is [3]"),
        (shards(block_samples=[], samples=0), "shard 0 has 0 samples"),
        (shards(sha256="A" * 64), "sha256 of shard 0 is 'AAAA"),
        (shards(sha256="a" * 63), "not 64 hexadecimal digits"),
        (shards(idx_sha256=None), "idx_sha256 of shard 0 is None"),
        (shards(blocks_sha256=""), "blocks_sha256 of shard 0 is ''"),
        ({**GOLDEN, "fields": []}, "fields is not an object"),
        ({**GOLDEN, "fields": {}}, "its fields are in fewer samples than the 4 there are"),
        (fields(jpg=3), "the field 'jpg' is not an object"),
        (fields(jpg={"samples": 1}), "the field 'jpg' lacks 'bytes'"),
        (fields(jpg={"samples": 5, "bytes": 1}), "the field 'jpg' is in 5 of 4 samples"),
        (fields(jpg={"samples": 0, "bytes": 0}), "the field 'jpg' is in 0 of 4 samples"),
        (fields(jpg={"samples": 1, "bytes": -1}), "bytes of the field 'jpg' is -1"),
        (fields(jpg={"samples": 1, "bytes": 10**6}), "more than the shards' 9728"),
        (fields(JPG={"samples": 1, "bytes": 1}), "'JPG' is no field name"),
        (fields(__key__={"samples": 1, "bytes": 1}), "'__key__' is no field name"),
    ],
)
def test_what_does_not_hold_together_is_refused(value: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(f"{SOURCE} is no valid manifest: ")) as caught:
        Manifest.from_bytes(handmade.manifest(value), source=SOURCE)
    assert words in str(caught.value)
    assert "Publish the data set again" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.replace(b'"format"', b'"version":1,"format"'), "the key 'version' occurs twice in one object"),
        (lambda raw: raw.replace(b'"samples":4', b'"samples":NaN'), "it holds NaN, which is not JSON"),
        (lambda raw: raw.replace(b'"samples":4', b'"samples":' + b"9" * 5000), "it holds a number that is too long"),
        (lambda raw: b"\xff" + raw, "it is not UTF-8 at byte 0"),
        (lambda raw: b"\xef\xbb\xbf" + raw, "it is not JSON"),
        (lambda raw: b"[" * 100_000, "it is nested too deeply"),
        (lambda raw: raw + b"{}", "it is not JSON (Extra data"),
        (lambda raw: b"[1]", "its format is not"),
        (lambda raw: b"<html>not found</html>", "it is not JSON"),
        (lambda raw: raw.replace(b'"png"', b'"pn\\u0067"'), "it was changed or damaged"),
        (lambda raw: re.sub(rb'"checksum":"[0-9a-f]{64}"', b'"checksum":"short"', raw), "checksum is 'short', not 64 hexadecimal digits"),
        (lambda raw: re.sub(rb'"checksum":"[0-9a-f]{64}"', b'"checksum":7', raw), "checksum is 7, not 64 hexadecimal digits"),
    ],
)
def test_damaged_text_is_refused(change: Callable[[bytes], bytes], words: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(f"{SOURCE} is no valid manifest: ")) as caught:
        Manifest.from_bytes(change(handmade.manifest(GOLDEN)), source=SOURCE)
    assert words in str(caught.value)


def test_shards_that_do_not_fit_make_no_manifest() -> None:
    record = ShardRecord("shards/000000.tar", 4096, 2, "0" * 64, "1" * 64, "2" * 64, (1,))
    with pytest.raises(ManifestError, match="these shards make no manifest: shard 0 has 2 samples, and its blocks 1"):
        Manifest((record,), {"jpg": FieldTotals(2, 1)}, 1024)


def test_names() -> None:
    assert shard_name(7) == "shards/000007.tar"
    assert shard_name(1_234_567) == "shards/1234567.tar"
    assert index_name("shards/000007.tar") == "shards/000007.tar.idx"
    assert blocks_name("shards/000007.tar") == "shards/000007.blocks"


def test_wids_json_is_what_wids_asks_for() -> None:
    """The checks of wids_specs.check_shards and resolve_dsdesc, and URLs that resolve beside the file."""
    manifest = Manifest.from_bytes(handmade.manifest(GOLDEN), source=SOURCE)
    found = json.loads(wids_json(manifest))
    assert found["wids_version"] == 1
    assert [(shard["url"], shard["nsamples"]) for shard in found["shardlist"]] == [("shards/000000.tar", 3), ("shards/000001.tar", 1)]
    assert found["name"].startswith("stagekit-")


def test_a_shard_that_lies_elsewhere_keeps_the_digest_and_has_a_url() -> None:
    there = Manifest.from_bytes((golden.FOLDER / "manifest.json").read_bytes(), source=SOURCE)
    apart = Manifest(tuple(replace(shard, url=f"s3://bucket/{shard.name}") for shard in there.shards), there.fields, there.largest_block)
    assert apart.digest == there.digest
    assert Manifest.from_bytes(apart.to_bytes(), source="m") == apart
    assert b'"url"' not in there.to_bytes()
    assert apart.gathered().to_bytes() == there.to_bytes()
    assert [shard["url"] for shard in json.loads(apart.to_bytes())["shards"]] == [f"s3://bucket/{shard.name}" for shard in there.shards]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x.tar",
        "./x.tar",
        "../x.tar",
        "/a/../x.tar",
        "/a//x.tar",
        "/a/x.tgz",
        "/.tar",
        "s3://bucket/../x.tar",
        "s3://bucket/a//x.tar",
        "s3://bucket/a\\x.tar",
        "s3://bucket/\u202ex.tar",
        "s3://key:secret@bucket/x.tar",
        "s3://bucket/x.tar/",
        "S3://bucket/x.tar",
        "file:///a/x.tar",
        "s3:bucket/x.tar",
        5,
        None,
        ["s3://bucket/x.tar"],
    ],
)
def test_urls_that_no_shard_can_have(url: object) -> None:
    value = json.loads((golden.FOLDER / "manifest.json").read_bytes())
    value["shards"][0]["url"] = url
    with pytest.raises(
        ManifestError, match=r"the URL of shard 0 is null|shard 0 has a URL that is no text|shard 0 lies at .*; a URL is absolute"
    ):
        Manifest.from_bytes(handmade.manifest(value), source="m")


@pytest.mark.parametrize("url", ["/a/x.tar", "s3://bucket/x.tar", "s3://profile@bucket/a b/%2F+#.tar", "hf://datasets/me/it/x.tar"])
def test_urls_that_a_shard_can_have(url: str) -> None:
    value = json.loads((golden.FOLDER / "manifest.json").read_bytes())
    value["shards"][0]["url"] = url
    assert Manifest.from_bytes(handmade.manifest(value), source="m").shards[0].url == url
