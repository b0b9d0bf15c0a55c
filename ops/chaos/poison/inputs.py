"""The poison set: inputs with the answer that the gateway owes them, by the rules that are built in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import zstandard

MIB: Final = 1024 * 1024
JSON: Final = {"content-type": "application/json"}
LINES: Final = {"content-type": "application/x-ndjson"}
# A frame header that asks for a window of 512 MiB (RFC 8878, 3.1.1.1.2: exponent 19, mantissa 0), and one empty block.
WIDE_ZSTD: Final = bytes.fromhex("28b52ffd" + "00" + "98" + "010000")


class Poison(NamedTuple):
    """One input and the answer to it. `code` "" = accepted."""

    name: str
    body: bytes | Sequence[bytes]
    status: int
    code: str = ""
    field: str = ""
    headers: dict[str, str] = JSON


def event(rollout: str, **fields: Any) -> bytes:
    return json.dumps({"rollout_id": rollout, "signal": "rating", "value": 0.5} | fields).encode()


def raw(rollout: str, rest: str) -> bytes:
    """An event whose last members are given as they should stand there."""
    return f'{{"rollout_id":"{rollout}","signal":"rating",{rest}}}'.encode()


def numbers(rollout: str) -> list[Poison]:
    """C71 and C72: what is no number, and where a range ends."""
    refused = {
        "NaN": "not_finite",
        "Infinity": "not_finite",
        "-Infinity": "not_finite",
        "1e999": "not_finite",
        "-1e999": "not_finite",
        "true": "wrong_type",
        '"1"': "wrong_type",
        "null": "wrong_type",
        "[1]": "wrong_type",
        "123456789012345678901234567890": "value_out_of_range",
        "1.0000001": "value_out_of_range",
        "-1e-12": "value_out_of_range",
        "10001": "value_out_of_range",
    }
    table = [
        Poison(f"value {text}", raw(rollout, f'"value":{text}'), 400, code, "value")
        for text, code in refused.items()
    ]
    for text in ("01", "1.", ".5", "+1", "0x1", "1_0"):
        table.append(Poison(f"value {text}", raw(rollout, f'"value":{text}'), 400, "malformed"))
    for text in ("-0.0", "0", "1", "1.0", "1E-7"):
        table.append(Poison(f"value {text}", raw(rollout, f'"value":{text}'), 200))
    table.append(
        Poison("no value", raw(rollout, '"comment":"x","subject":"s"'), 400, "value_missing", "value")
    )
    table.append(Poison("thumb 0.5", event(rollout, signal="thumb"), 400, "value_out_of_range", "value"))
    table.append(Poison("accept true", event(rollout, signal="accept", value=True), 200))
    table.append(Poison("accept 0.5", event(rollout, signal="accept"), 400, "value_out_of_range", "value"))
    return table


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
COMMENT = f"kept as it is: {FAMILY} \ufffd \u202e e\u0301"


def texts(rollout: str) -> list[Poison]:
    """C74: one parser decides, and never half an event."""

    def comment(escaped: str) -> bytes:
        return raw(rollout, f'"value":1,"subject":"s","comment":"{escaped}"')

    return [
        Poison("lone high surrogate", comment("\\ud83d"), 400, "malformed"),
        Poison("lone low surrogate", comment("\\ude00 x"), 400, "malformed"),
        Poison("surrogate as a name", raw(rollout, '"value":1,"\\ud83d":1'), 400, "malformed"),
        Poison("NUL, escaped", comment("a\\u0000b"), 400, "text_invalid", "comment"),
        Poison("NUL, raw", comment("a\0b"), 400, "malformed"),
        Poison("NUL in an id", event(rollout, feedback_id="a\0b"), 400, "id_invalid", "feedback_id"),
        Poison("NUL in a signal", event(rollout, signal="rating\0"), 400, "unknown_signal", "signal"),
        Poison("NUL in a subject", event(rollout, subject="a\0"), 400, "text_invalid", "subject"),
        Poison("invalid UTF-8", comment("@").replace(b"@", b"\xff"), 400, "malformed"),
        Poison("a surrogate in UTF-8", b'{"rollout_id":"\xed\xa0\xbd"}', 400, "malformed"),
        Poison("UTF-16", event(rollout).decode().encode("utf-16"), 400, "malformed"),
        Poison("1 MB of U+FFFD", comment("\ufffd" * (MIB // 3)), 413, "too_large", "comment"),
        Poison(
            "a label that nobody declared",
            event(rollout, label="her name is Ann"),
            400,
            "label_unknown",
            "label",
        ),
        Poison("emoji", event(rollout, value=1, comment=COMMENT, subject="s", feedback_id="family"), 200),
    ]


def shapes(rollout: str) -> list[Poison]:
    """C76: what a parser or an allocator chokes on."""
    deep = 100_000
    good = event(rollout)
    zeros = bytes(200 * MIB)
    lines = b'{"rollout_id":"%s","signal":"rating","value":1}\n' % rollout.encode()
    bomb = gzip.compress(zeros, 1, mtime=0)
    squashed = zstandard.ZstdCompressor(level=1).compress(zeros)
    del zeros
    zstd, gz = JSON | {"content-encoding": "zstd"}, JSON | {"content-encoding": "gzip"}
    return [
        Poison("no body", b"", 400, "malformed"),
        Poison("nested arrays", b"[" * deep, 400, "malformed"),
        Poison("nested and closed", b"[" * deep + b"]" * deep, 400, "malformed"),
        Poison("nested value", raw(rollout, '"value":' + "[" * deep), 400, "wrong_type", "value"),
        Poison("nested objects", b'{"a":' * deep, 400, "unknown_field", "a"),
        Poison("a key twice", raw(rollout, '"value":0,"value":1'), 400, "repeated_key"),
        Poison("a key twice, escaped", raw(rollout, '"value":0,"val\\u0075e":1'), 400, "repeated_key"),
        Poison("an unknown field", event(rollout, valeu=1), 400, "unknown_field", "valeu"),
        Poison("bytes after it", good + b"x", 400, "malformed"),
        Poison("a scalar", b"1", 400, "wrong_type"),
        Poison("10 MB", b'"' + b"a" * (10 * MIB), 413, "too_large"),
        Poison("50 MB", b"[" + b" " * (50 * MIB), 413, "too_large"),
        Poison("50 MB in chunks", [b" " * MIB] * 50, 413, "too_large"),
        Poison("a gzip bomb", bomb, 413, "too_large", headers=gz),
        Poison("a zstd bomb", squashed, 413, "too_large", headers=zstd),
        Poison("a zstd window of 512 MiB", WIDE_ZSTD, 413, "too_large", headers=zstd),
        Poison(
            "a zstd frame in the middle", zstandard.compress(good)[:-3], 400, "encoding_invalid", headers=zstd
        ),
        Poison("a gzip member in the middle", gzip.compress(good)[:-3], 400, "encoding_invalid", headers=gz),
        Poison("said to be gzip", good, 400, "encoding_invalid", headers=gz),
        Poison("said to be zstd", good, 400, "encoding_invalid", headers=zstd),
        Poison("brotli", good, 415, "encoding_unknown", headers=JSON | {"content-encoding": "br"}),
        Poison(
            "a form",
            b"value=1",
            415,
            "media_type_unknown",
            headers={"content-type": "application/x-www-form-urlencoded"},
        ),
        Poison("a batch over its limit", lines * 5_001, 413, "too_many", headers=LINES),
        Poison("an array over its limit", b"[" + b"1," * 5_001 + b"1]", 413, "too_many"),
        Poison("an array of a million strings", b"[" + b'"",' * MIB + b'""]', 413, "too_many"),
        # Each of its marks could begin a string that never ends.
        Poison("an array of marks", b"[" + b"," * 50_000 + b'\\"' * MIB, 413, "too_many"),
        Poison("an empty batch", b"[]", 400, "empty"),
        Poison("gzip", gzip.compress(good), 200, headers=gz),
        Poison("zstd", zstandard.compress(good), 200, headers=zstd),
    ]


def clocks_and_ids(rollout: str, future: str, ancient: str, now_s: float) -> list[Poison]:
    table = [
        Poison("an id of no form", event("x"), 400, "id_invalid", "rollout_id"),
        Poison("an id in upper case", event(rollout.upper()), 400, "id_invalid", "rollout_id"),
        Poison("no id", b'{"signal":"rating","value":1}', 400, "missing_field", "rollout_id"),
        Poison(
            "a feedback id with a slash", event(rollout, feedback_id="a/b"), 400, "id_invalid", "feedback_id"
        ),
        Poison("a long feedback id", event(rollout, feedback_id="a" * 129), 400, "id_invalid", "feedback_id"),
        Poison(
            "a signal that is not in the rules",
            event(rollout, signal="thumbs"),
            400,
            "unknown_signal",
            "signal",
        ),
        Poison("a rollout of the future", event(future), 400, "time_invalid", "rollout_id"),
        Poison("a rollout of long ago", event(ancient), 400, "late", "rollout_id"),
    ]
    wrong: tuple[object, ...] = (
        now_s + 3_600, now_s - 30 * 86_400, 0, -1, 1e18, round(now_s * 1e3), round(now_s * 1e6), "2099-01-01T00:00:00Z",
        "1970-01-01T00:00:00Z", "2026-01-31", "2026-01-31T12:00:00", "yesterday", "0000-00-00T00:00:00Z", "",
    )  # fmt: skip
    table += [
        Poison(f"happened_at {when!r}", event(rollout, happened_at=when), 400, "time_invalid", "happened_at")
        for when in wrong
    ]
    return [*table, Poison("happened_at now", event(rollout, happened_at=now_s), 200)]


OTEL_PATH: Final = "/v1/logs"


def evaluations(rollout: str, now_ns: int) -> list[Poison]:
    """The same facts as OTLP/HTTP logs. Its answers are a `google.rpc.Status`, or 200 with the refused ones counted: `code` is
    what the message begins with."""

    def record(
        value: str = '{"doubleValue":0.5}', time: str = f'"{now_ns}"', name: str = "gen_ai.evaluation.result"
    ) -> bytes:
        attributes = (
            '{"key":"gen_ai.evaluation.name","value":{"stringValue":"rating"}},'
            f'{{"key":"gen_ai.response.id","value":{{"stringValue":"{rollout}"}}}},'
            f'{{"key":"gen_ai.evaluation.score.value","value":{value}}}'
        )
        one = f'{{"timeUnixNano":{time},"eventName":"{name}","attributes":[{attributes}]}}'
        return f'{{"resourceLogs":[{{"scopeLogs":[{{"logRecords":[{one}]}}]}}]}}'.encode()

    empties = b",".join([b"{}"] * 100_000)
    return [
        Poison("an evaluation", record(), 200),
        Poison("as a whole number", record('{"intValue":"1"}'), 200),
        Poison("NaN", record('{"doubleValue":NaN}'), 400, "not_finite"),
        Poison("1e999", record('{"doubleValue":1e999}'), 400, "not_finite"),
        Poison("true", record('{"boolValue":true}'), 200, "wrong_type"),
        Poison("a number as a string", record('{"stringValue":"1"}'), 200, "wrong_type"),
        Poison("two values", record('{"doubleValue":0.5,"intValue":"1"}'), 200, "wrong_type"),
        Poison("1_0", record('{"intValue":"1_0"}'), 200, "wrong_type"),
        Poison("a number of 5,000 digits", record('{"intValue":"%s"}' % ("9" * 5_000)), 200, "wrong_type"),
        Poison("out of range", record('{"intValue":"10001"}'), 200, "value_out_of_range"),
        Poison("a time of 400 digits", record(time='"%s"' % ("9" * 400)), 200, "time_invalid"),
        Poison("a time before 1970", record(time='"-1"'), 200, "time_invalid"),
        Poison("something else", record(name="exception"), 200, "not_an_evaluation"),
        Poison("a lone surrogate", record().replace(b"rating", b"\\ud83d"), 400, "malformed"),
        Poison("nested", b'{"x":' + b"[" * 100_000, 400, "malformed"),
        Poison("no logs", b"{}", 400, "missing_field"),
        Poison(
            "100,000 records",
            b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[%b]}]}]}' % empties,
            413,
            "too_many",
        ),
        Poison("a million objects", b'{"resourceLogs":[%b' % (b"{}," * MIB), 413, "too_many"),
        Poison(
            "protobuf",
            b"\x0a\x00",
            415,
            "media_type_unknown",
            headers={"content-type": "application/x-protobuf"},
        ),
    ]
