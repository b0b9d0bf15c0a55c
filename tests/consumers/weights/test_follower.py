"""A follower and its target, on the in-memory twins of log and store: served is what was published, or what was before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rollwire.consumers.weights.follow import FollowConfig, promotion
from rollwire.consumers.weights.follower import Follower, FollowerConfig
from rollwire.consumers.weights.probe import Probe
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.slices import choose_slices, parse_slices, share_of
from rollwire.consumers.weights.staging import SubscriberConfig
from rollwire.consumers.weights.targets.folder import CURRENT, FolderTarget
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.consumers.weights.targets.target import Sample, Serving, Target, Update
from rollwire.consumers.weights.targets.torch_module import TorchTarget
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, tensor
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import DeadlineExceeded, DeltaCorrupt, Refused, StoreUnavailable, TargetFailed
from rollwire.schemas.records import FleetStatus, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore

WAIT = 120.0  # the first use of a kernel compiles it
LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
QUICK = FollowerConfig(subscriber=SubscriberConfig(poll_s=0.01, backoff_s=0.01, backoff_max_s=0.05))

MakeState = Callable[..., State]
Move = Callable[..., State]


class TroubledStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.damaged: set[str] = set()

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        if self.away:
            raise StoreUnavailable("no answer")
        if key in self.damaged:
            raise DeltaCorrupt(f"{key} does not have its digest")
        return super().get(key, sha256=sha256)


class Plane:
    def __init__(self, coder: Literal["gap", "context"] = "gap") -> None:
        self.log = MemoryLog(dict.fromkeys(TOPICS, 1), SystemClock())
        self.store = TroubledStore()
        self.writer = self.log.writer()
        self.events: list[WeightVersion] = []
        self.states: list[State] = []
        self._publisher = SnapshotPublisher(
            self.store, model="policy", lineage=LINEAGE, config=PublisherConfig(anchor_every=4, coder=coder)
        )
        self._followers: list[Follower] = []

    def publish(self, state: State) -> WeightVersion:
        version = len(self.events)
        event = self._publisher.submit(version, version, state).result(WAIT)
        self.writer.write([outgoing(event, source="rollwire/trainer", time_us=event.published_us)])
        self._publisher.committed(version)
        self.events.append(event)
        self.states.append(state)
        return event

    def promote(self, channel: str, version: int) -> None:
        now = SystemClock().now_us()
        event = promotion(version, channel, model="policy", lineage=LINEAGE, by="test", at_us=now)
        self.writer.write([outgoing(event, source="test", time_us=now)])

    def follow(
        self,
        target: Target,
        follow: FollowConfig | None = None,
        *,
        probe: Probe | None = None,
        slices: Sequence[str] = (),
    ) -> Follower:
        spec = parse_slices(slices)
        self._followers.append(
            Follower(
                self.log,
                self.store,
                target,
                fleet="fleet",
                replica="r0",
                follow=follow,
                probe=probe,
                choose=choose_slices(spec) if spec else None,
                share=share_of(spec),
                config=QUICK,
            )
        )
        return self._followers[-1]

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
        for follower in self._followers:
            follower.close()
        self._publisher.close()


@pytest.fixture
def plane() -> Iterator[Plane]:
    plane = Plane()
    yield plane
    plane.close()


def bits(state: State) -> dict[str, bytes]:
    return {name: one.bits.tobytes() for name, one in state.items()}


def served(target: NumpyTarget) -> dict[str, bytes]:
    with target.reading() as state:
        return bits(state)


def refused(status: FleetStatus) -> bool:
    return status.state == "refused"


class OtherBits(NumpyTarget):
    """Serves other bits than it was given, this often."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def read_back(self, samples: Sequence[Sample]) -> list[NDArray[Any]] | None:
        found = super().read_back(samples)
        if found is not None and self.times and (self.held() or {})["step"].bits[0]:
            self.times -= 1
            return [array ^ np.ones((), array.dtype) for array in found]
        return found


