"""``torchdata``'s own ``StatefulDataLoader`` drives ``StreamDataset``: the real package, real workers."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest

from stagekit.store.directory import DirectoryStore
from stagekit.torch import StreamDataset

from ..stream.build import build, numbered

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stateful")
    build(DirectoryStore(path), numbered(90, field="cls"), shards=[50, 10, 30])
    return path


def loader(directory: Path, workers: int, *, persistent: bool = False, **options: Any) -> Any:
    made = StreamDataset(directory, batch_size=8, window=4, connections=2, **options)
    method = "fork" if workers else None
    return StatefulDataLoader(
        made, batch_size=8, num_workers=workers, multiprocessing_context=method, persistent_workers=persistent and bool(workers)
    )


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["cls"].tolist()]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True), (3, False)])
def test_it_goes_on_exactly_and_then_with_the_next_epoch(directory: Path, workers: int, persistent: bool) -> None:
    straight = loader(directory, workers, persistent=persistent)
    wanted = [numbers(straight) for _ in range(3)]
    assert [sorted(epoch) for epoch in wanted] == [list(range(90))] * 3
    assert wanted[0] != wanted[1] != wanted[2]
    for stop in (1, 5):
        made = loader(directory, workers, persistent=persistent)
        batches = iter(made)
        got = numbers([next(batches) for _ in range(stop)])
        state = pickle.loads(pickle.dumps(made.state_dict()))
        del batches, made
        again = loader(directory, workers, persistent=persistent)
        again.load_state_dict(state)
        assert got + numbers(again) == wanted[0]
        assert sorted(numbers(again)) == list(range(90))
        del again
    del straight


def test_twice_and_in_the_second_epoch(directory: Path) -> None:
    straight = loader(directory, 2)
    wanted = [numbers(straight), numbers(straight)]
    made = loader(directory, 2)
    assert numbers(made) == wanted[0]
    batches = iter(made)
    got = numbers([next(batches), next(batches)])
    for _ in range(2):
        state = made.state_dict()
        del batches, made
        made = loader(directory, 2)
        made.load_state_dict(state)
        batches = iter(made)
        got += numbers([next(batches), next(batches)])
    got += numbers(batches)
    assert got == wanted[1]
    del batches, made, straight


def test_the_state_is_small(directory: Path) -> None:
    made = loader(directory, 2)
    batches = iter(made)
    next(batches)
    state = made.state_dict()
    parts = json.dumps(state, default=repr)
    assert len(parts) < 4000
    del batches, made
