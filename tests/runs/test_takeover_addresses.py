"""After a takeover a run may hold two checkpoints of one step: each has an address, and what a step alone stands for is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagekit
from stagekit.cli import main
from stagekit.errors import CheckpointError
from stagekit.progress import Event, Message
from stagekit.runs.layout import CheckpointName
from stagekit.store.directory import DirectoryStore

from ..made import make_checkpoint, make_run


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Steps 90 to 110: a machine lost the run after step 90, and its saves of 100 and 110 came late; the next one has saved 100, too."""
    store = DirectoryStore(str(tmp_path / "run"))
    make_run(store)
    for step, generation, who in ((90, 1, b"first"), (100, 2, b"next machine"), (100, 1, b"late"), (110, 1, b"late")):
        make_checkpoint(store, step, {"model.pt": who}, generation=generation)
    make_checkpoint(store, 110, {"model.pt": b"half"}, generation=2, commit=False)
    return str(tmp_path / "run")


def name(step: int, generation: int) -> CheckpointName:
    return CheckpointName(generation, step, step, "1a2b3c4d")


def test_each_has_an_address_in_the_listing(url: str) -> None:
    listed = {entry.url.removeprefix(url): entry.note for entry in stagekit.ls(url)[1:]}
    assert listed == {
        "@90": "1 file",
        "@100": "1 file; generation 2, which @100 stands for",
        f"@{name(100, 1)}": "1 file; generation 1",
        "@110": "1 file; generation 1, which @110 stands for",
        f"@{name(110, 2)}": "not committed; generation 2",
    }


def test_a_step_means_the_newest_and_that_is_told(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = f"{url} has 2 checkpoints of step 100: taken is that of generation 2, {name(100, 2)}; to have another: "
    other = f"{url}@{name(100, 1)}"
    assert main(["pull", f"{url}@100", str(tmp_path / "step")]) == 0
    said = capsys.readouterr().err
    assert f"warning: {told}{other} (generation 1)" in said
    assert (tmp_path / "step" / "model.pt").read_bytes() == b"next machine"
    for again in (["pull", f"{url}@100", str(tmp_path / "step")], ["info", f"{url}@100"], ["verify", f"{url}@100"]):
        assert main(again) == 0
        assert told in capsys.readouterr().err
    events: list[Event] = []
    stagekit.Run(url, on_event=events.append).restore(tmp_path / "restored", step=100)
    assert [event.text for event in events if isinstance(event, Message)] == [f"{told}{other} (generation 1)"]

    assert main(["pull", other, str(tmp_path / "named")]) == 0
    assert (tmp_path / "named" / "model.pt").read_bytes() == b"late"
    for quiet in (
        ["info", other],
        ["verify", other],
        ["pull", f"{url}@110", str(tmp_path / "110")],
        ["pull", url, str(tmp_path / "newest")],
    ):
        capsys.readouterr()
        assert main(quiet) == 0
        printed = capsys.readouterr()
        assert "checkpoints of step" not in printed.err
        if other in quiet:
            assert other in printed.out + printed.err


def test_info_tells_them_apart(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", url]) == 0
    printed = capsys.readouterr().out
    for address in ("@90", "@100", f"@{name(100, 1)}", "@110"):
        assert f"checkpoint {address}: " in printed


def test_a_name_that_is_not_there(url: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"has no checkpoint called {name(100, 7)}; stagekit ls .* tells what is there"):
        stagekit.pull(f"{url}@{name(100, 7)}", tmp_path / "none")
    with pytest.raises(CheckpointError, match=rf"step {name(110, 2)} was begun and never committed"):
        stagekit.pull(f"{url}@{name(110, 2)}", tmp_path / "half")
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "half").exists()
