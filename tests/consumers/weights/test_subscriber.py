"""Publisher, log and subscriber together, on the in-memory twins: what is offered is right, what is wrong is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from rollwire.consumers.weights.follow import FollowConfig, promotion
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.subscriber import SubscriberConfig, WeightSubscriber, backoff
from rollwire.consumers.weights.versions import Versions
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import DeadlineExceeded, DeltaCorrupt, StoreUnavailable
from rollwire.schemas.records import FleetStatus, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.weights import Staged

WAIT = 120.0  # the first use of a kernel compiles it
LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
OTHER = "0197a1b2-0000-7000-8000-0000000000bb"
QUICK = SubscriberConfig(poll_s=0.01, backoff_s=0.01, backoff_max_s=0.05)

MakeState = Callable[..., State]
Move = Callable[..., State]


class TroubledStore(MemoryStore):
    """`away`: no answers. `damaged`: these keys' contents do not fit their digests, this often."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.damaged: dict[str, int] = {}
        self.asked: list[str] = []

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        self.asked.append(key)
        if self.away:
            raise StoreUnavailable("no answer")
        if self.damaged.get(key, 0) > 0:
            self.damaged[key] -= 1
            raise DeltaCorrupt(f"{key} does not have its digest")
        return super().get(key, sha256=sha256)


class Plane:
    """One lineage's publisher, the log, and the subscribers of a test."""

    def __init__(self) -> None:
        self.log = MemoryLog(dict.fromkeys(TOPICS, 1), SystemClock())
        self.store = TroubledStore()
        self.writer = self.log.writer()
        self.events: list[WeightVersion] = []
        self._publishers: dict[str, SnapshotPublisher] = {}
        self._subscribers: list[WeightSubscriber] = []

    def store_version(self, version: int, state: State, lineage: str = LINEAGE) -> WeightVersion:
        """Stored but not committed: no event."""
        if lineage not in self._publishers:
            config = PublisherConfig(anchor_every=4)
            self._publishers[lineage] = SnapshotPublisher(
                self.store, model="policy", lineage=lineage, config=config
            )
        return self._publishers[lineage].submit(version, version, state).result(WAIT)

    def commit(self, event: WeightVersion) -> WeightVersion:
        self.writer.write([outgoing(event, source="rollwire/trainer", time_us=event.published_us)])
        self._publishers[event.lineage].committed(event.version)
        self.events.append(event)
        return event

    def publish(self, version: int, state: State, lineage: str = LINEAGE) -> WeightVersion:
        return self.commit(self.store_version(version, state, lineage))

    def subscriber(
        self, lineage: str | None = LINEAGE, follow: FollowConfig | None = None
    ) -> WeightSubscriber:
        self._subscribers.append(
            WeightSubscriber(
                self.log,
                self.store,
                fleet="fleet",
                replica="replica-0",
                lineage=lineage,
                config=QUICK,
                follow=follow,
            )
        )
        return self._subscribers[-1]

    def promote(self, channel: str, version: int) -> None:
        now = SystemClock().now_us()
        event = promotion(version, channel, model="policy", lineage=LINEAGE, by="test", at_us=now)
        self.writer.write([outgoing(event, source="test", time_us=now)])

    def statuses(self) -> list[FleetStatus]:
        events = [decode_record(record) for record in scan(self.log, ["fleet-status"])]
        return [event for event in events if isinstance(event, FleetStatus)]

    def wait_status(self, wanted: Callable[[FleetStatus], bool]) -> FleetStatus:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            for status in self.statuses():
                if wanted(status):
                    return status
        pytest.fail(f"no such status; there are {self.statuses()}")

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.close()
        for publisher in self._publishers.values():
            publisher.close()


@pytest.fixture
def plane() -> Iterator[Plane]:
    plane = Plane()
    yield plane
    plane.close()


def take(subscriber: WeightSubscriber, version: int, open_rollouts: int = 0) -> Staged:
    """Swaps until `version` is served: in between there may be older ones."""
    while True:
        staged = subscriber.wait(WAIT)
        subscriber.swapped(staged, 1.5, open_rollouts)
        if staged.event.version == version:
            return staged
        assert staged.event.version < version


