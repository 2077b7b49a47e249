"""Folders as sources. Hostile names and files are real ones on disk."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from stagekit.errors import DuplicateKey, KeyNotAllowed, SourceError, UsageError
from stagekit.shards.plan import PlannedSample, plan
from stagekit.sources.base import Listing, Source
from stagekit.sources.files import FileRules
from stagekit.sources.folder import FolderSource


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def folder(path: Path, **options: object) -> FolderSource:
    links = {name: options.pop(name) for name in ("symlinks",) if name in options}
    return FolderSource(str(path), FileRules(**options), **links)  # type: ignore[arg-type]  # options come from test parameters


def shape(listing: Listing) -> dict[str, dict[str, int]]:
    return {sample.key: {field.field: field.size for field in sample.fields} for sample in listing.samples}


def content(source: Source, sample: PlannedSample) -> dict[str, bytes]:
    return {name: b"".join(map(bytes, pieces)) for name, _, pieces in source.read(sample)}


# ------------------------------------------------------------------------------------------------------------------------- grouping


def test_files_with_one_key_are_one_sample(tmp_path: Path) -> None:
    write(tmp_path, {"b/x.jpg": b"picture", "b/x.json": b"{}", "b/x.seg.png": b"mask", "a.TXT": b"hello"})
    source = folder(tmp_path)
    listing = source.listing()
    assert shape(listing) == {"a": {"txt": 5}, "b/x": {"jpg": 7, "json": 2, "seg.png": 4}}
    assert [sample.key for sample in listing.samples] == ["a", "b/x"]
    assert content(source, listing.samples[1]) == {"jpg": b"picture", "json": b"{}", "seg.png": b"mask"}
    assert not listing.skipped
    assert not listing.bad


def test_the_order_is_that_of_the_keys_whatever_the_disk_says(tmp_path: Path) -> None:
    write(tmp_path, {f"{name}.bin": b"" for name in ("b", "a/z", "a", "ä", "a-b", "Z", "a b")})
    keys = [sample.key for sample in folder(tmp_path).listing().samples]
    assert keys == sorted(keys, key=str.encode)
    assert keys == ["Z", "a", "a b", "a-b", "a/z", "b", "ä"]


def test_odd_names_keep_their_bytes(tmp_path: Path) -> None:
    names = ["with space", "100%2F", "a+b", "#1", "emoji 🐘", "e\u0301", "\u00e9", "tab\there", "back\\slash"]
    write(tmp_path, {f"{name}.bin": name.encode() for name in names})
    source = folder(tmp_path)
    assert {sample.key: content(source, sample)["bin"] for sample in source.listing().samples} == {name: name.encode() for name in names}


def test_a_source_can_be_pickled(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"x"})
    source = folder(tmp_path)
    assert pickle.loads(pickle.dumps(source)) == source
    assert pickle.loads(pickle.dumps(source)).listing().samples == source.listing().samples


def test_a_field_twice_is_refused_with_both_paths(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1", "a.JPG": b"2"})
    with pytest.raises(DuplicateKey, match=r"'a' has the field 'jpg' twice: a\.JPG and a\.jpg"):
        plan(folder(tmp_path).listing().samples, shard_size=2**20)


def test_dots_that_would_merge_two_pictures_are_refused_with_the_paths(tmp_path: Path) -> None:
    write(tmp_path, {"cat.v1.jpg": b"1", "cat.v2.jpg": b"2", "img.jpg": b"3", "img.seg.png": b"4"})
    with pytest.raises(DuplicateKey, match=r"cat\.v1\.jpg, cat\.v2\.jpg.*--dots rewrite.*--dots field"):
        folder(tmp_path).listing()
    assert shape(folder(tmp_path, dots="field").listing())["cat"] == {"v1.jpg": 1, "v2.jpg": 1}
    rewritten = folder(tmp_path, dots="rewrite")
    assert shape(rewritten.listing()) == {"cat_v1": {"jpg": 1}, "cat_v2": {"jpg": 1}, "img": {"jpg": 1, "seg.png": 1}}
    assert content(rewritten, rewritten.listing().samples[1]) == {"jpg": b"2"}


# ----------------------------------------------------------------------------------------------------------------- what is left out


def test_dot_files_are_never_packed_and_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1", "._a.jpg": b"apple", ".DS_Store": b"x", ".git/config.txt": b"x", "d/.hidden.jpg": b"x"})
    listing = folder(tmp_path).listing()
    assert shape(listing) == {"a": {"jpg": 1}}
    assert listing.skipped == {"AppleDouble files": 1, "dot-files": 3}


def test_include_and_exclude(tmp_path: Path) -> None:
    write(tmp_path, {"train/a.jpg": b"1", "train/a.txt": b"2", "val/b.jpg": b"3", "thumbs/c.jpg": b"4", "README": b"5"})
    listing = folder(tmp_path, include=("*.jpg",), exclude=("thumbs", "val/*")).listing()
    assert shape(listing) == {"train/a": {"jpg": 1}}
    assert listing.skipped == {"not matched by an include pattern": 2, "excluded by a pattern": 2}


def test_an_excluded_directory_is_not_entered(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1", "cache/no-extension": b"2"})
    assert shape(folder(tmp_path, exclude=("cache/",)).listing()) == {"a": {"jpg": 1}}


def test_symbolic_links_by_choice(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"b.jpg": b"linked", "c.jpg": b"deep"})
    raw = write(tmp_path / "raw", {"a.jpg": b"1"})
    (raw / "b.jpg").symlink_to(outside / "b.jpg")
    (raw / "d").symlink_to(outside)
    followed = folder(raw)
    assert shape(followed.listing()) == {"a": {"jpg": 1}, "b": {"jpg": 6}, "d/b": {"jpg": 6}, "d/c": {"jpg": 4}}
    assert content(followed, followed.listing().samples[1]) == {"jpg": b"linked"}
    skipping = folder(raw, symlinks="skip").listing()
    assert shape(skipping) == {"a": {"jpg": 1}}
    assert skipping.skipped == {"symbolic links": 2}


def test_a_file_that_became_a_link_is_not_followed_when_links_are_left_out(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"a.jpg": b"1"})
    secret = write(tmp_path / "other", {"s": b"2"}) / "s"
    source = folder(raw, symlinks="skip")
    (sample,) = source.listing().samples
    (raw / "a.jpg").unlink()
    (raw / "a.jpg").symlink_to(secret)
    with pytest.raises(SourceError, match=r"a\.jpg"):
        source.read(sample)


def test_hard_links_are_stored_in_full(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"same"})
    (tmp_path / "b.jpg").hardlink_to(tmp_path / "a.jpg")
    source = folder(tmp_path)
    assert [content(source, sample) for sample in source.listing().samples] == [{"jpg": b"same"}] * 2


def test_a_link_in_a_circle_ends(tmp_path: Path) -> None:
    write(tmp_path, {"d/a.jpg": b"1"})
    (tmp_path / "d" / "loop").symlink_to(tmp_path)
    with pytest.raises(SourceError, match=r"d/loop: a link to a directory that holds it"):
        folder(tmp_path).listing()
    listing = folder(tmp_path, on_bad="skip").listing()
    assert shape(listing) == {"d/a": {"jpg": 1}}
    assert [bad.path for bad in listing.bad] == ["d/loop"]


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1"})
    (tmp_path / "gone.jpg").symlink_to("nowhere")
    with pytest.raises(SourceError, match=r"gone\.jpg: a link to something that is not there.*--on-bad skip"):
        folder(tmp_path).listing()
    assert [bad.path for bad in folder(tmp_path, on_bad="skip").listing().bad] == ["gone.jpg"]


def test_pipes_are_counted_and_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1"})
    os.mkfifo(tmp_path / "pipe.jpg")
    listing = folder(tmp_path).listing()
    assert listing.skipped == {"sockets, pipes and devices": 1}


def test_files_without_extension_are_refused_and_may_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1", "README": b"2", "d/Makefile": b"3", "trailing.": b"4"})
    with pytest.raises(SourceError, match=r"README, d/Makefile, trailing\. have no extension.*--exclude 'README'.*--on-bad skip"):
        folder(tmp_path).listing()
    listing = folder(tmp_path, on_bad="skip").listing()
    assert shape(listing) == {"a": {"jpg": 1}}
    assert [bad.path for bad in listing.bad] == ["README", "d/Makefile", "trailing."]
    assert shape(folder(tmp_path, exclude=("README", "Makefile", "*.")).listing()) == {"a": {"jpg": 1}}


def test_many_files_without_extension_are_counted_not_listed(tmp_path: Path) -> None:
    write(tmp_path, {f"file{number}": b"" for number in range(30)})
    with pytest.raises(SourceError, match=r"and 25 more have no extension"):
        folder(tmp_path).listing()


def test_names_that_are_not_utf_8_are_refused_with_the_path_shown(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1"})
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"2")
    with pytest.raises(KeyNotAllowed, match=r"caf\\\\xe9\.jpg.*not UTF-8") as caught:
        folder(tmp_path).listing()
    str(caught.value).encode()  # it can be printed
    (bad,) = folder(tmp_path, on_bad="skip").listing().bad
    assert "caf" in bad.path
    (bad.path + bad.reason).encode()


def test_a_field_that_is_a_samples_own_is_told_with_its_file(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1", "d/b.__key__": b"2"})
    with pytest.raises(KeyNotAllowed, match=r"reading .*: 'd/b\.__key__': '__key__' is no field name.*\(--on-bad skip"):
        folder(tmp_path).listing()
    listing = folder(tmp_path, on_bad="skip").listing()
    assert [sample.key for sample in listing.samples] == ["a"]
    assert [bad.path for bad in listing.bad] == ["'d/b.__key__'"]


@pytest.mark.parametrize("name", ["x" * 120 + ".jpg", "line\nbreak.jpg", "__meta__/a.jpg"])
def test_names_that_a_tar_cannot_hold_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"a.jpg": b"1", name: b"2"})
    with pytest.raises(KeyNotAllowed, match="a shard cannot hold"):
        folder(tmp_path).listing()
    assert len(folder(tmp_path, on_bad="skip").listing().bad) == 1


def test_an_empty_folder_says_what_was_left_out(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no file to pack in it; name the folder"):
        folder(tmp_path).listing()
    write(tmp_path, {".a.jpg": b"", "b.txt": b""})
    with pytest.raises(SourceError, match=r"no file to pack in it \(left out: 1 dot-files, 1 not matched by an include pattern\)"):
        folder(tmp_path, include=("*.jpg",)).listing()


def test_a_missing_source_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no such folder"):
        folder(tmp_path / "nowhere").listing()
    write(tmp_path, {"a.jpg": b"1"})
    with pytest.raises(SourceError, match=r"a\.jpg: it is a file; a source is the folder"):
        folder(tmp_path / "a.jpg").listing()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "file"}, "labels: 'file'"),
        ({"symlinks": "copy"}, "symlinks: 'copy'"),
        ({"on_bad": "ignore"}, "on_bad: 'ignore'"),
        ({"include": "*.jpg"}, "include: give a list of patterns"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        folder(tmp_path, **options)


# --------------------------------------------------------------------------------------------------------------------------- labels


def test_labels_from_directories(tmp_path: Path) -> None:
    write(tmp_path, {"dog/a.jpg": b"1", "cat/b.jpg": b"2", "cat/deep/c.jpg": b"3", "zebra/z.jpg": b"4"})
    source = folder(tmp_path, labels="dir")
    listing = source.listing()
    assert listing.classes == ("cat", "dog", "zebra")
    assert {sample.key: content(source, sample)["cls"] for sample in listing.samples} == {
        "cat/b": b"0",
        "cat/deep/c": b"0",
        "dog/a": b"1",
        "zebra/z": b"2",
    }
    assert not listing.notes


def test_an_empty_class_keeps_its_index_and_is_noted(tmp_path: Path) -> None:
    write(tmp_path, {"a/x.jpg": b"1", "c/y.jpg": b"2"})
    (tmp_path / "b").mkdir()
    source = folder(tmp_path, labels="dir")
    listing = source.listing()
    assert listing.classes == ("a", "b", "c")
    assert content(source, listing.samples[1])["cls"] == b"2"
    assert listing.notes == ["b: no sample in this class"]


def test_a_file_beside_the_class_folders_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a/x.jpg": b"1", "stray.jpg": b"2"})
    with pytest.raises(SourceError, match=r"stray\.jpg: it lies in no class directory"):
        folder(tmp_path, labels="dir").listing()
    listing = folder(tmp_path, labels="dir", on_bad="skip").listing()
    assert [bad.path for bad in listing.bad] == ["stray.jpg"]
    assert shape(listing) == {"a/x": {"cls": 1, "jpg": 1}}


def test_a_cls_file_and_labels_contradict_each_other(tmp_path: Path) -> None:
    write(tmp_path, {"a/x.jpg": b"1", "a/x.cls": b"2"})
    with pytest.raises(SourceError, match=r"a/x\.cls is the field cls already.*--exclude '\*\.cls'"):
        folder(tmp_path, labels="dir").listing()


# ----------------------------------------------------------------------------------------------- between listing and reading, and after

SMALL, LARGE = 1000, 9 * 2**20


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(b"x" * (path.stat().st_size - 1)), "it shrank from"),
        (lambda path: path.write_bytes(b"x" * (path.stat().st_size + 1)), "it grew from"),
        (lambda path: os.utime(path, ns=(1, 1)), "it was written to after the folder was listed"),
        (lambda path: path.unlink(), "is gone"),
        (lambda path: (path.unlink(), path.mkdir()), "none any more"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "none any more"),
    ],
)
def test_a_file_that_changed_since_the_listing_is_named(tmp_path: Path, size: int, change: object, words: str) -> None:
    write(tmp_path, {"a.bin": b"x" * size})
    source = folder(tmp_path)
    (sample,) = source.listing().samples
    change(tmp_path / "a.bin")  # type: ignore[operator]  # one of the lambdas above
    with pytest.raises(SourceError, match=rf"a\.bin: .*{words}.*--on-bad skip"):
        source.read(sample)


def test_a_large_file_is_watched_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.bin": b"x" * LARGE}) / "a.bin"
    source = folder(tmp_path)

    def read(change: object) -> None:
        (sample,) = source.listing().samples
        (payload,) = source.read(sample)
        pieces = iter(payload[2])
        next(pieces)
        change()  # type: ignore[operator]  # one of the functions below
        for _ in pieces:
            pass

    with path.open("r+b") as file:
        with pytest.raises(SourceError, match="it shrank from"):
            read(lambda: file.truncate(LARGE // 2))
        file.truncate(LARGE)
        with pytest.raises(SourceError, match="it grew from"):
            read(lambda: (file.seek(0, 2), file.write(b"more"), file.flush()))
        file.truncate(LARGE)
        with pytest.raises(SourceError, match="it was written to while it was read"):
            read(lambda: os.utime(path, ns=(1, 1)))


def test_an_unreadable_file_is_named(tmp_path: Path, as_nobody: object) -> None:
    path = write(tmp_path, {"a.bin": b"x", "b.bin": b"y"}) / "a.bin"
    path.chmod(0)
    source = folder(tmp_path)
    samples = source.listing().samples

    def attempt() -> str:
        try:
            source.read(samples[0])
        except SourceError as error:
            return str(error)
        return "it was read"

    assert "a.bin: permission denied; look at the owner and mode there, or run with --on-bad skip" in as_nobody(attempt)  # type: ignore[operator]  # the fixture's function


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path, as_nobody: object) -> None:
    write(tmp_path, {"d/a.bin": b"x", "b.bin": b"y"})
    (tmp_path / "d").chmod(0)

    def attempt() -> str:
        try:
            folder(tmp_path).listing()
        except SourceError as error:
            return str(error)
        return "it was listed"

    assert "d: the directory cannot be listed: permission denied" in as_nobody(attempt)  # type: ignore[operator]


def test_an_empty_file_is_an_empty_field(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b""})
    source = folder(tmp_path)
    assert content(source, source.listing().samples[0]) == {"txt": b""}
