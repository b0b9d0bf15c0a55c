"""Writes docs/cases.md: what broke for people who do this job, and the tests of ours that hold each case.

A test holds a case when its name has the id: `test_c40_...`, or `test_c56_c59_...` for two; so `pytest -k C40` runs the
tests of one. `python -P -m rollwire.ops.docs_cases` writes the page; a test compares it with what it would be.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = ROOT / "docs" / "cases.md"
_ID: Final = re.compile(r"(?<=_)c(\d\d)(?=_|$)")


class Case(NamedTuple):
    """One case. `expected`: what must hold, in a line. `source`: where it was reported."""

    title: str
    expected: str
    source: str


# fmt: off
CASES: Final[Mapping[str, Mapping[str, Case]]] = {
    "Rollouts, groups, staleness, packing": {
        "C01": Case("logprobs that are missing or too many", "refused; no value is invented or cut", "vllm-project/vime#70"),
        "C02": Case("one completion sampled under two versions", "a version for each token; broken spans are refused", "AReaL#80, NVIDIA-NeMo/labs-molt#124"),
        "C03": Case("where staleness ends, and versions of the future", "limit included, judged at use; the future is quarantined", "tinker-cookbook#822, Tencent-Hunyuan/UniRL#310, THUDM/slime#1800"),
        "C06": Case("dropped groups starve the producers", "a drop gives its slot back; good groups arrive", "NovaSky-AI/SkyRL#1802"),
        "C07": Case("equal rewards whose deviation is not 0", "equality is exact, over the whole group", "NVIDIA-NeMo/RL#4158, OpenRLHF#1272"),
        "C08": Case("a group of one", "no NaN leaves a processor", "RLinf#273"),
        "C09": Case("a missing reward is no 0", "null stays out of the mean, NaN is refused", "huggingface/trl#5902, modelscope/ms-swift#8123, NVIDIA-NeMo/RL#2207"),
        "C10": Case("a group that never fills", "closed once at its deadline; what is late is refused", "NVIDIA-NeMo/labs-molt#109, #48"),
        "C12": Case("a lower bound taken for a packing", "no bin over its limit, no sequence lost or doubled", "verl-project/verl#7553"),
        "C13": Case("a sequence above the budget", "refused by name; the rest packs", "OpenRLHF#1280, NovaSky-AI/SkyRL#1477"),
        "C15": Case("a restart skips what was in flight", "each group trained once, none skipped", "NVIDIA-NeMo/RL#3599, OpenRLHF#1322"),
    },
    "Routing traces": {
        "C17": Case("as many rows as tokens, or one less", "the last row is recorded or marked missing, never guessed", "vllm#28284, sgl-project/sglang#20964, ms-swift#9799"),
        "C18": Case("a row of zeros where turns meet", "the next turn's row is taken; nothing is invented", "PrimeIntellect-ai/prime-rl#1807"),
        "C19": Case("a resumed rollout returns its trace again", "one row a token", "verl#6029"),
        "C22": Case("ids wider than their integer, layers by another index", "ids keep value and order, or are refused", "vllm#35744, radixark/miles#2235"),
    },
    "Weights": {
        "C23": Case("a delta on weights that nobody has", "the base is checked before a byte moves", "THUDM/slime#2104, prime-rl#3386"),
        "C24": Case("a version number without new weights", "an explicit empty version, or no version at all", "huggingface/trl#5937"),
        "C26": Case("the marker stands before the data", "nothing is visible before all of it is there", "prime-rl#3037, #3316, #1299"),
        "C27": Case("renamed parameters pass in silence", "publication fails by name", "Tencent-Hunyuan/UniRL#166, ms-swift#9877"),
        "C29": Case("strided tensors sent as raw memory", "equal element by element", "miles#1608, MinishLab/model2vec#341"),
        "C30": Case("scalars and empty tensors", "shape, dtype and bits come back", "safetensors#839"),
        "C31": Case("an unknown dtype in the middle of an update", "refused before anything is touched", "slime#1679, safetensors#839, SkyRL#2072, #1898"),
        "C32": Case("minus zero and NaN payloads", "what changes are bits; the result is equal in bits", "torch-spyre#628, SkyRL#1903"),
        "C34": Case("a host dies in the middle of an update", "one whole version is found at the next start, and told truthfully", "modal-projects/stitch#29"),
    },
    "Kafka": {
        "C36": Case("a commit that timed out hits a later transaction", "after any doubt a new producer; nothing lost, doubled or torn", "librdkafka#5423"),
        "C38": Case("two processes with one transactional id", "the older one is fenced and leaves nothing", "faust#323, robinhood/faust#367, librdkafka#3928"),
        "C39": Case("an offset commit during a rebalance", "nothing missing, nothing twice; group metadata is read anew", "librdkafka#4059"),
        "C40": Case("control records leave holes in the offsets", "a replay ends at the end and reports no loss", "risingwave#24717, apache/pinot#14716, flink-connector-kafka#313, faust#47"),
        "C41": Case("an open transaction holds up all readers", "they go on within the time-out and 5 s", "twmb/kcl#10, klag-exporter#104"),
        "C42": Case("message sizes at the limit", "acknowledged, or refused at once by size; large payloads go to the store", "confluent-kafka-python#476, #290"),
        "C44": Case("nulls, empty values, foreign messages", "dead letters; a null deletes on compacted topics only; the next good event passes within 1 s", "librdkafka#1386, apache/pinot#6950, xtdb#1748"),
        "C45": Case("times in another unit", "refused; the record's time is the broker's, and so is its retention", "apache/kafka#4473, librdkafka#1238, apache/kafka#14135"),
        "C47": Case("a step longer than the poll interval", "no group trained twice; the old owner cannot commit", "confluent-kafka-python#552, #629, confluent-kafka-dotnet#785"),
        "C48": Case("the tail is lost at exit, or the local queue is full", "what was accepted is delivered; an exit flushes by a deadline", "confluent-kafka-python#104, #1224"),
    },
    "Faust": {
        "C50": Case("offsets are committed past an unfinished event", "it is processed after the restart", "faust-streaming#606, robinhood/faust#682"),
        "C51": Case("rebalances disorder events and stop commits", "order by key holds, nothing is lost", "faust#596, #221, #217"),
        "C53": Case("an exactly-once that is none", "output = input by id after three kills", "faust#517, #177, #136"),
        "C55": Case("versions of broker, client and Python", "supported ones pass, others refuse at the start and name the versions", "faust#655, #714, #672, aiokafka#1085, faust-streaming/mode#19, #72"),
    },
    "Avro": {
        "C56": Case("a nested payload kills the process", "a dead letter; the process lives", "apache/avro#3929, apache/avro-rs#642, ClickHouse#102853"),
        "C58": Case("numbers change without a word", "stored exactly, or refused", "fastavro#437, #192, #794"),
        "C59": Case("bytes that trail, are cut, or are of another schema", "one class of error; the events beside it pass", "fastavro#647, #894, #46, #826"),
        "C62": Case("a misspelt field vanishes", "refused by its name", "fastavro#549, #638, confluent-kafka-python#1423"),
    },
    "Stores": {
        "C63": Case("new default checksums", "the shipped settings work; a store that refuses them is named at the start", "boto3#4392, #4398, CERT-Polska/karton#270, langgenius/dify#35117"),
        "C64": Case("412 after one's own success, 409 as \"exists\"", "settled by content; 409 is tried again", "apache/arrow-rs-object-store#852, opendal#6741, arrow-rs#4777"),
        "C66": Case("ETags of parts, and a part that lands after its retry", "a wrong object never becomes visible", "boto3#845, oci-java-sdk#95"),
    },
    "Feedback and real-time RL": {
        "C68": Case("feedback before its rollout, or for none", "joined once within the window; unknown ids wait, then are kept and can be replayed", "tensorzero#1680, #350, #747"),
        "C69": Case("accepted, but never stored", "2xx only for what the log has; else 503 and Retry-After", "langfuse-ruby#12, synergyai-nl/svelte-langgraph#286"),
        "C70": Case("repeats, and what \"the same\" means", "same body, one effect; other body, 409 and both kept; other tenant, another event", "langfuse-docs#3232, PostHog#17211, #30692"),
        "C71": Case("NaN, Infinity, 1e999, true as a score", "400 with field and reason; -0.0 as given", "comet-ml/opik#8455, conbench#1163"),
        "C72": Case("the ends of a range, and clamping", "ends accepted, outside refused; no range is a config error", "langfuse#7626, #15009"),
        "C74": Case("lone surrogates, NUL, emoji", "one parser at every entry; never half an event; emoji unchanged", "rllm-org/rllm#879, browser-use/browser-harness#676, inspect_ai#3802"),
        "C76": Case("giant, nested and zipped bodies", "refused before memory is spent; good requests go on", "maximhq/bifrost#5782, dotnet/aspnetcore#67688"),
        "C78": Case("silence is data too", "counted by outcome class; below the floor nothing is trained on, and an event says why", "Cursor, Improving Composer through real-time RL, 2026-03-26"),
        "C84": Case("a claim in the cache, its outage, a crash", "the cache is a hint: never \"repeat\" for its error, never lost for a claim", "koala73/worldmonitor#4990, RedHatInsights/notifications-backend#4287, agentscope-java#3175"),
        "C86": Case("an audit that checks only the ends", "the first bad position is named; cut tails and forks by signed heads kept elsewhere", "immudb GHSA-672p-m5jq-mrh8"),
    },
    "zstandard": {
        "C79": Case("a second frame is thrown away", "all bytes, or an error", "indygreg/python-zstandard#59, urllib3#3022"),
        "C81": Case("one compressor, many threads", "one object a thread; all of it comes back", "python-zstandard#244, dask/distributed#7403"),
        "C82": Case("bombs, and frames without a size", "the limit is the reader's; no memory is spent", "SpringMT/zstd-ruby#153, python-zstandard#150, DataDog/zstd#115"),
    },
}
# fmt: on

_HEAD: Final = """# Cases

