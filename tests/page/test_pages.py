"""Pages without a browser: where they are written, what is computed for them, what is made of samples."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest

import stagekit
from stagekit.cli import main
from stagekit.errors import OutOfSpace, UsageError
from stagekit.page import file
from stagekit.page.chart import Column, Mark, columns, nice_step, timeline
from stagekit.page.history import passages
from stagekit.page.markup import joined, tag
from stagekit.page.samples import shown
from stagekit.page.words import on_axis
from stagekit.report import RunInfo
from stagekit.store.directory import DirectoryStore
from stagekit.verdict.last import last_verdict

from ..made import make_dataset, make_run
from ..stream.build import build
from .made import BEGAN_S, a_run, picture


def full(path: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_page_takes_the_place_of_a_page_and_of_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "digits")
    make_dataset(DirectoryStore(url))
    target = tmp_path / "page.html"
    assert main(["info", url, "--html", str(target), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["event"], one.get("samples")) for one in records] == [("dataset", 24), ("message", None)]
    assert records[1]["text"] == f"{target} is a page of it, to be opened in a browser"
    first = target.read_text()
    assert main(["info", url, "--html", str(target), "--peek", "2"]) == 0
    assert "The first 2 samples" in target.read_text()
    assert "The first 12 samples" in first
    assert main(["info", url, "--html", str(target), "--peek", "0"]) == 0
    without = target.read_text()
    assert "000000" in first
    assert [words for words in ("000000", "data:image", "<pre", "The first") if words in without] == []
    assert main(["info", url, "--html", str(target), "--peek", "2"]) == 0
    with pytest.raises(UnicodeEncodeError):
        file.write(target, "\ud800")
    with monkeypatch.context() as patched, pytest.raises(OutOfSpace, match=r"no space is left to write .*page\.html; free some"):
        patched.setattr(Path, "replace", full)
        file.write(target, "<!doctype html>")
    assert "The first 2 samples" in target.read_text(), "a failure leaves the older page"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits", "page.html"]
    capsys.readouterr()
    (tmp_path / "thesis.html").write_text("<!doctype html>\n<p>mine")
    run = tmp_path / "run"
    make_run(DirectoryStore(str(run)))
    for where, html, complaint in (
        (url, tmp_path / "thesis.html", "thesis.html exists and is no page that stagekit info wrote; name another file, or remove it"),
        (url, tmp_path, f"is a directory; name a file in it, such as {tmp_path / 'page.html'}"),
        (url, tmp_path / "no" / "page.html", f"{tmp_path / 'no'} is no directory, so page.html cannot be written there; make it first"),
        (url, "", "html: the file's name is empty; name one, such as page.html"),
        (url, "/proc/page.html", "html: /proc/page.html cannot be written (No such file or directory); name a file in another directory"),
        (f"{run}@100", target, f"@100 is one checkpoint, and there are pages of runs and data sets; give {run}"),
    ):
        assert main(["info", where, "--html", str(html)]) == 2
        assert complaint in capsys.readouterr().err
    assert (tmp_path / "thesis.html").read_text() == "<!doctype html>\n<p>mine"


def test_a_run_without_checkpoints_has_a_page(tmp_path: Path) -> None:
    make_run(DirectoryStore(str(tmp_path / "run")))
    stagekit.info(tmp_path / "run", html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Checkpoints</dt><dd>0" in page
    assert "None was given on this machine." in page
    assert "<svg" not in page


def test_how_a_checkpoint_came_to_the_bucket(tmp_path: Path) -> None:
    url = a_run(tmp_path / "run", steps=4)
    info = stagekit.info(url)
    assert isinstance(info, RunInfo)
    found = passages(DirectoryStore(url), info.checkpoints)
    assert [one.lag_s for one in found] == [5, 5, 5, 15]
    assert [one.upload_s for one in found] == [4, 4, 4, 12]
    assert [(one.sent_bytes, one.reused_bytes) for one in found] == [(300_000, 0)] + 3 * [(200_000, 100_000)]
    assert [one.bytes_per_s for one in found] == [60_000, 40_000, 40_000, pytest.approx(200_000 / 15)]
    assert found[1].reused == pytest.approx(1 / 3)
    newest = tmp_path / "run" / "checkpoints" / info.checkpoints[-1].name
    os.utime(newest / "manifest.json", (BEGAN_S, BEGAN_S))  # the store's clock is behind
    last = passages(DirectoryStore(url), info.checkpoints)[-1]
    assert (last.lag_s, last.upload_s, last.bytes_per_s) == (0, 0, None)


def test_the_last_verdict_is_remembered_and_a_torn_note_is_none(tmp_path: Path, isolated: Path) -> None:
    url = a_run(tmp_path / "run", steps=1)
    assert last_verdict(url) is None
    stagekit.teardown(runs=[url], check=True)
    assert last_verdict(url) is None, "check writes nothing"
    given = stagekit.teardown(runs=[url], clock=lambda: BEGAN_S)
    found = last_verdict(url)
    assert found is not None
    assert (found.answer, found.time_s, found.more) == (given.answer, BEGAN_S, 0)
    assert found.findings == tuple((one.weight, one.text, one.fix) for one in given.findings)
    assert last_verdict(f"{url}-2") is None
    (note,) = isolated.rglob("*.verdict")
    note.write_bytes(note.read_bytes()[:-20])
    assert last_verdict(url) is None


def test_what_is_no_markup_is_escaped_wherever_it_stands() -> None:
    assert tag("p", "<b>&", tag("b", "x"), title='"><i>') == '<p title="&quot;&gt;&lt;i&gt;">&lt;b&gt;&amp;<b>x</b></p>'
    assert joined("a\x00\x1b\u202e\u2066\ud800b\n") == "a�����b\n"
    assert tag("rect", x=1.0, rx=2.345, class_="blue", stroke_width=None) == '<rect x="1" rx="2.35" class="blue"/>'


def test_steps_and_labels_of_charts_are_few_and_round() -> None:
    assert [nice_step(value) for value in (0, 1, 7, 40, 999, 3e9)] == [1, 0.2, 2, 10, 200, 1e9]
    many = [Column((("blue", float(number)),), f"{number:,}", f"{number} of them") for number in range(60)]
    drawn = columns("how many", many, lambda value: f"{value:g}")
    assert drawn.count("<rect") == 59, "nothing is drawn for nothing"
    labels = re.findall(r'<text x="[\d.]+" y="203" text-anchor="middle">(\d+)<', drawn)
    assert 10 < len(labels) < 30, "labels do not overlap"
    assert labels[-1] == "59", "the newest has its label"
    assert columns("nothing", [], str).count("<line") == 2
    once = timeline("one moment", [("saves", [Mark(5.0, 5.0, "blue", "then")])], on_axis)
    assert (once.count("<circle"), once.count("00:00:05")) == (1, 1)
    assert [on_axis(BEGAN_S, length) for length in (60, 86_400, 90 * 86_400)] == ["14:13:20", "09-21 14:13", "2026-09-21"]


def test_samples_become_small_pictures_and_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(data: bytes) -> tuple[object, ...]:
        (sample,) = shown([{"__key__": "k", "x": data, "__extra__": b""}])
        (field,) = sample.fields
        return field.picture is not None, field.text, field.cut

    assert one("ä".encode() * 140) == (False, "ä" * 140, False)
    assert one(b"x" + "ä".encode() * 200) == (False, "x" + "ä" * 139, True)
    assert one(b"RIFF....WAVE") == (False, "RIFF....WAVE", False)
    for nothing in (b"", b"  \n", b"\xff\xfe", b"a\x00b"):
        assert one(nothing) == (False, None, False), nothing
    assert one(picture(300, "WEBP"))[0] is True
    assert one(picture(300)[:100]) == (False, None, False)
    monkeypatch.setattr("stagekit.page.samples._MOST_PIXELS", 100)
    assert one(picture(300))[0] is False, "it would be huge"
    small = picture(300)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert one(small)[0] is True, "a small one is shown as it is where Pillow is not installed"
    assert one(b"\x89PNG\r\n\x1a\n" + bytes(70_000))[0] is False


def test_a_picture_that_is_not_shown_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trouble(data: bytes, name: str = "png") -> str | None:
        (sample,) = shown([{"__key__": "k", name: data}])
        return sample.fields[0].trouble

    damaged = "cannot be decoded as a picture: it is damaged, or none"
    assert trouble(picture(300)) is None
    assert trouble(picture(300)[:100], "x") == damaged
    assert [trouble(bytes(100), name) for name in ("png", "left.JPG", "bin")] == [damaged, damaged, None]
    broken = DirectoryStore(str(tmp_path / "broken"))
    build(broken, [("a", {"png": picture(300)[:100]})])
    stagekit.info(tmp_path / "broken", html=tmp_path / "page.html")
    assert f'<p class="soft small">{damaged}</p>' in (tmp_path / "page.html").read_text()
    with monkeypatch.context() as patched:
        patched.setattr("stagekit.page.samples._MOST_PIXELS", 100)
        assert trouble(picture(300)) == "not shown: 300 × 300 pixels are too many"
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert trouble(b"\x89PNG\r\n\x1a\n" + bytes(70_000)) == "not shown: making it small needs Pillow"


def test_a_page_of_something_else_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(UsageError, match="is no page that stagekit info wrote"):
        stagekit.info("s3://no-such-bucket-anywhere/run", html=tmp_path / "page.html")