class Stubborn(NumpyTarget):
    """Takes nothing this often."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def stage(self, update: Update) -> None:
        super().stage(update)
        if update.event.version and self.times:
            self.times -= 1
            raise TargetFailed("the engine says no")


class Absent(NumpyTarget):
    """Does not answer this often."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def serving(self) -> Serving | None:
        self.times -= 1
        if self.times >= 0:
            raise TargetFailed("nobody answers")
        return None


class Torn(NumpyTarget):
    """Dies in the middle of its second swap, and cannot go back."""

    def __init__(self, lost: Exception) -> None:
        super().__init__()
        self.swaps = 0
        self.lost = lost

    def swap(self) -> float:
        self.swaps += 1
        if self.swaps == 2:
            (self.held() or {})["layers.0.weight"].bits[:100] ^= 0x7FFF
            raise TargetFailed("the device is lost")
        return super().swap()

    def undo(self) -> None:
        super().undo()
        if self.swaps == 2:
            raise self.lost


@pytest.mark.parametrize("lost", [TargetFailed("no way back"), RuntimeError("no way back")])
def test_nothing_is_built_on_arrays_that_could_not_go_back(
    plane: Plane, make_state: MakeState, move: Move, lost: Exception
) -> None:
    plane.publish(make_state())
    target = Torn(lost)
    follower = plane.follow(target)
    follower.wait_served(0, WAIT)
    plane.publish(move(plane.states[-1], 1, density=0.01))
    status = plane.wait_status(refused)
    assert status.version == -1
    assert "the device is lost" in status.reason
    assert "no way back" in status.reason
    follower.wait_served(1, WAIT)
    assert served(target) == bits(plane.states[1])


def test_a_target_that_does_not_answer_yet_is_asked_again(plane: Plane, make_state: MakeState) -> None:
    plane.publish(make_state())
    target = Absent(times=2)
    plane.follow(target).wait_served(0, WAIT)
    plane.wait_status(lambda s: s.state == "swapped")
    reasons = [s.reason for s in plane.statuses() if s.state == "refused"]
    assert reasons == ["TargetFailed: nobody answers"] * 2


def test_what_is_served_is_said_again_before_the_topic_forgets_it(
    plane: Plane, make_state: MakeState
) -> None:
    plane.publish(make_state())
    config = FollowerConfig(subscriber=QUICK.subscriber, remind_s=0.02)
    follower = Follower(plane.log, plane.store, NumpyTarget(), fleet="fleet", replica="r0", config=config)
    follower.wait_served(0, WAIT)
    deadline = time.monotonic() + WAIT
    while len(plane.statuses()) < 5 and time.monotonic() < deadline:
        pass
    follower.close()
    said = [(s.state, s.version, s.state_digest) for s in plane.statuses()]
    assert said[2:-1] == [("swapped", 0, plane.events[0].state_digest)] * (len(said) - 3)
    assert len(said) >= 6


