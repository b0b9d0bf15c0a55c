"""Requests that end a transaction, late: held by a proxy past every time-out, and let go within the next one (C36)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollwire.ops.chaos.history_book import Book, read_history
from rollwire.ops.chaos.history_check import Finding, check
from rollwire.ops.chaos.history_control import End, Round, RuleBreaker, RuleKeeper, play_round
from rollwire.ops.chaos.history_log import PARTITIONS, Ends, read_out
from rollwire.ops.chaos.proxy import KafkaProxy
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import TransactionUnknown
from rollwire.streams.seams.log import Outgoing, Reader, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.rdkafka_logs import ConnectionWatch

pytestmark = pytest.mark.system

TXN_OFFSET_COMMIT = 28
INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90
ID = "history.c36"
A = TopicPartition("history-a", 0)


@contextmanager
def a_proxy(stack: StackInfo) -> Iterator[KafkaProxy]:
    assert stack.proxy_port is not None
    assert stack.proxied_port is not None
    with KafkaProxy(stack.proxy_port, stack.proxied_port) as proxy:
        yield proxy


class Scene:
    """Topics of their own, a book, and a reader that was there from the beginning."""

    def __init__(self, stack: StackInfo, folder: Path, proxy: KafkaProxy) -> None:
        self.prefix = f"t{uuid.uuid4().hex[:12]}."
        self.proxy = proxy
        self.ends = Ends(stack.bootstrap, self.prefix)
        self.ends.create()
        self.direct = KafkaLog(stack.bootstrap, self.prefix)
        self.proxied = KafkaLog(proxy.bootstrap, self.prefix)
        self._folder = folder
        self._clients, self._readers = Book(folder, "client"), Book(folder, "reader")
        self._reader: Reader = self.direct.reader()
        self._reader.assign(dict.fromkeys(PARTITIONS, 0))
        self._readers.assigned(dict.fromkeys(PARTITIONS, 0))

    def play(self, client: RuleBreaker | RuleKeeper, held: End, *, cut: bool = False) -> Round:
        return play_round(
            client,
            self._clients,
            self._readers,
            self.proxy,
            self._reader,
            self.ends.written,
            transactional_id=ID,
            value=1,
            held=held,
            cut=cut,
        )

    def findings(self) -> list[Finding]:
        self._reader.close()
        end = Book(self._folder, "final")
        out = read_out(self.direct, end, self.ends.settled(self.direct, 20.0), 20.0)
        assert set(out) >= set(PARTITIONS)
        return check(read_history(self._folder), out)


@pytest.mark.parametrize("held", ["commit", "abort"])
def test_the_control_goes_red(stack: StackInfo, tmp_path: Path, held: End) -> None:
    with a_proxy(stack) as proxy:
        scene = Scene(stack, tmp_path, proxy)
        breaker = RuleBreaker(proxy.bootstrap, scene.prefix, ID)
        played = scene.play(breaker, held)
        breaker.close()
        found = {finding.name for finding in scene.findings()}
    assert played.answer == 0, "the broker took the late request for the next transaction's"
    assert found == ({"aborted-read", "precommitted-read"} if held == "commit" else {"lost-write", "torn"})


@pytest.mark.parametrize(("held", "cut"), [("commit", False), ("commit", True), ("abort", True)])
def test_c36_our_writer_stays_green(stack: StackInfo, tmp_path: Path, held: End, cut: bool) -> None:
    """Without `cut` our time-out is hit; with it librdkafka sends the request again and all seems well."""
    with a_proxy(stack) as proxy:
        scene = Scene(stack, tmp_path, proxy)
        keeper = RuleKeeper(scene.proxied, ID)
        played = scene.play(keeper, held, cut=cut)
        keeper.close()
        assert scene.findings() == []
    assert played.answer in (INVALID_PRODUCER_EPOCH, PRODUCER_FENCED), "the late request was not fenced"
    assert played.first == ("fail" if held == "abort" else "ok" if cut else "info")
    assert played.second == ("fail" if held == "commit" else "ok")
    assert keeper.made == 2


@pytest.mark.parametrize("guarded", [True, False])
def test_c36_late_offsets(
    stack: StackInfo, tmp_path: Path, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets of a transaction that are sent twice: the late copy would set back what the next one commits."""
    if not guarded:  # a writer that does not hear of the lost connection goes on with its producer
        monkeypatch.setattr(ConnectionWatch, "log", lambda *_: None)
    with a_proxy(stack) as proxy:
        scene = Scene(stack, tmp_path, proxy)
        name = group = f"{scene.prefix}late"
        log = KafkaLog(proxy.bootstrap, scene.prefix, name)
        writer = log.transactional_writer(name)
        late = proxy.hold(lambda r: r.api_key == TXN_OFFSET_COMMIT and r.client_id == name, cut=True)
        _begin(writer, 1)
        writer.commit(group, {A: 1})
        late.wait(10.0)
        if guarded:
            with pytest.raises(TransactionUnknown, match="may have been sent twice"):
                writer.begin()
            writer.close()
            writer = log.transactional_writer(name)
        _begin(writer, 2)
        end = proxy.hold_end_txn(name)
        thread = threading.Thread(target=writer.commit, args=(group, {A: 2}))
        thread.start()
        end.wait(10.0)  # the offsets of this transaction are with the broker by now
        late.release()
        end.resume()
        thread.join(30.0)
        writer.close()
        assert scene.direct.committed(group, [A]) == {A: 2 if guarded else 1}


def _begin(writer: TransactionalWriter, value: int) -> None:
    writer.begin()
    writer.write([Outgoing("history-b", None, b"%d" % value, (), 0)])
