"""Plans: grouping files into samples, the dots rule, and cutting samples into shards."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.errors import DuplicateKey, KeyNotAllowed, UsageError
from stagekit.shards.index import ShardBuilder
from stagekit.shards.plan import Dots, Plan, PlannedField, PlannedSample, group, near_duplicates, plan


def sample(key: str, *fields: tuple[str, int]) -> PlannedSample:
    return PlannedSample(key, tuple(PlannedField(field, size, f"/data/{key}.{field}") for field, size in fields))


SAMPLES = st.dictionaries(
    st.text("abcdé/", min_size=1, max_size=8).filter(lambda key: all(key.split("/"))),
    st.dictionaries(st.sampled_from(["jpg", "cls", "seg.png"]), st.integers(0, 3000), min_size=1),
    max_size=30,
).map(lambda found: [sample(key, *fields.items()) for key, fields in found.items()])

# ------------------------------------------------------------------------------------------------------------------------- cutting


def bytes_of(samples: tuple[PlannedSample, ...]) -> int:
    builder = ShardBuilder()
    out = 0
    for planned in samples:
        out += sum(map(len, builder.sample(planned.key, [(f.field, f.size, [bytes(f.size)]) for f in planned.fields])))
    return out + sum(map(len, builder.finish()))


@given(SAMPLES, st.integers(1, 20_000), st.none() | st.integers(1, 5))
def test_cuts(samples: list[PlannedSample], shard_size: int, most: int | None) -> None:
    found = plan(samples, shard_size=shard_size, samples_per_shard=most)
    assert [planned.key for shard in found.shards for planned in shard.samples] == [planned.key for planned in samples]
    assert found.samples == len(samples)
    assert found.payload_bytes == sum(field.size for planned in samples for field in planned.fields)
    assert found.bytes == sum(shard.bytes for shard in found.shards)
    for number, shard in enumerate(found.shards):
        assert (shard.number, shard.name) == (number, f"shards/{number:06d}.tar")
        # Headers and padding are counted exactly: the tar that is written has this size.
        assert shard.bytes == bytes_of(shard.samples)
        assert shard.bytes <= shard_size or len(shard.samples) == 1
        assert (number in found.oversized) == (shard.bytes > shard_size)
        assert most is None or len(shard.samples) <= most
        if number + 1 < len(found.shards):
            following = found.shards[number + 1].samples[0]
            assert shard.bytes + following.bytes > shard_size or len(shard.samples) == most
        for planned in shard.samples:
            assert [field.field for field in planned.fields] == sorted(field.field for field in planned.fields)


@given(SAMPLES, st.integers(1, 20_000))
def test_a_plan_is_a_pure_function(samples: list[PlannedSample], shard_size: int) -> None:
    first = plan(samples, shard_size=shard_size)
    assert plan(iter(samples), shard_size=shard_size) == first
    shuffled = [PlannedSample(planned.key, planned.fields[::-1]) for planned in samples]
    assert plan(shuffled, shard_size=shard_size) == first
    elsewhere = [PlannedSample(p.key, tuple(PlannedField(f.field, f.size, "elsewhere") for f in p.fields)) for p in samples]
    assert plan(elsewhere, shard_size=shard_size).digest == first.digest


def test_the_digest_tells_plans_apart() -> None:
    samples = [sample("a", ("jpg", 1)), sample("b", ("jpg", 2)), sample("c", ("cls", 3), ("jpg", 4))]
    plans = [
        plan(samples, shard_size=10**6),
        plan(samples, shard_size=3000),
        plan(samples, shard_size=10**6, samples_per_shard=2),
        plan(samples[::-1], shard_size=10**6),
        plan([sample("a", ("jpg", 1)), sample("b", ("jpg", 3)), samples[2]], shard_size=10**6),
        plan([sample("a", ("jpg", 1)), sample("b", ("png", 2)), samples[2]], shard_size=10**6),
        plan([sample("a", ("jpg", 1)), sample("B", ("jpg", 2)), samples[2]], shard_size=10**6),
    ]
    assert len({found.digest for found in plans}) == len(plans)


def test_an_exact_fit() -> None:
    samples = [sample(key, ("jpg", 512)) for key in "abcd"]
    assert [len(shard.samples) for shard in plan(samples, shard_size=1024 + 2 * 1024).shards] == [2, 2]
    assert [len(shard.samples) for shard in plan(samples, shard_size=1024 + 2 * 1024 - 1).shards] == [1, 1, 1, 1]


def test_one_sample_may_exceed_alone() -> None:
    found = plan([sample("a", ("jpg", 1)), sample("big", ("jpg", 10**6)), sample("c", ("jpg", 1))], shard_size=10_000)
    assert [[planned.key for planned in shard.samples] for shard in found.shards] == [["a"], ["big"], ["c"]]
    assert found.oversized == (1,)


def test_nothing_gives_no_shard() -> None:
    assert plan([], shard_size=1000).shards == ()


def test_duplicate_keys_are_refused_with_their_paths() -> None:
    again = PlannedSample("a", (PlannedField("cls", 1, "/other/a.cls"),))
    with pytest.raises(DuplicateKey, match=r"1 key is used by more than one sample: 'a' comes from /data/a\.jpg, /other/a\.cls\. Rename"):
        # Far apart, in shards of their own.
        plan([sample("a", ("jpg", 1)), sample("b", ("jpg", 1)), again], shard_size=1)
    many = [sample(f"k{number}", ("jpg", 1)) for number in range(8)] * 2
    with pytest.raises(DuplicateKey, match=r"8 keys are used by more than one sample: 'k0' comes from .* and 3 more keys\."):
        plan(many, shard_size=10**6)
    with pytest.raises(DuplicateKey, match=re.escape("the sample 'a' has the field 'jpg' twice: /data/a.jpg and /data/a.jpg")):
        plan([sample("a", ("jpg", 1), ("jpg", 2))], shard_size=10**6)


def test_what_a_shard_cannot_hold_is_refused_before_anything_is_written() -> None:
    with pytest.raises(KeyNotAllowed, match="a USTAR member ends at 8 GiB"):
        plan([sample("a", ("bin", 2**33))], shard_size=10**6)
    with pytest.raises(KeyNotAllowed, match="USTAR holds 100"):
        plan([sample("a" * 200, ("bin", 1))], shard_size=10**6)
    with pytest.raises(UsageError, match="the sample 'a' has no field"):
        plan([sample("a")], shard_size=10**6)


def test_sizes_that_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="shard_size: 0 bytes is no size for a shard"):
        plan([], shard_size=0)
    with pytest.raises(UsageError, match="samples_per_shard: 0 is no number of samples"):
        plan([], shard_size=1, samples_per_shard=0)


# ----------------------------------------------------------------------------------------------------------------- near duplicates


def test_near_duplicates_are_reported_and_stay_apart() -> None:
    keys = ["é", "e\u0301", "a", "A", "ß", "SS", "b", "x/É"]
    assert near_duplicates(keys) == (("A", "a"), ("SS", "ß"), ("e\u0301", "é"))
    found: Plan = plan([sample(key, ("jpg", 1)) for key in keys], shard_size=10**6)
    assert found.near_duplicates == near_duplicates(keys)
    assert found.samples == len(keys)


# ------------------------------------------------------------------------------------------------------------------------ grouping


def files(*names: str) -> list[tuple[str, int, str]]:
    return [(name, len(name), f"/src/{name}") for name in names]


def grouped(*names: str, dots: Dots = "refuse") -> dict[str, list[str]]:
    return {found.key: [field.field for field in found.fields] for found in group(files(*names), dots=dots).samples}


def test_files_of_one_key_are_one_sample() -> None:
    assert grouped("a/img.jpg", "a/img.seg.png", "a/img.JSON", "b/img.jpg") == {"a/img": ["jpg", "seg.png", "json"], "b/img": ["jpg"]}
    found = group(files("README", "a.jpg", ".DS_Store", "x/.hidden.jpg", "y."))
    assert found.ungrouped == ("README", ".DS_Store", "x/.hidden.jpg", "y.")
    assert found.samples == (PlannedSample("a", (PlannedField("jpg", 5, "/src/a.jpg"),)),)


def test_dots_that_would_merge_two_pictures_are_refused_with_the_paths() -> None:
    with pytest.raises(
        DuplicateKey, match=r"'cat': /src/cat\.v1\.jpg, /src/cat\.v2\.jpg\. Say dots='rewrite' \(--dots rewrite\)"
    ) as caught:
        grouped("cat.v1.jpg", "cat.v2.jpg", "dog.jpg")
    assert "dots='field' (--dots field) to keep them together" in str(caught.value)
    with pytest.raises(DuplicateKey, match=r"'cat': /src/cat\.jpg, /src/cat\.v2\.jpg\."):
        grouped("cat.jpg", "cat.v2.jpg", "cat.txt")
    with pytest.raises(DuplicateKey, match="and 1 more keys"):
        grouped(*(f"{key}.{version}.jpg" for key in "abcdef" for version in "12"))


def test_dots_as_fields() -> None:
    assert grouped("cat.v1.jpg", "cat.v2.jpg", dots="field") == {"cat": ["v1.jpg", "v2.jpg"]}


def test_dots_rewritten() -> None:
    assert grouped("d.x/cat.v1.jpg", "d.x/cat.v2.jpg", "d.x/cat.v2.txt", dots="rewrite") == {
        "d.x/cat_v1": ["jpg"],
        "d.x/cat_v2": ["jpg", "txt"],
    }
    # A lone version gets the same fields as its siblings; a mask beside its picture stays where it is.
    assert grouped("dog.v1.jpg", "img.jpg", "img.seg.png", dots="rewrite") == {"dog_v1": ["jpg"], "img": ["jpg", "seg.png"]}
    assert grouped("img.jpg", "img.a.jpg", "img.seg.png", dots="rewrite") == {"img": ["jpg"], "img_a": ["jpg"], "img_seg": ["png"]}
    assert grouped("a.2020.01.02.JPG", dots="rewrite") == {"a_2020_01_02": ["jpg"]}


def test_rewriting_never_merges_silently() -> None:
    found = group(files("cat.v1.jpg", "cat.v2.jpg", "cat_v1.jpg"), dots="rewrite")
    with pytest.raises(DuplicateKey, match=r"'cat_v1' comes from .*/src/cat\.v1\.jpg"):
        plan(found.samples, shard_size=10**6)


def test_the_same_file_twice_is_a_duplicate_field() -> None:
    for dots in ("refuse", "field"):
        found = group(files("a.jpg", "a.JPG"), dots=dots)
        with pytest.raises(DuplicateKey, match=r"the field 'jpg' twice: /src/a\.jpg and /src/a\.JPG"):
            plan(found.samples, shard_size=10**6)


def test_an_unknown_rule() -> None:
    with pytest.raises(UsageError, match="dots: 'merge' is not one of 'refuse', 'field', 'rewrite'"):
        grouped("a.jpg", dots="merge")  # type: ignore[arg-type]
