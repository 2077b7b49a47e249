"""Text files as documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagekit.errors import SourceError
from stagekit.shards.plan import plan
from stagekit.sources.base import OnBad
from stagekit.sources.text import TextSource


def read(source: TextSource) -> dict[str, dict[str, bytes]]:
    return {
        sample.key: {name: b"".join(map(bytes, pieces)) for name, _, pieces in source.read(sample)} for sample in source.listing().samples
    }


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    (root / "b.txt").write_text("été")
    (root / "sub" / "report.v1.TXT").write_text("one")
    (root / "sub" / "report.v2.txt").write_text("two")
    (root / "blank.txt").write_text(" \n\t\n" * 20_000)
    (root / "empty.txt").touch()
    (root / "notes.md").write_text("no text file")
    (root / ".hidden.txt").write_text("x")
    return root


def test_each_file_is_a_document(texts: Path) -> None:
    source = TextSource(str(texts))
    assert read(source) == {"b": {"txt": "été".encode()}, "sub/report_v1": {"txt": b"one"}, "sub/report_v2": {"txt": b"two"}}
    assert source.listing().skipped == {"blank documents": 2, "dot-files": 1, "not matched by an include pattern": 1}
    assert plan(source.listing().samples, shard_size=10**6).fields["txt"] == (3, 11)


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a[1].txt", "a1.txt", "sub/a[1].txt"):
        (tmp_path / name).write_text(name)
    source = TextSource(str(tmp_path / "a[1].txt"), single=True)
    assert read(source) == {"a[1]": {"txt": b"a[1].txt"}}
    assert not source.listing().skipped
    with pytest.raises(SourceError, match=r"reading .*/none\.txt: there is no such file; check the path"):
        TextSource(str(tmp_path / "none.txt"), single=True).listing()


def test_blank_documents_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(SourceError, match="every document in it is blank"):
        TextSource(str(tmp_path)).listing()


@pytest.mark.parametrize("before", [3, 9 * 2**20, 2**20 - 1])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3"])
def test_a_document_that_is_not_utf_8(tmp_path: Path, before: int, bad: bytes) -> None:
    """Small ones are read whole, large ones in pieces; the last byte may be the first of a character that never ends."""
    (tmp_path / "a.txt").write_bytes(b"x" * before + bad)
    source = TextSource(str(tmp_path))
    (sample,) = source.listing().samples
    with pytest.raises(SourceError, match=rf"a\.txt: byte {before + 1:d} of it is not UTF-8, and a document is; convert it"):
        for _, _, pieces in source.read(sample):
            list(pieces)


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16LE"])
def test_a_document_in_utf_16(tmp_path: Path, encoding: str) -> None:
    """Without a mark it is UTF-8 as well, with zeros in it."""
    (tmp_path / "a.txt").write_text("text", encoding)
    (tmp_path / "good.txt").write_text("text")
    with pytest.raises(SourceError, match=rf"a\.txt: it is in {encoding}, .* iconv -f {encoding} -t UTF-8 OLD > NEW \(--on-bad skip"):
        TextSource(str(tmp_path)).listing()
    listing = TextSource(str(tmp_path), "skip").listing()
    assert [bad.path for bad in listing.bad] == [str(tmp_path / "a.txt")]
    assert [sample.key for sample in listing.samples] == ["good"]


def test_characters_on_the_border_of_two_pieces(tmp_path: Path) -> None:
    text = "x" + "é" * (5 * 2**20)
    (tmp_path / "a.txt").write_text(text)
    assert read(TextSource(str(tmp_path))) == {"a": {"txt": text.encode()}}


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_document_that_cannot_be_opened(tmp_path: Path, on_bad: OnBad) -> None:
    (tmp_path / "good.txt").write_text("x")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    source = TextSource(str(tmp_path), on_bad)
    if on_bad == "raise":
        with pytest.raises(SourceError, match=r"loop\.txt: a link to something that is not there"):
            source.listing()
    else:
        assert [bad.path for bad in source.listing().bad] == ["loop.txt"]
        assert list(read(source)) == ["good"]
