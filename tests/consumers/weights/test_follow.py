"""What is to be served: the newest, a fixed version, a channel's; and slices of it."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollwire.consumers.weights.follow import NEAR, Follow, FollowConfig, Wanted, own_channel, promotion
from rollwire.consumers.weights.probe import draw_samples
from rollwire.consumers.weights.slices import Slice, choose_slices, elements_of, parse_slices, share_of
from rollwire.kernels.tensors import CHUNK_ELEMENTS, tensor
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import Evaluation, WeightLink, WeightVersion

A, B = "0197a1b2-0000-7000-8000-0000000000aa", "0197a1b2-0000-7000-8000-0000000000bb"


def version(number: int, lineage: str = A, digest: str = "") -> WeightVersion:
    example = next(e.event for e in load_examples("weight-versions") if e.name == "delta")
    assert isinstance(example, WeightVersion)
    return msgspec.structs.replace(
        example, version=number, lineage=lineage, state_digest=digest or f"{number:064x}"
    )


def promoted(number: int, channel: str, lineage: str = A, model: str = "policy") -> Evaluation:
    return promotion(
        number, channel, model=model, lineage=lineage, by="ops", at_us=1_767_225_603_000_000 + number
    )


def follow(config: FollowConfig | None = None, lineage: str | None = None) -> Follow:
    return Follow(config or FollowConfig(), own="fleet/r0", lineage=lineage, model="policy")


def wanted(followed: Follow) -> tuple[str | None, int, bool, str]:
    found = followed.wanted()
    return found.lineage, found.version, found.event is not None, found.channel


def test_the_newest_of_the_lineage_started_last() -> None:
    free, fixed = follow(), follow(lineage=A)
    assert wanted(free) == (None, -1, False, "")
    for event in (version(0), version(1), version(1), version(0, B), version(2)):
        free.add(event)
        fixed.add(event)
    assert wanted(free) == (B, 0, True, "")
    assert wanted(fixed) == (A, 2, True, "")
    assert len(free.events(A)) == 3


def test_repeats_and_other_models_are_no_news() -> None:
    followed = follow()
    assert followed.add(version(0))
    assert not followed.add(version(0))
    assert not followed.add(msgspec.structs.replace(version(1), model="other"))
    assert not followed.add(promoted(0, "c", model="other"))
    assert followed.wanted().version == 0


def test_a_fixed_version_is_waited_for() -> None:
    followed = follow(FollowConfig(mode="pinned", version=1))
    followed.add(version(0))
    assert wanted(followed) == (A, 1, False, "")
    followed.add(version(1))
    followed.add(version(2))
    assert wanted(followed) == (A, 1, True, "")


def test_a_channels_last_promotion_counts_whatever_its_version() -> None:
    followed = follow(FollowConfig(mode="channel", channel="canary"))
    for number in range(4):
        followed.add(version(number))
    assert wanted(followed) == (A, -1, False, "canary")
    for number, expected in ((1, 1), (3, 3), (2, 2)):
        followed.add(promoted(number, "canary"))
        followed.add(promoted(0, "other"))
        assert wanted(followed) == (A, expected, True, "canary")
    followed.add(version(0, B))  # a new run: the channel stays where it was promoted to
    assert wanted(followed) == (A, 2, True, "canary")
    followed.add(promoted(0, "canary", B))
    assert wanted(followed) == (B, 0, True, "canary")


def test_a_fixed_lineage_hears_no_promotion_of_another() -> None:
    followed = follow(FollowConfig(mode="channel", channel="canary"), lineage=A)
    for event in (version(0), version(0, B)):
        followed.add(event)
    assert not followed.add(promoted(0, "canary", B))
    assert not followed.add(promoted(0, "fleet/r0", B))
    assert wanted(followed) == (A, -1, False, "canary")
    assert followed.add(promoted(0, "canary"))
    assert wanted(followed) == (A, 0, True, "canary")


def test_a_replicas_own_channel_comes_first_until_it_is_taken_back() -> None:
    assert own_channel("fleet", "r0") == "fleet/r0"
    followed = follow(FollowConfig(mode="channel", channel="canary"))
    for event in (version(0), version(1), version(2), promoted(2, "canary"), promoted(0, "fleet/r1")):
        followed.add(event)
    followed.add(promoted(0, "fleet/r0"))
    assert wanted(followed) == (A, 0, True, "fleet/r0")
    assert followed.add(promoted(-1, "fleet/r0"))
    assert not followed.add(promoted(-1, "fleet/r0"))
    assert wanted(followed) == (A, 2, True, "canary")


def test_an_evaluation_is_no_promotion() -> None:
    followed = follow(FollowConfig(mode="channel", channel="canary"))
    measured = next(e.event for e in load_examples("evaluations") if e.name == "measured")
    assert not followed.add(measured)
    assert followed.wanted() == Wanted(None, -1, None, "canary")


def test_what_is_near_is_planned_with_and_links_keep_their_order() -> None:
    followed = follow()
    skip = next(e.event for e in load_examples("weight-links") if e.name == "skip")
    assert isinstance(skip, WeightLink)
    for number in range(2_000):
        followed.add(version(number))
    links = [
        msgspec.structs.replace(skip, lineage=A, version=number, base_version=base, coder=coder)
        for number, base, coder in (
            (1_000, 984, "gap"),
            (64, 0, "gap"),
            (1_000, 936, "gap"),
            (1_000, 984, "context"),
        )
    ]
    for link in links:
        followed.add(link)
    versions, near = followed.near(A, 999, 1_010)
    assert [event.version for event in versions] == list(range(999 - NEAR, 1_010 + NEAR + 1))
    assert near == [links[0], links[2], links[3]]
    assert [event.version for event in followed.near(A, None, 3)[0]] == list(range(3 + NEAR + 1))
    assert followed.near(B, 1, 2) == ([], [])
    assert followed.links(A) == [links[0], links[2], links[3], links[1]]
    assert followed.wanted().version == 1_999
    for event in (*versions, *links):  # the topics are read anew
        assert not followed.add(event)
    assert followed.links(A) == [links[0], links[2], links[3], links[1]]


def test_a_promotion_that_is_read_anew_is_no_news_and_takes_nothing_back() -> None:
    followed = follow(FollowConfig(mode="channel", channel="canary"))
    said = [
        promoted(2, "canary"),
        promoted(1, "canary"),
        promoted(3, "fleet/r0"),
        promoted(-1, "fleet/r0"),
    ]
    for event in (version(1), version(2), version(3), *said):
        assert followed.add(event)
    for event in said:
        assert not followed.add(event)
        assert wanted(followed) == (A, 1, True, "canary")


def test_a_replica_of_a_fixed_lineage_is_released_whatever_lineage_is_the_newest() -> None:
    followed = follow(lineage=A)
    for event in (version(0), version(1), version(0, B), promoted(0, "fleet/r0")):
        followed.add(event)
    assert wanted(followed) == (A, 0, True, "fleet/r0")
    assert followed.add(promoted(-1, "fleet/r0", B))  # `rollwire fleet pin r0 --release` names the newest
    assert wanted(followed) == (A, 1, True, "")


def test_a_state_is_recognised_by_its_digest() -> None:
    followed = follow()
    for event in (version(0, digest="a" * 64), version(1), version(2, digest="a" * 64), version(0, B)):
        followed.add(event)
    followed = follow(lineage=A)
    for event in (version(0, digest="a" * 64), version(1), version(2, digest="a" * 64)):
        followed.add(event)

    def found(digest: str, said: tuple[str, int, str] | None) -> int | None:
        event = followed.with_digest(digest, said)
        return None if event is None else event.version

    assert found("a" * 64, None) == 2
    assert found("a" * 64, (A, 0, "a" * 64)) == 0  # what it says, since it is right
    assert found("a" * 64, (A, 1, "a" * 64)) == 2  # what its bits say
    assert found("b" * 64, (A, 0, "a" * 64)) is None


@pytest.mark.parametrize(
    "fields",
    [{"mode": "pinned"}, {"version": 1}, {"mode": "channel"}, {"channel": "c"}, {"mode": "newest"}],
)
def test_contradicting_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FollowConfig.model_validate(fields)


def test_slices_are_written_as_patterns() -> None:
    spec = parse_slices(["*.weight=1/4", "*=0/1"])
    assert spec == {"*.weight": Slice(1, 4), "*": Slice(0, 1)}
    assert share_of(parse_slices(["*=1/4"])) == 0.25
    assert share_of({}) == 1.0
    for wrong in ("w", "w=1", "w=4/4", "=0/2", "w=-1/2", "w=a/b"):
        with pytest.raises(ConfigError, match="pattern=rank/ranks"):
            parse_slices([wrong])


def test_the_first_pattern_that_fits_counts_and_the_rest_is_whole() -> None:
    choose = choose_slices(parse_slices(["a.*=1/2", "a.w=0/4"]))
    layout = {"a.w": ("BF16", (5, 3)), "b": ("F32", (7,)), "a.s": ("I64", ())}
    assert choose(layout) == {"a.w": (6, 15), "b": (0, 7), "a.s": (0, 1)}


@given(shape=st.lists(st.integers(0, 7), max_size=3).map(tuple), ranks=st.integers(1, 5))
def test_the_ranks_slices_tile_the_tensor(shape: tuple[int, ...], ranks: int) -> None:
    if not shape or shape[0] == 0:
        assert elements_of(shape, Slice(0, ranks)) == elements_of(shape, None)
        return
    ends = [elements_of(shape, Slice(rank, ranks)) for rank in range(ranks)]
    assert ends[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert ends[-1][1] == elements_of(shape, None)[1]


def test_samples_are_chunks_of_what_is_held_and_half_of_them_changed() -> None:
    size = 3 * CHUNK_ELEMENTS + 5
    state = {
        "a": tensor("U8", (size,), bytes(size)),
        "b": tensor("U8", (size,), bytes(size))._replace(
            start=CHUNK_ELEMENTS, shape=(size + CHUNK_ELEMENTS,)
        ),
        "empty": tensor("U8", (0,), b""),
    }
    seen: set[tuple[str, int]] = set()
    for seed in range(60):
        drawn = draw_samples(state, {"b"}, seed=seed, count=4)
        assert len(set(drawn)) == len(drawn) <= 4
        assert any(sample.name == "b" for sample in drawn)
        for name, start, end in drawn:
            one = state[name]
            assert start % CHUNK_ELEMENTS == 0
            assert one.start <= start < end <= min(start + CHUNK_ELEMENTS, one.elements)
            seen.add((name, start))
    assert len(seen) == 8  # each chunk, over some versions
    assert draw_samples(state, None, seed=1, count=0) == []
    assert draw_samples({"empty": state["empty"]}, None, seed=1) == []
