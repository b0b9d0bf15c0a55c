"""The proof of an erasure: live traffic and feedback of two people through the whole flow, one of them erased, and then every
topic, changelog, object, value of the cache and file of the broker is searched for what that person wrote and read."""

from __future__ import annotations

import base64
import itertools
import json
import re
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest
import redis

from rollwire.consumers.trainer.arithmetic import run_arithmetic_trainer
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.ops import cli
from rollwire.ops.keys import open_keys, pseudonym_secret
from rollwire.ops.looking import Looking
from rollwire.ops.readable import readable_event
from rollwire.ops.stack import StackInfo
from rollwire.ops.topics import list_topics
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Erased
from rollwire.schemas.golden import load_examples
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.schemas.records import (
    Event,
    Feedback,
    Microbatch,
    ProductionRollout,
    Rollout,
    Seal,
    Segment,
    Span,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.assemble_config import ProductionConfig
from rollwire.streams.emit import decode_record, deletes, outgoing
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_cohort import CohortConfig
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.run_pack import run_pack
from rollwire.streams.seams.cache_redis import RedisCache
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.log import Record
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.sealing import open_field, seal_field
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = pytest.mark.system

SCRIPT: Final = Path(sys.executable).with_name("rollwire")
TENANT, ADA, BOB = "acme", "ada@example.org", "bob@example.org"
LINEAGE: Final = "0197a1b2-0000-7000-8000-0000000000aa"
WINDOW_S, GRACE_S = 6, 1
ANSWERS, PROMPT, SAMPLED = 8, 12, 12
WAIT_S: Final = 120.0
Wait = Callable[[Callable[[], bool], float], None]


class Said(NamedTuple):
    """What one person wrote and read: nothing of it may be anywhere afterwards."""

    tokens: tuple[bytes, ...]  # of each of their rollouts, each token below 256
    comment: str


def said() -> Said:
    return Said(
        tuple(secrets.token_bytes(PROMPT + SAMPLED) for _ in range(ANSWERS // 2)),
        f"it was {secrets.token_hex(12)} who wrote this, grüße",
    )


def forms(plain: bytes) -> Iterator[bytes]:
    """The bytes themselves, in hex and in base64 wherever they begin in it."""
    yield plain
    yield plain.hex().encode()
    yield plain.hex().upper().encode()
    for shift in range(3):
        whole = base64.b64encode(bytes(shift) + plain)
        yield whole[4 if shift else 0 : -4]  # without what the neighbours share


def needles(person: Said, keys: tuple[bytes, ...], name: str) -> dict[str, bytes]:
    """Every form of everything, by a name to report."""
    found: dict[str, bytes] = {"the name": name.encode()}
    words = {"comment": person.comment.encode(), **{f"key {n}": key for n, key in enumerate(keys)}}
    for n, tokens in enumerate(person.tokens):
        ids = np.frombuffer(tokens, "u1")
        # Prompt and answer each: a part alone is too much already.
        for part, cut in (("prompt", ids[:PROMPT]), ("answer", ids[PROMPT:])):
            words |= {f"{part} {n} as {t}": cut.astype(t).tobytes() for t in ("u1", "<u2", "<u4", "<i8")}
            found[f"{part} {n} as JSON"] = json.dumps(cut.tolist())[1:-1].encode()
            found[f"{part} {n} as text"] = ",".join(map(str, cut.tolist())).encode()
    for what, plain in words.items():
        found |= {f"{what}, form {k}": form for k, form in enumerate(forms(plain))}
    return found


def hits(where: str, data: bytes | None, wanted: dict[str, bytes]) -> list[str]:
    return [] if not data else [f"{name} in {where}" for name, needle in wanted.items() if needle in data]


def test_the_search_finds_what_it_looks_for() -> None:
    person = said()
    wanted = needles(person, (b"k" * 32,), "ada")
    assert hits("nothing", secrets.token_bytes(10_000), wanted) == []
    tokens = np.frombuffer(person.tokens[1], "u1")
    for planted, name in (
        (person.comment.encode(), "comment, form 0"),
        (tokens.astype("<u4").tobytes(), "prompt 1 as <u4, form 0"),
        (tokens.astype("<u2").tobytes().hex().encode(), "answer 1 as <u2, form 1"),
        (base64.b64encode(b"ab" + tokens.tobytes() + b"cd"), "prompt 1 as u1, form 5"),
        (base64.b64encode(b"abc" + b"k" * 32), "key 0, form 3"),
        (json.dumps({"token_ids": tokens.tolist()}).encode(), "prompt 1 as JSON"),
    ):
        assert f"{name} in x" in hits("x", b"before" + planted + b"after", wanted)


def rollout_of(keys: KeyStore, pseudonym: str, tokens: bytes, n: int) -> ProductionRollout:
    (example,) = load_examples("production-rollouts")[:1]
    now_us = time.time_ns() // 1_000
    group_id = new_group_id(now_us, secrets.randbits(74))
    held = np.frombuffer(tokens, "u1").astype("<u4").tobytes()
    held, seal = seal_field(keys, pseudonym, f"{group_id}.0", "token_ids", held)
    made = msgspec.structs.replace(
        example.event,
        rollout_id=f"{group_id}.0",
        group_id=group_id,
        task_id=group_id,
        lineage=LINEAGE,
        tenant=TENANT,
        token_ids=held,
        sealed=seal,
        segments=(
            Segment(kind="prompt", start=0, end=PROMPT),
            Segment(kind="sampled", start=PROMPT, end=PROMPT + SAMPLED),
        ),
        loss_mask=bytes(PROMPT) + b"\1" * SAMPLED,
        logprobs=np.full(SAMPLED, -0.5 - n / 16, "<f4").tobytes(),
        spans=(Span(version=0, start=0, end=SAMPLED),),
        started_us=now_us,
        finished_us=now_us,
    )
    assert isinstance(made, ProductionRollout)
    return made


class Flow(NamedTuple):
    """The processes of a run, under one prefix."""

    stack: StackInfo
    prefix: str
    log: KafkaLog
    store: S3Store
    url: str

    def post(self, **event: Any) -> None:
        request = urllib.request.Request(
            f"{self.url}/v1/feedback",
            json.dumps(event).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200

    def events(self, topic: str) -> list[Event]:
        return [decode_record(record) for record in scan(self.log, (topic,)) if not deletes(record)]

    def train(self, stop: threading.Event, until_step: int) -> WeightVersion | None:
        return run_arithmetic_trainer(
            self.log,
            self.store,
            TrainerConfig(checkpoint_every=100),
            prefix=self.prefix,
            model="policy",
            lineage=LINEAGE,
            stop=stop,
            until_step=until_step,
            keys=lambda: open_keys(self.stack),
        )

    def records(self) -> Iterator[Record]:
        """Of every topic that the broker has under the prefix: changelogs and what Faust keeps, too."""
        for state in list_topics(self.stack.bootstrap, self.prefix):
            yield from scan(self.log, (state.name.removeprefix(self.prefix),))


@pytest.fixture
def flow(stack: StackInfo, prefix: str, log: KafkaLog, store: S3Store, tmp_path: Path) -> Iterator[Flow]:
    """Gateway, attribution and monitor in processes of their own; assemble, pack and the trainer, up to version 1, in threads."""
    rules = tmp_path / "rules.toml"
    text = resources.files("rollwire.schemas.rules").joinpath("default.toml").read_text("utf-8")
    for name, seconds in (("window_s", WINDOW_S), ("grace_s", GRACE_S)):
        text = re.sub(rf"(?m)^{name} = \d+", f"{name} = {seconds}", text)
    rules.write_text(text)
    common = ["--dir", str(stack.dir), "--prefix", prefix, "--rules", str(rules)]
    stop = threading.Event()
    with ExitStack() as opened:
        attribute = subprocess.Popen([SCRIPT, "attribute", *common])
        opened.callback(_ended, attribute)
        gateway = subprocess.Popen(
            [SCRIPT, "gateway", "--open", "--tenant", TENANT, "--port", "0", *common],
            stdout=subprocess.PIPE,
            text=True,
        )
        opened.callback(_ended, gateway)
        assert gateway.stdout is not None
        opened.callback(gateway.stdout.close)
        told = (stack.bootstrap, prefix, stack.redis_url)
        code = f"from rollwire.streams.monitor import run_monitor; run_monitor(*{told!r})"
        opened.callback(_ended, subprocess.Popen([sys.executable, "-P", "-c", code]))
        made = Flow(stack, prefix, log, store, gateway.stdout.readline().split()[-1])
        cohort = CohortConfig(production_share=1.0, coverage_floor=0.0)
        pack = PackConfig(groups_per_step=ANSWERS, cohort=cohort)
        opened.enter_context(
            _running(
                lambda: run_assemble(log, ProductionConfig(), prefix=prefix, stop=stop, partitions=range(4)),
                lambda: run_pack(log, pack, prefix=prefix, model="policy", lineage=LINEAGE, stop=stop),
                lambda: made.train(stop, 1),
                stop=stop,
            )
        )
        yield made


def _ended(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    assert process.wait(60) == 0


@contextmanager
def _running(*works: Callable[[], object], stop: threading.Event) -> Iterator[None]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)


def seals_of(event: Any, event_id: str = "") -> Iterator[tuple[Seal, str, str, bytes]]:
    """Every seal in an event, with what it opens: (seal, event id, field, ciphertext)."""
    match event:
        case Rollout(sealed=Seal() as seal):
            yield seal, event.rollout_id, "token_ids", event.token_ids
        case Feedback(seal=Seal() as seal):
            yield seal, event.feedback_id, "comment", event.comment or b""
        case Microbatch():
            bounds = np.frombuffer(event.cu_seqlens, "<i4").tolist()
            for n, (start, end) in enumerate(itertools.pairwise(bounds)):
                held = event.seals[n] if event.seals else None
                if held is not None:
                    yield held, event.rollout_ids[n], "token_ids", event.token_ids[4 * start : 4 * end]
        case msgspec.Struct():
            for name in event.__struct_fields__:
                yield from seals_of(getattr(event, name))
        case tuple():
            for part in event:
                yield from seals_of(part)
        case _:
            pass


def cached(url: str) -> Iterator[tuple[str, bytes]]:
    """Every key of Redis and all that stands under it."""
    with closing(redis.Redis.from_url(url)) as client:
        for key in client.scan_iter(count=1_000):
            whole: Any
            match client.type(key):
                case b"string":
                    whole = [client.get(key)]
                case b"hash":
                    whole = list(itertools.chain(*dict(client.hgetall(key)).items()))
                case b"list":
                    whole = client.lrange(key, 0, -1)
                case b"set":
                    whole = list(client.sscan_iter(key))
                case b"zset":
                    whole = client.zrange(key, 0, -1)
                case _:
                    whole = [client.dump(key)]
            yield repr(key), b"\0".join([key, *(part for part in whole if part)])


def broker_files(stack: StackInfo, prefix: str) -> Iterator[Path]:
    """What the broker wrote, whether a reader would see it or not: aborted transactions, too. Indices hold numbers alone, and
    are allocated at full size."""
    folders = [path for path in stack.dir.rglob(f"{prefix}*") if path.is_dir()]
    assert folders
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    yield from (path for path in files if path.suffix not in (".index", ".timeindex"))


def test_after_an_erasure_nothing_shows_what_a_person_wrote_or_read(
    flow: Flow, wait_for: Wait, tmp_path: Path
) -> None:
    began_us = time.time_ns() // 1_000
    stack, keys = flow.stack, open_keys(flow.stack)
    secret = pseudonym_secret(stack)
    # The stack is the whole session's, and its people are too: these are nobody else's.
    run = secrets.token_hex(4)
    names = {who: f"{run}.{who}" for who in (ADA, BOB)}
    pseudonyms = {who: pseudonym_of(secret, TENANT, name) for who, name in names.items()}
    people = {ADA: said(), BOB: said()}

    wait_for(lambda: bool(flow.events("weight-versions")), WAIT_S)
    rollouts: dict[str, list[ProductionRollout]] = {ADA: [], BOB: []}
    for n in range(ANSWERS):
        who = (ADA, BOB)[n % 2]
        rollouts[who].append(rollout_of(keys, pseudonyms[who], people[who].tokens[n // 2], n))
    with closing(flow.log.writer()) as writer:
        writer.write(
            [outgoing(r, source="test", time_us=r.finished_us) for mine in rollouts.values() for r in mine]
        )
    for who, mine in rollouts.items():
        for n, rollout in enumerate(mine):
            flow.post(
                rollout_id=rollout.rollout_id, signal="thumb", value=1 - 2 * (n % 2), subject=names[who]
            )
        flow.post(
            rollout_id=mine[0].rollout_id, signal="comment", comment=people[who].comment, subject=names[who]
        )
    wait_for(lambda: bool(flow.events("train-steps")), WAIT_S)
    (step,) = flow.events("train-steps")
    assert isinstance(step, TrainStep)
    assert (step.production_sequences, step.erased_sequences) == (ANSWERS, 0)

    data_keys = {who: keys.key_of(p, 1) for who, p in pseudonyms.items()}
    text = shown(flow, "user-feedback", keys) + shown(flow, "production-rollouts", keys)
    assert people[ADA].comment in text  # before: whoever has the keys reads it

    meant = ["--tenant", TENANT, "--subject", names[ADA], "--dir", str(stack.dir), "--prefix", flow.prefix]
    given, report = tmp_path / "ada.json", tmp_path / "erased.json"
    assert cli.run(["subject", "export", "--out", str(given), *meant]) == 0
    assert people[ADA].comment in given.read_text()
    assert people[BOB].comment not in given.read_text()
    nobody = [word if word != names[ADA] else f"{names[ADA]} " for word in meant]
    assert cli.run(["erase", "--yes", *nobody]) == 1  # a name that is spelled otherwise is no success
    assert flow.events("erasures") == []
    assert cli.run(["erase", "--yes", "--json", str(report), *meant]) == 0
    reached = json.loads(report.read_text())["reached"]
    assert [one["trained"] for one in reached["lineages"]] == [[1]]
    assert {"user-feedback", "production-rollouts", "groups", "packed-batches", "rewards"} <= set(
        reached["topics"]
    )

    # The gateway kept her key and was told: what she says from now on is under a new one.
    def comes_again() -> bool:
        flow.post(
            rollout_id=rollouts[BOB][0].rollout_id, signal="comment", comment="again", subject=names[ADA]
        )
        return any(
            isinstance(e, Feedback)
            and e.seal is not None
            and (e.seal.subject, e.seal.key) == (pseudonyms[ADA], 2)
            for e in flow.events("user-feedback")
        )

    wait_for(comes_again, WAIT_S)
    searched(flow, wait_for, people[ADA], data_keys[ADA], names[ADA], rollouts[ADA][0].token_ids, began_us)
    opened = dict.fromkeys(("erased", "open"), 0)
    keys = open_keys(stack)  # with nothing kept
    for record in flow.records():
        topic = record.topic
        if topic not in TOPICS or deletes(record):
            continue
        event = decode_record(record)  # a replay goes through
        readable_event(event, Looking(flow.log, lambda: keys))
        for seal, event_id, field, ciphertext in seals_of(event):
            if (seal.subject, seal.key) == (pseudonyms[ADA], 1):
                with pytest.raises(Erased):
                    open_field(keys, seal, event_id, field, ciphertext)
                opened["erased"] += 1
            else:
                plain = open_field(keys, seal, event_id, field, ciphertext)
                if seal.subject == pseudonyms[BOB] and field == "token_ids":
                    assert np.frombuffer(plain, "<u4").astype("u1").tobytes() in people[BOB].tokens
                opened["open"] += 1
    # Rollouts, groups, plans; and the comment.
    assert opened["erased"] >= 3 * ANSWERS // 2 + 1 <= opened["open"]
    assert '"erased"' in shown(flow, "production-rollouts", keys)

    with pytest.raises(Erased, match="rollwire weights revert --to 0"):
        flow.train(threading.Event(), 2)
    versions = [event for event in flow.events("weight-versions") if isinstance(event, WeightVersion)]
    state = load_version(flow.store, plan_path(versions, (), None, 1), None)
    assert StateDigest.of(state).hex == versions[1].state_digest


def shown(flow: Flow, topic: str, keys: KeyStore) -> str:
    look = Looking(flow.log, lambda: keys)
    return "\n".join(
        json.dumps(readable_event(event, look), ensure_ascii=False) for event in flow.events(topic)
    )


def searched(
    flow: Flow, wait_for: Wait, person: Said, key: bytes, name: str, ciphertext: bytes, since_us: int
) -> None:
    wanted = needles(person, (key,), name)
    assert any("changelog" in state.name for state in list_topics(flow.stack.bootstrap, flow.prefix))
    found: list[str] = []
    holders: set[str] = set()  # topics that hold the ciphertext: the search sees what flows through them
    for record in flow.records():
        data = b"\0".join([record.key or b"", record.value or b"", *(v or b"" for _, v in record.headers)])
        found += hits(record.topic, data, wanted)
        if ciphertext in data:
            holders.add(record.topic)
    assert {"production-rollouts", "groups", "packed-batches"} <= holders
    for info in flow.store.list(""):
        if info.modified_us >= since_us - 5_000_000:
            found += hits(info.key, info.key.encode() + b"\0" + flow.store.get(info.key), wanted)
    for entry, data in cached(flow.stack.redis_url):
        found += hits(f"Redis {entry}", data, wanted)
    pages = RedisCache(flow.stack.redis_url)
    wait_for(lambda: b"train-steps" in (pages.get(f"{flow.prefix}monitor/page") or b""), WAIT_S)
    url = (pages.get(f"{flow.prefix}monitor/url") or b"").decode()
    pages.close()
    with urllib.request.urlopen(url, timeout=60) as page:
        found += hits("the monitor's page", page.read(), wanted)
    seen = False
    for path in broker_files(flow.stack, flow.prefix):
        data = path.read_bytes()
        found += hits(path.name, data, wanted)
        seen = seen or ciphertext in data
    assert seen
    assert found == []
