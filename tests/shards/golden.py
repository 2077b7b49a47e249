"""The golden data set in tests/golden. A change of these bytes is a change of the format and needs a new version number.

``python -m tests.shards.golden`` writes the files again from the hand-made construction, never from the package.
"""

from __future__ import annotations

from pathlib import Path

from . import handmade

FOLDER = Path(__file__).parents[1] / "golden"

PICTURE = bytes(range(256)) * 3
LONG = "train/" + "very-long-directory-name/" * 4 + "picture"

Samples = list[tuple[str, list[tuple[str, bytes]]]]

SHARDS: list[Samples] = [
    [
        ("a", [("cls", b"3"), ("png", PICTURE), ("seg.png", b"")]),
        ("dir.with.dots/é — 例", [("json", b'{"x": 1}')]),
        (LONG, [("txt", b"t" * 512)]),
    ],
    [("z", [("cls", b"4"), ("png", PICTURE[:513])])],
]


def tar(samples: Samples) -> tuple[bytes, list[int]]:
    out = b""
    offsets = []
    for key, fields in samples:
        offsets.append(len(out))
        for field, data in fields:
            name = f"{key}.{field}".encode()
            prefix = b""
            if len(name) > 100:
                assert name.startswith(b"train/very-long-directory-name/")
                # The first slash that leaves at most 100 bytes: here the one behind "train".
                prefix, name = b"train/very-long-directory-name", name.removeprefix(b"train/very-long-directory-name/")
                assert len(name) <= 100
                assert len(b"very-long-directory-name/" + name) > 100
            out += handmade.member(name, data, prefix=prefix)
    return out + handmade.END, [*offsets, len(out)]


def files() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    records: list[dict[str, object]] = []
    fields: dict[str, dict[str, int]] = {}
    for number, samples in enumerate(SHARDS):
        data, offsets = tar(samples)
        index = b"".join(offset.to_bytes(8, "little") for offset in offsets)
        body = data[: -len(handmade.END)]
        blocks = handmade.block_table([(0, 0, len(body), len(samples), body)])
        name = f"shards/00000{number}"
        found[f"{name}.tar"], found[f"{name}.tar.idx"], found[f"{name}.blocks"] = data, index, blocks
        records.append(
            {
                "name": f"{name}.tar",
                "bytes": len(data),
                "samples": len(samples),
                "sha256": handmade.sha256(data),
                "idx_sha256": handmade.sha256(index),
                "blocks_sha256": handmade.sha256(blocks),
                "block_samples": [len(samples)],
            }
        )
        for _, parts in samples:
            for field, payload in parts:
                totals = fields.setdefault(field, {"samples": 0, "bytes": 0})
                totals["samples"] += 1
                totals["bytes"] += len(payload)
    sizes = [len(found[str(record["name"])]) for record in records]
    digest = handmade.sha256(
        b"".join(f"{record['bytes']} {record['samples']} {record['sha256']} {record['blocks_sha256']}\n".encode() for record in records)
    )
    found["manifest.json"] = handmade.manifest(
        {
            "format": "stagekit-dataset",
            "version": 1,
            "samples": sum(len(samples) for samples in SHARDS),
            "bytes": sum(sizes),
            "fields": fields,
            "shards": records,
            "largest_block": max(sizes) - 1024,
            "digest": digest,
        }
    )
    found["wids.json"] = handmade.canonical(
        {
            "__kind__": "wids-shard-index-v1",
            "wids_version": 1,
            "name": f"stagekit-{digest[:16]}",
            "shardlist": [{"url": record["name"], "nsamples": record["samples"], "filesize": record["bytes"]} for record in records],
        }
    )
    return found


if __name__ == "__main__":
    for path, content in files().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_bytes(content)