def bits(state: State) -> dict[str, bytes]:
    return {name: t.bits.tobytes() for name, t in state.items()}


def test_follows_stages_swaps_and_reports(plane: Plane, make_state: MakeState, move: Move) -> None:
    states = [make_state()]
    plane.publish(0, states[0])
    subscriber = plane.subscriber()
    first = take(subscriber, 0)
    assert bits(first.state) == bits(states[0])
    assert subscriber.staged() is None
    for version in range(1, 7):
        states.append(move(states[-1], version))
        plane.publish(version, states[-1])
        staged = take(subscriber, version, open_rollouts=3)
        assert bits(staged.state) == bits(states[-1])
        assert staged.event == plane.events[version]
    assert bits(first.state) == bits(states[0])  # what is served is never written to
    subscriber.stopped(2)
    subscriber.close()
    statuses = plane.statuses()
    assert [s.state for s in statuses] == ["staged", "swapped"] * 7 + ["stopped"]
    last = statuses[-2]
    assert (last.version, last.wanted_version, last.pause_ms, last.open_rollouts) == (6, 6, 1.5, 3)
    assert last.state_digest == plane.events[6].state_digest == StateDigest.of(states[6]).hex
    assert last.stage_ms > 0
    assert (statuses[0].version, statuses[0].wanted_version, statuses[0].state_digest) == (-1, 0, "")
    assert (statuses[-1].version, statuses[-1].open_rollouts) == (6, 2)


