"""Feedback from where it is made: a page in a real browser, a shell, a program; through the running gateway into the log."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from rollwire.ops.programs import find_chromium
from rollwire.ops.stack import StackInfo
from rollwire.ops.topics import apply_topics
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Feedback
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROLLWIRE: Final = Path(sys.executable).with_name("rollwire")
WAIT_S: Final = 60.0


def until(true: Callable[[], object], what: str) -> None:
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not true():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        pause.wait(0.05)


class Page:
    """A page of a product, on an origin of its own: a button, and the gateway's script."""

    def __init__(self) -> None:
        self.html = ""
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = page.html.encode() if self.path != "/favicon.ico" else b""
                self.send_response(200)
                self.send_header("content-type", "text/html; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Browser:
    """Headless Chromium with one page, driven by the DevTools protocol over a pipe: no driver program, no port."""

    def __init__(self, chromium: Path, profile: Path) -> None:
        to_read, to_write = os.pipe(), os.pipe()
        flags = [
            "--headless",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        # The protocol's pipe is file descriptors 3 and 4 of the browser.
        script = f'exec 3<&{to_read[0]} 4>&{to_write[1]}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            [shutil.which("bash") or "bash", "-c", script, chromium, *flags],
            pass_fds=(to_read[0], to_write[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        self._out = os.fdopen(to_read[1], "wb", buffering=0)
        self._in = os.fdopen(to_write[0], "rb")
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._session = ""
        self.console: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers, WAIT_S), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        said = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        until(lambda: self.run(f"location.href == {url!r} && document.readyState") == "complete", url)

    def offline(self, offline: bool) -> None:
        self.call(
            "Network.emulateNetworkConditions",
            offline=offline,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._out.close()
        self._in.close()

    def _read(self) -> None:
        rest = b""
        while data := self._in.read1():
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                with self._changed:
                    if "id" in message:
                        self._answers[message["id"]] = message
                    elif message["method"] == "Runtime.consoleAPICalled":
                        self.console.append(" ".join(str(a.get("value")) for a in message["params"]["args"]))
                    self._changed.notify_all()


class Gateway(NamedTuple):
    url: str
    stack: StackInfo
    log: KafkaLog

    def key(self, *options: str) -> str:
        made = rollwire("gateway-keys", "add", "--tenant", "acme", *options, "--dir", str(self.stack.dir))
        return made.stdout.strip().splitlines()[-1]

    def events(self, rollout: str) -> list[Feedback]:
        found = (decode_record(record) for record in scan(self.log, ["user-feedback"]))
        return [event for event in found if isinstance(event, Feedback) and event.rollout_id == rollout]


def rollwire(*words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [ROLLWIRE, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def gateway(stack: StackInfo) -> Iterator[Gateway]:
    """`rollwire gateway`, as a person starts it, under a prefix of its own."""
    prefix = f"t{uuid.uuid4().hex[:12]}."
    apply_topics(stack.bootstrap, prefix)
    process = subprocess.Popen(
        [ROLLWIRE, "gateway", "--port", "0", "--prefix", prefix, "--dir", stack.dir],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[-1]
        with closing(KafkaLog(stack.bootstrap, prefix=prefix, client_id="test")) as log:
            yield Gateway(url, stack, log)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    try:
        chromium = find_chromium()
    except EnvironmentMissing as error:
        if os.environ.get("CI"):
            pytest.fail(f"THE BROWSER SCRIPT WAS NOT TESTED: {error}")
        pytest.skip(f"THE BROWSER SCRIPT WAS NOT TESTED: {error}")
    browser = Browser(chromium, tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture
def rollout() -> str:
    return new_group_id(time.time_ns() // 1_000, uuid.uuid4().int) + ".0"


def test_a_page_loses_no_click(gateway: Gateway, page: Page, browser: Browser, rollout: str) -> None:
    """Before the script has loaded, in a batch, without a network and over a reload, and on leaving the page."""
    key = gateway.key("--origin", page.origin)
    page.html = f"""<!doctype html><title>An answer</title>
        <script>
          (window.rollwire ||= []).push({{rollout_id: "{rollout}", signal: "thumb", value: 1, feedback_id: "early"}});
          const say = (id, more) => rollwire.send({{rollout_id: "{rollout}", signal: "thumb", value: -1, feedback_id: id, ...more}});
        </script>
        <script async src="{gateway.url}/v1/feedback.js" data-key="{key}"></script>"""

    def ids() -> list[str]:
        return [event.feedback_id for event in gateway.events(rollout)]

    def waiting() -> int:
        return int(browser.run("window.rollwire && rollwire.pending"))

    browser.goto(f"{page.origin}/answer")
    until(lambda: ids() == ["early"], "what the page said before the script was there")
    (early,) = gateway.events(rollout)
    assert (early.tenant, early.value, early.dialect) == ("acme", 1.0, "rollwire")
    assert early.key_id == key.split("_")[1]

    comment = "👩‍👩‍👧‍👦 „schön“"
    browser.run(
        f"say('click', {{subject: 'user-7', signal: 'comment', value: undefined, comment: {comment!r}}})"
    )
    browser.run("say('bad', {value: 7}); say('good')")
    until(lambda: set(ids()) == {"early", "click", "good"} and waiting() == 0, "a batch")
    assert any("value_out_of_range" in line for line in browser.console), "a refusal is said"

    # A clock that is years off loses nothing: the gateway's time stands in.
    browser.run("say('clock', {happened_at: '2099-01-01T00:00:00Z'})")
    until(lambda: "clock" in ids() and waiting() == 0, "an event of a wrong clock")

    browser.offline(True)
    browser.run("say('offline')")
    assert browser.run("rollwire.flush()") is False
    assert waiting() == 1
    browser.offline(False)
    until(lambda: "offline" in ids() and waiting() == 0, "what waited for a network")

    browser.call("Network.setBlockedURLs", urls=[f"{gateway.url}/*"])
    browser.run("say('reload')")
    assert browser.run("rollwire.flush()") is False
    page_and_script = page.html
    page.html = "<!doctype html><title>Elsewhere</title>"
    browser.goto(f"{page.origin}/elsewhere")
    assert "reload" in str(browser.run("JSON.stringify({...localStorage})")), "kept from page to page"
    browser.call("Network.setBlockedURLs", urls=[])
    page.html = page_and_script.replace('"early"', '"again"')
    browser.goto(f"{page.origin}/answer")
    until(lambda: "reload" in ids() and waiting() == 0, "what waited over a reload")
    assert browser.run("Object.keys(localStorage).filter((k) => k.startsWith('rollwire')).length") == 0

    # As a person does who clicks and leaves: nothing was sent yet, and there is no time for an answer.
    event = f"{{rollout_id: '{rollout}', signal: 'accept', value: true, feedback_id: 'leaving'}}"
    browser.run(f"rollwire.create({{url: '{gateway.url}', key: '{key}', lingerMs: 1e7}}).send({event})")
    page.html = "<!doctype html><title>Gone</title>"
    browser.goto(f"{page.origin}/gone")
    until(lambda: "leaving" in ids(), "what sendBeacon took with it")

    said = ids()
    assert sorted(set(said)) == sorted(
        ["early", "click", "good", "clock", "offline", "reload", "again", "leaving"]
    )
    facts = {(event.feedback_id, event.value, event.happened_us) for event in gateway.events(rollout)}
    assert len(facts) == len(set(said)), f"a repeat is the same event, which attribution drops: {said}"
    sealed = next(event for event in gateway.events(rollout) if event.feedback_id == "click")
    assert sealed.comment is not None
    assert comment.encode() not in sealed.comment


def test_a_page_of_another_origin_may_not_and_keeps_what_it_has(
    gateway: Gateway, page: Page, browser: Browser, rollout: str
) -> None:
    key = gateway.key("--origin", "https://app.example.com")
    page.html = f'<script src="{gateway.url}/v1/feedback.js"></script>'
    browser.goto(f"{page.origin}/other")
    browser.run(
        f"window.other = rollwire.create({{url: '{gateway.url}', key: '{key}'}});"
        f"other.send({{rollout_id: '{rollout}', signal: 'thumb', value: 1}}); 0"
    )
    assert browser.run("other.flush()") is False
    assert browser.run("other.pending") == 1
    assert gateway.events(rollout) == []

    full = """(() => { try { for (;;) other.send({rollout_id: "r", signal: "thumb"}) }
        catch (error) { return error.name + error.message + other.pending } })()"""
    assert browser.run(full) == "RangeErrorrollwire: 500 events wait; this one was not taken500"
    assert (
        browser.run("(() => { try { other.send({signal: 'thumb'}) } catch (e) { return e.name } })()")
        == "TypeError"
    )


def test_a_shell_sends_and_says_what_became_of_it(gateway: Gateway, rollout: str, tmp_path: Path) -> None:
    key = gateway.key()
    known = {"ROLLWIRE_FEEDBACK_URL": gateway.url, "ROLLWIRE_FEEDBACK_KEY": key}

    def send(*words: str, code: int = 0, **more: str) -> tuple[str, str]:
        done = rollwire("feedback", "send", *words, code=code, **(known | more))
        return done.stdout, done.stderr

    # A gateway learns of a new key within seconds; until then it is turned away, and that is said.
    made: list[str] = []

    def first() -> bool:
        done = subprocess.run(
            [ROLLWIRE, "feedback", "send", rollout, "thumb", "-1"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | known,
        )
        made.append(done.stdout.strip())
        assert done.returncode == 0 or "401 key_unknown" in done.stderr, done.stderr
        return done.returncode == 0

    until(first, "a key that the gateway knows")
    (event,) = gateway.events(rollout)
    assert (event.feedback_id, event.value, event.tenant) == (made[-1], -1.0, "acme")

    said = send(rollout, "thumbs", "1", "--id", "typo", code=1)[1]
    assert "refused typo: unknown_signal in signal: signal 'thumbs'" in said
    assert "did you mean 'thumb'" in said

    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        f"""{{"rollout_id": "{rollout}", "signal": "accept", "value": true, "feedback_id": "a"}}

        {{"rollout_id": "{rollout}", "signal": "rating", "value": 0.5, "feedback_id": "b", "happened_at": "{event_time()}"}}
        """
    )
    printed, said = send("--lines", str(lines))
    assert printed.split() == ["a", "b"]
    assert "2 accepted, 0 refused" in said

    spool = tmp_path / "spool"
    away = send(
        rollout, "thumb", "1", "--id", "later", "--spool", str(spool), "--timeout", "0.5",
        code=1, ROLLWIRE_FEEDBACK_URL="http://127.0.0.1:9",
    )[1]  # fmt: skip
    assert "1 event waits in the spool" in away
    assert "1 accepted" in rollwire("feedback", "flush", "--spool", str(spool), code=0, **known).stderr
    assert {"a", "b", "later", made[-1]} <= {event.feedback_id for event in gateway.events(rollout)}
    assert list(spool.iterdir()) == []


def event_time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
