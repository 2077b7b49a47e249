"""The pages in a real browser: what they say, that they ask for nothing and run nothing, and that they fit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image

import stagekit

from ..rigs.chromium import Browser, Seen
from .made import a_dataset, a_run

VIEWS: list[tuple[int, Literal["light", "dark"], bool]] = [(1100, "light", True), (1100, "dark", False), (390, "light", True)]


def views(browser: Browser, page: Path) -> list[Seen]:
    """``page`` on a desktop, in the dark without scripts, and on a phone; what must hold of every view is asserted."""
    found = []
    for width, scheme, script in VIEWS:
        seen = browser.look(page, width=width, scheme=scheme, script=script)
        assert seen.complaints == []
        assert [url for url in seen.requests if not url.startswith("data:")] == [page.resolve().as_uri()], "it asks for nothing"
        assert seen.width == width, "nothing is wider than the window"
        assert browser.value("document.title") == f"{browser.value('document.querySelector(`h1`).textContent')} · {kind(seen)}"
        found.append(seen)
    assert found[0].text == found[1].text, "nothing is left out where no script runs"
    bright, dark, phone = (Image.open(io.BytesIO(one.picture)).convert("L") for one in found)
    assert bright.getpixel((2, 2)) > 200  # type: ignore[operator]  # one band, one number
    assert dark.getpixel((2, 2)) < 60  # type: ignore[operator]  # the same
    assert phone.width == 2 * 390
    for one in (bright, dark, phone):
        assert len(one.getcolors(256) or range(256)) > 40, "there is something to see"
    return found


def kind(seen: Seen) -> str:
    return seen.text.splitlines()[0].lower()


@pytest.mark.timeout(300)
def test_a_run(chromium: Browser, tmp_path: Path) -> None:
    url = a_run(tmp_path / "run")
    assert stagekit.teardown(runs=[url]).answer == "NO"
    stagekit.info(url, html=tmp_path / "run.html", price_per_gb=0.09)
    text = views(chromium, tmp_path / "run.html")[0].text
    words = " ".join(text.split())
    for told in (
        f"RUN {url} Begun 2023-11-14 22:13:20 UTC",
        "Newest step 600 epoch 6",
        "Lag, median 5.0 s at most 15 s",
        "Not sent again 28 % 500 kB of 1.80 MB",
        "Requests 1,745 1 finished training",
        "Last verdict NO on 20",
        "the run lies on a disk of this machine, which goes with it",
        "unfinished: step 650 (generation 1): no commit",
        "damaged: ",
        "s3://my-bucket/digits 1,333 0 B 8.20 GB 0.74",
        "together 1,745 1.30 MB 8.20 GB 0.74",
        "600 6 2026-09-21 15:13:20 UTC 5.0 s 40.0 kB/s 300 kB 33 % 2 files",
        "<script>document.title='taken'</script><b> 2",
    ):
        assert told in words, told
    charts = {"Saves, uploads and verifications over time": 18, "Seconds from save to verification": 12}
    charts |= {"Bytes a second from save to verification": 6, "Bytes of each checkpoint": 11}
    for name, marks in charts.items():
        drawn = f"document.querySelector(`svg[aria-label='{name}']`).querySelectorAll('circle, rect').length"
        assert chromium.value(drawn) == marks, name
    assert "step 400: verified 15 s after it was saved" in chromium.value("document.body.textContent")


@pytest.mark.timeout(300)
def test_a_data_set(chromium: Browser, tmp_path: Path) -> None:
    url = a_dataset(tmp_path / "data")
    found = stagekit.info(url, html=tmp_path / "data.html")
    seen = views(chromium, tmp_path / "data.html")[2]
    words = " ".join(seen.text.split())
    for told in (
        "Samples 6",
        f"Digest {found.digest}",  # type: ignore[union-attr]  # it is a data set
        "The first 6 samples",
        "a short text",
        "<script>document.title='taken'</script>\"><img src=http://elsewhere.example/x",
        "ende �gnp.exe",
        "jpg 80 B",
        "<svg xmlns=",
        "üü…",
    ):
        assert told in words, told
    assert "with a" not in words, "what has a bell is no text"
    sides = "[...document.images].map(one => [one.naturalWidth, one.width, one.alt])"
    assert chromium.value(sides) == [[240, pytest.approx(132, abs=60), "jpg of plain"], [8, 96, "jpg of tiny"]]
    assert chromium.value("document.querySelectorAll('script, a, link, iframe, object').length") == 0
    assert chromium.value("document.querySelectorAll(`svg[aria-label='How many samples are of which size'] rect`).length") > 0