def test_c24_c26_a_version_without_its_event_is_invisible(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    """C24, C26, law 3."""
    plane.publish(0, make_state())
    subscriber = plane.subscriber()
    take(subscriber, 0)
    stored = plane.store_version(1, move(make_state(), 1))
    assert plane.store.head(stored.manifest.key) is not None
    with pytest.raises(DeadlineExceeded, match="no new version"):
        subscriber.wait(0.2)
    plane.commit(stored)
    take(subscriber, 1)


def test_a_newcomer_skips_to_the_newest_version(plane: Plane, make_state: MakeState, move: Move) -> None:
    state = make_state()
    for version in range(6):
        plane.publish(version, state)
        state = move(state, version)
    staged = plane.subscriber().wait(WAIT)
    assert staged.event.version == 5
    anchor = plane.events[4].anchor
    assert anchor is not None
    assert anchor.key in plane.store.asked
    assert plane.events[0].manifest.key not in plane.store.asked


def test_c23_c31_damage_is_refused_and_an_anchor_leads_around_it(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    """C23, C31: nothing of a damaged delta is served, and version 4 is never put on version 2's weights."""
    states = [make_state()]
    for version in range(5):
        states.append(move(states[-1], version))
    for version in range(3):
        plane.publish(version, states[version])
    subscriber = plane.subscriber()
    served = take(subscriber, 2)
    before = bits(served.state)
    event = plane.store_version(3, states[3])
    plane.store.damaged = {event.objects[0].key: 1_000}
    plane.commit(event)
    refused = plane.wait_status(lambda s: s.state == "refused" and s.wanted_version == 3)
    assert "DeltaCorrupt" in refused.reason
    assert (refused.version, refused.state_digest) == (2, plane.events[2].state_digest)
    assert subscriber.staged() is None
    assert bits(served.state) == before
    plane.publish(4, states[4])  # with an anchor
    assert bits(take(subscriber, 4).state) == bits(states[4])


def test_damage_that_passes_is_healed_without_an_anchor(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    state = make_state()
    plane.publish(0, state)
    subscriber = plane.subscriber()
    take(subscriber, 0)
    event = plane.store_version(1, move(state, 1))
    plane.store.damaged = {event.objects[0].key: 2}
    plane.commit(event)
    assert bits(take(subscriber, 1).state) == bits(move(state, 1))
    assert "refused" in [s.state for s in plane.statuses()]


def test_an_outage_of_the_store_is_waited_out(plane: Plane, make_state: MakeState, move: Move) -> None:
    plane.publish(0, make_state())
    subscriber = plane.subscriber()
    take(subscriber, 0)
    plane.store.away = True
    plane.publish(1, move(make_state(), 1))
    with pytest.raises(DeadlineExceeded, match="last problem: version 1: no answer"):
        subscriber.wait(0.5)
    plane.store.away = False
    take(subscriber, 1)
    assert "refused" not in [s.state for s in plane.statuses()]


def test_a_result_that_is_not_the_published_one_is_refused(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    plane.publish(0, make_state())
    subscriber = plane.subscriber()
    take(subscriber, 0)
    import msgspec

    event = plane.store_version(1, move(make_state(), 1))
    plane.commit(msgspec.structs.replace(event, state_digest="0" * 64))
    refused = plane.wait_status(lambda s: s.state == "refused")
    assert refused.version == 0
    assert subscriber.staged() is None


def test_events_of_other_lineages_repeats_and_poison_are_passed_over(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    plane.publish(0, make_state())
    plane.publish(0, make_state(9), lineage=OTHER)
    plane.writer.write([Outgoing("weight-versions", b"policy", b"no event")])
    repeat = plane.events[0]
    plane.writer.write([outgoing(repeat, source="rollwire/trainer", time_us=repeat.published_us)])
    plane.publish(1, move(make_state(), 1))
    subscriber = plane.subscriber()
    staged = take(subscriber, 1)
    assert staged.event.lineage == LINEAGE
    newest = plane.subscriber(lineage=None)
    assert newest.wait(WAIT).event.lineage == OTHER


def test_a_new_lineage_is_followed_when_none_was_asked_for(plane: Plane, make_state: MakeState) -> None:
    plane.publish(0, make_state())
    subscriber = plane.subscriber(lineage=None)
    take(subscriber, 0)
    plane.publish(0, make_state(5), lineage=OTHER)
    staged = subscriber.wait(WAIT)
    assert staged.event.lineage == OTHER
    assert bits(staged.state) == bits(make_state(5))


def test_a_sampler_follows_a_channel_forwards_and_never_back(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    """A rollout's spans never fall: going back is for whoever serves no rollouts, or for the next start."""
    state = make_state()
    for version in range(4):
        plane.publish(version, state)
        state = move(state, version)
    subscriber = plane.subscriber(follow=FollowConfig(mode="channel", channel="canary"))
    with pytest.raises(DeadlineExceeded):
        subscriber.wait(0.2)
    plane.promote("canary", 2)
    assert take(subscriber, 2).event == plane.events[2]
    assert plane.wait_status(lambda s: s.state == "swapped").channel == "canary"
    plane.promote("canary", 1)
    refused = plane.wait_status(lambda s: s.state == "refused")
    assert (refused.version, refused.wanted_version) == (2, 1)
    assert "older than 2" in refused.reason
    assert subscriber.staged() is None
    plane.promote("canary", 3)
    take(subscriber, 3)
    plane.promote("fleet/replica-0", 1)  # pinned at its next start
    assert plane.subscriber().wait(WAIT).event == plane.events[1]


def test_a_log_without_the_newer_topics_is_followed(make_state: MakeState) -> None:
    plane = Plane()
    plane.log = MemoryLog({"weight-versions": 1, "fleet-status": 1}, SystemClock())
    plane.writer = plane.log.writer()
    plane.publish(0, make_state())
    take(plane.subscriber(), 0)
    plane.close()


def test_waiting_for_nothing_ends_at_the_deadline(plane: Plane) -> None:
    with pytest.raises(DeadlineExceeded, match=LINEAGE):
        plane.subscriber().wait(0.05)


def test_backoff_doubles_up_to_its_bound() -> None:
    config = SubscriberConfig(backoff_s=0.5, backoff_max_s=3.0)
    assert [backoff(n, config) for n in (1, 2, 3, 4, 5_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_versions_keep_the_first_of_repeats(plane: Plane, make_state: MakeState, move: Move) -> None:
    a = plane.publish(0, make_state())
    b = plane.publish(1, move(make_state(), 1))
    other = plane.publish(0, make_state(3), lineage=OTHER)
    fixed, free = Versions(LINEAGE), Versions()
    assert [fixed.add(e) for e in (a, other, b, a)] == [True, False, True, False]
    assert fixed.newest == b
    assert [free.add(e) for e in (a, b, other, b)] == [True, True, True, False]
    assert (free.lineage, free.newest) == (OTHER, other)
    assert not Versions(LINEAGE, model="another").add(a)