What broke for people who do this job, and the tests that hold each case here. The id is in the test's name: `pytest -k C40` runs those of one
case. This page is generated by `python -P -m rollwire.ops.docs_cases`.
"""


def find_case_tests(folder: Path) -> dict[str, list[str]]:
    """Case id -> `path::name` of its tests, below `folder`, in order of path and line."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for number in _ID.findall(node.name):
                    found[f"C{number}"].append(f"{file.relative_to(folder.parent).as_posix()}::{node.name}")
    return dict(found)


def cases_page(tests: Mapping[str, Sequence[str]]) -> str:
    """The page as Markdown; cases without a test are left out (a test of ours says which may be)."""
    return "\n".join([_HEAD, *_sections(tests)]).rstrip() + "\n"


def _sections(tests: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for title, cases in CASES.items():
        shown = {case_id: case for case_id, case in cases.items() if case_id in tests}
        if not shown:
            continue
        yield f"## {title}"
        yield ""
        yield "| id | case | holds when | reported in | tests |"
        yield "| --- | --- | --- | --- | --- |"
        for case_id, case in shown.items():
            names = "<br>".join(f"`{name}`" for name in tests[case_id])
            yield f"| {case_id} | {case.title} | {case.expected} | {case.source} | {names} |"
        yield ""


def main() -> None:
    TARGET.write_text(cases_page(find_case_tests(ROOT / "tests")), "utf-8")


if __name__ == "__main__":
    main()
