"""Other packages over Stagekit's storage: WebDataset's pipelines and MosaicML's ``StreamingDataset``.

Importing it lets WebDataset, where that is installed, open ``s3://`` by itself.
"""

from __future__ import annotations

from contextlib import suppress

from .mosaicml import mosaicml
from .webdataset import register, webdataset

with suppress(ImportError):  # without WebDataset there is nobody to tell; webdataset() says how to install it
    register()

__all__ = ["mosaicml", "webdataset"]
