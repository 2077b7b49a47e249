"""What every command that makes a data set says about it: its size and fields, and the lines that stream it."""

from __future__ import annotations

from typing import Any

from ..config import StoreConfig
from ..location import Location
from ..shards.manifest import Manifest
from ..units import counted, format_count, format_size


def dataset_lines(manifest: Manifest) -> list[str]:
    """A published data set as text: how much it is, and a line for each field."""
    return [
        f"  {counted(manifest.samples, 'sample')} in {counted(len(manifest.shards), 'shard')}, {format_size(manifest.bytes)}, "
        f"digest {manifest.digest[:16]}",
        *(
            f"  {name}: {format_count(totals.samples)} × {format_size(totals.bytes / totals.samples)}"
            for name, totals in manifest.fields.items()
        ),
    ]


def dataset_record(location: Location, manifest: Manifest) -> dict[str, Any]:
    """The same for programs."""
    return {
        "url": str(location),
        "digest": manifest.digest,
        "samples": manifest.samples,
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "fields": {name: {"samples": totals.samples, "bytes": totals.bytes} for name, totals in manifest.fields.items()},
    }


def streaming_code(location: Location, manifest: Manifest, config: StoreConfig | None) -> list[str]:
    """The lines of Python that stream the data set at ``location``, with the settings it was made with."""
    options = [
        f"{name}={getattr(config, name)!r}"
        for name in ("endpoint_url", "region", "profile", "ca_bundle", "anonymous")
        if config is not None and getattr(config, name)
    ]
    store = f", store=stagekit.StoreConfig({', '.join(options)})" if options else ""
    return [
        "import stagekit.torch",
        f"for batch in stagekit.torch.StreamLoader({str(location)!r}, batch_size={min(64, manifest.samples)}{store}):",
        f"    print({', '.join(f'batch[{name!r}]' for name in manifest.fields)})",
    ]


def stream_it(code: list[str]) -> list[str]:
    """``code`` as the last lines of a command's text."""
    return ["stream it:", *(f"  {line}" for line in code)]