def test_each_version_is_served_bit_for_bit_in_the_same_arrays(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    target = NumpyTarget()
    plane.publish(make_state())
    follower = plane.follow(target)
    follower.wait_served(0, WAIT)
    with target.reading() as state:
        arrays = {name: one.bits for name, one in state.items()}
    for version in range(1, 6):
        plane.publish(move(plane.states[-1], version))
        assert follower.wait_served(version, WAIT) == plane.events[version]
        assert served(target) == bits(plane.states[version])
    with target.reading() as state:
        assert all(state[name].bits is array for name, array in arrays.items())
    follower.close()
    statuses = plane.statuses()
    assert [s.state for s in statuses] == ["staged", "swapped"] * 6 + ["stopped"]
    last = statuses[-2]
    assert (last.version, last.wanted_version, last.target, last.channel) == (5, 5, "numpy", "")
    assert last.state_digest == plane.events[5].state_digest
    # The event names the delta's shards: nothing else is read.
    assert last.fetched_bytes == sum(shard.size for shard in plane.events[5].objects) > 0
    assert 0 <= last.pause_ms < last.stage_ms + 1_000


def test_a_replica_far_behind_goes_over_several_versions_in_one_swap(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    target = NumpyTarget()
    plane.publish(make_state())
    follower = plane.follow(target, FollowConfig(mode="channel", channel="canary"))
    plane.promote("canary", 0)
    follower.wait_served(0, WAIT)
    array = (target.held() or {})["layers.0.weight"].bits
    for version in range(1, 4):
        plane.publish(move(plane.states[-1], version))
    plane.promote("canary", 3)
    follower.wait_served(3, WAIT)
    assert served(target) == bits(plane.states[3])
    assert (target.held() or {})["layers.0.weight"].bits is array
    plane.wait_status(lambda s: s.version == 3)
    assert {s.version for s in plane.statuses()} <= {-1, 0, 3}


def test_arrays_that_serve_already_are_recognised_or_overwritten(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    for version in range(3):
        plane.publish(make_state() if not version else move(plane.states[-1], version))

    def own(state: State) -> dict[str, Tensor]:
        return {name: one._replace(bits=one.bits.copy()) for name, one in state.items()}

    known = NumpyTarget(own(plane.states[1]))
    plane.follow(known).wait_served(2, WAIT)
    assert served(known) == bits(plane.states[2])
    first = plane.wait_status(lambda s: s.state == "swapped")
    assert (first.version, first.fetched_bytes) == (1, 0)  # what it served was built on

    unknown = NumpyTarget(own(make_state(77)))
    array = (unknown.held() or {})["layers.0.weight"].bits
    plane.follow(unknown).wait_served(2, WAIT)
    assert served(unknown) == bits(plane.states[2])
    assert (unknown.held() or {})["layers.0.weight"].bits is array


def test_a_name_that_no_event_may_carry_is_refused_at_the_start(plane: Plane) -> None:
    with pytest.raises(Refused, match="replica="):
        Follower(plane.log, plane.store, NumpyTarget(), fleet="fleet", replica="no blanks")


def test_c27_arrays_of_another_model_are_left_alone(plane: Plane, make_state: MakeState) -> None:
    plane.publish(make_state())
    other = {"layers.0.weight": tensor("F32", (2,), np.zeros(2, np.float32))}
    target = NumpyTarget(other)
    plane.follow(target)
    status = plane.wait_status(refused)
    assert "StateMismatch" in status.reason
    assert "empty" in status.reason  # the first of the tensors that differ
    assert served(target) == {"layers.0.weight": bytes(8)}


@pytest.mark.parametrize("coder", ["gap", "context"])
def test_a_channel_is_followed_forwards_and_back(
    coder: Literal["gap", "context"], make_state: MakeState, move: Move
) -> None:
    """Also where deltas do not run backwards, and no inverse was written: then it is a snapshot that leads there."""
    plane = Plane(coder)
    for version in range(4):
        plane.publish(make_state() if not version else move(plane.states[-1], version))
    target = NumpyTarget()
    follower = plane.follow(target, FollowConfig(mode="channel", channel="canary"))
    with pytest.raises(DeadlineExceeded, match="nothing is"):
        follower.wait_served(3, 0.2)
    for version in (2, 3, 1):
        plane.promote("canary", version)
        follower.wait_served(version, WAIT)
        assert served(target) == bits(plane.states[version])
        assert plane.wait_status(lambda s, v=version: s.version == v).channel == "canary"  # type: ignore[misc]
    plane.promote("fleet/r0", 0)  # pinned while it runs
    follower.wait_served(0, WAIT)
    plane.promote("canary", 3)
    plane.promote("fleet/r0", -1)
    follower.wait_served(3, WAIT)
    assert served(target) == bits(plane.states[3])
    plane.close()


def test_a_version_that_is_not_there_is_refused_once_and_waited_for(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    plane.publish(make_state())
    follower = plane.follow(NumpyTarget(), FollowConfig(mode="pinned", version=1))
    status = plane.wait_status(refused)
    assert (status.version, status.wanted_version) == (-1, 1)
    assert "version 1 is not published" in status.reason
    plane.publish(move(plane.states[-1], 1))
    follower.wait_served(1, WAIT)
    plane.publish(move(plane.states[-1], 2))
    with pytest.raises(DeadlineExceeded):
        follower.wait_served(2, 0.2)
    assert len([s for s in plane.statuses() if s.state == "refused"]) == 1


def test_other_bits_than_published_are_undone_and_tried_again(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    target = OtherBits(times=2)
    plane.publish(make_state(0))
    follower = plane.follow(target)
    follower.wait_served(0, WAIT)
    plane.publish({**move(make_state(0), 1), "step": make_state(9)["step"]})
    status = plane.wait_status(refused)
    assert "ProbeFailed" in status.reason
    assert "other bits" in status.reason
    assert (status.version, status.wanted_version) == (0, 1)
    follower.wait_served(1, WAIT)
    assert served(target) == bits(plane.states[1])


def test_a_probe_that_refuses_undoes_and_the_version_is_not_tried_again(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    target = NumpyTarget()
    asked: list[int] = []

    def probe(event: WeightVersion) -> None:
        asked.append(event.version)
        if event.version == 1:
            raise ValueError("it says that 2 + 2 is 5")

    plane.publish(make_state())
    follower = plane.follow(target, probe=probe)
    follower.wait_served(0, WAIT)
    plane.publish(move(plane.states[-1], 1))
    status = plane.wait_status(refused)
    assert "the probe refused version 1: it says that 2 + 2 is 5" in status.reason
    with pytest.raises(DeadlineExceeded, match="version 0 is; last problem: ProbeFailed"):
        follower.wait_served(1, 0.3)
    assert served(target) == bits(plane.states[0])
    plane.publish(move(plane.states[-1], 2))
    follower.wait_served(2, WAIT)
    assert served(target) == bits(plane.states[2])
    assert asked == [0, 1, 2]


def test_a_target_that_fails_serves_on_and_is_asked_again(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    target = Stubborn(times=2)
    plane.publish(make_state())
    follower = plane.follow(target)
    follower.wait_served(0, WAIT)
    plane.publish(move(plane.states[-1], 1))
    assert "the engine says no" in plane.wait_status(refused).reason
    follower.wait_served(1, WAIT)
    assert served(target) == bits(plane.states[1])
    assert len([s for s in plane.statuses() if s.state == "refused"]) == 2


def test_c23_damage_is_refused_before_a_byte_changes(plane: Plane, make_state: MakeState, move: Move) -> None:
    target = NumpyTarget()
    plane.publish(make_state())
    follower = plane.follow(target)
    follower.wait_served(0, WAIT)
    plane.store.away = True
    event = plane.publish(move(plane.states[-1], 1))
    plane.store.damaged = {shard.key for shard in event.objects}
    plane.store.away = False
    status = plane.wait_status(refused)
    assert "DeltaCorrupt" in status.reason
    assert served(target) == bits(plane.states[0])
    plane.store.damaged = set()
    follower.wait_served(1, WAIT)


def test_the_publisher_may_lie_about_the_result_and_nothing_is_served(
    plane: Plane, make_state: MakeState, move: Move
) -> None:
    target = NumpyTarget()
    plane.publish(make_state())
    plane.follow(target).wait_served(0, WAIT)
    event = plane._publisher.submit(1, 1, move(plane.states[-1], 1)).result(WAIT)
    wrong = msgspec.structs.replace(event, state_digest="0" * 64)
    plane.writer.write([outgoing(wrong, source="rollwire/trainer", time_us=event.published_us)])
    assert "DigestMismatch" in plane.wait_status(refused).reason
    assert served(target) == bits(plane.states[0])


def test_a_folder_is_followed_and_built_on_after_a_restart(
    plane: Plane, make_state: MakeState, move: Move, tmp_path: Path
) -> None:
    for version in range(2):
        plane.publish(make_state() if not version else move(plane.states[-1], version))
    target = FolderTarget(tmp_path)
    follower = plane.follow(target)
    follower.wait_served(1, WAIT)
    plane.publish(move(plane.states[-1], 2))
    follower.wait_served(2, WAIT)
    assert bits(target.reread()) == bits(plane.states[2])
    follower.close()
    target.close()
    event = plane.publish(move(plane.states[-1], 3))
    again = FolderTarget(tmp_path)
    assert again.serving() == Serving(LINEAGE, 2, plane.events[2].state_digest)
    follower = plane.follow(again)
    follower.wait_served(3, WAIT)
    assert bits(again.reread()) == bits(plane.states[3])
    follower.close()
    last = plane.statuses()[-2]
    assert last.target == "folder"
    assert last.fetched_bytes == sum(shard.size for shard in event.objects)
    assert (tmp_path / CURRENT).resolve().name.startswith("00000003-")
    again.close()


def test_c24_a_version_that_changes_nothing_is_served_without_a_byte(
    plane: Plane, make_state: MakeState
) -> None:
    target = NumpyTarget()
    plane.publish(make_state())
    follower = plane.follow(target)
    follower.wait_served(0, WAIT)
    assert plane.publish(make_state()).kind == "empty"
    follower.wait_served(1, WAIT)
    assert served(target) == bits(plane.states[0])
    status = plane.wait_status(lambda s: s.state == "swapped" and s.version == 1)
    assert (status.fetched_bytes, status.state_digest) == (0, plane.events[0].state_digest)


def test_c34_a_torn_folder_is_found_at_the_next_start_and_written_anew(
    plane: Plane, make_state: MakeState, tmp_path: Path
) -> None:
    """Whatever tore it, a disk say: the book says version 0, the bits do not."""
    plane.publish(make_state())
    target = FolderTarget(tmp_path)
    plane.follow(target).wait_served(0, WAIT)
    plane.close()
    target.close()
    file = next((tmp_path / CURRENT).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    again = FolderTarget(tmp_path)
    assert again.serving() == Serving(LINEAGE, 0, plane.events[0].state_digest)
    follower = plane.follow(again)
    follower.wait_served(0, WAIT)
    assert bits(again.reread()) == bits(plane.states[0])
    follower.close()
    again.close()


@pytest.mark.parametrize("strided", [False, True])
def test_a_torch_module_is_followed(plane: Plane, strided: bool) -> None:
    import torch

    def state(seed: int) -> State:
        rng = np.random.default_rng(seed)
        return {
            "weight": tensor("BF16", (8, 6), rng.integers(0, 1 << 16, 48, dtype=np.uint16)),
            "bias": tensor("BF16", (8,), np.zeros(8, np.uint16)),
        }

    module = torch.nn.Linear(6, 8, dtype=torch.bfloat16)
    if strided:
        module.weight = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16).t())
    target = TorchTarget(module)
    plane.publish(state(0))
    follower = plane.follow(target)
    for version in range(3):
        follower.wait_served(version, WAIT)
        flat = module.weight.detach().contiguous().reshape(-1).view(torch.int16).numpy().view(np.uint16)
        assert flat.tolist() == plane.states[version]["weight"].bits.tolist()
        if version < 2:
            plane.publish(state(version + 1))


def test_a_slice_fetches_its_chunks_alone(plane: Plane) -> None:
    size = 8 * CHUNK_ELEMENTS
    rng = np.random.default_rng(0)

    def moved(state: State) -> State:
        weight = state["weight"].bits.copy()
        at = rng.choice(size, size // 50, replace=False)
        weight[at] ^= rng.integers(1, 256, at.size).astype(weight.dtype)
        return {**state, "weight": state["weight"]._replace(bits=weight)}

    first: State = {
        "weight": tensor("BF16", (512, size // 512), rng.integers(0, 1 << 16, size, dtype=np.uint16)),
        "norm": tensor("F32", (4,), np.ones(4, np.float32)),
    }
    plane.publish(first)
    target = NumpyTarget()
    follower = plane.follow(target, slices=["weight=1/4"])
    for version in range(3):
        follower.wait_served(version, WAIT)
        weight = plane.states[version]["weight"].bits
        with target.reading() as held:
            assert held["weight"].start == size // 4
            assert held["weight"].bits.tobytes() == weight[size // 4 : size // 2].tobytes()
            assert held["norm"].bits.tobytes() == plane.states[version]["norm"].bits.tobytes()
        if version < 2:
            plane.publish(moved(plane.states[-1]))
    follower.close()
    delta = sum(shard.size for shard in plane.events[2].objects)
    assert plane.statuses()[-2].fetched_bytes <= 1.15 * delta / 4
