"""Manifests: strict JSON, content-addressed, without times."""

from __future__ import annotations

import json

import msgspec
import pytest

from rollwire.consumers.weights.keys import anchor_key, delta_key, manifest_key, sha256_hex
from rollwire.consumers.weights.manifest import (
    Base,
    MadeFrom,
    Manifest,
    ObjectEntry,
    TensorEntry,
    check_tensors,
    decode_manifest,
    encode_manifest,
)
from rollwire.kernels.tensors import tensor
from rollwire.schemas.errors import DeltaCorrupt, FormatUnknown, StateMismatch
from rollwire.schemas.records import OffsetRange

MANIFEST = Manifest(
    format=2,
    model="org/policy",
    lineage="L",
    version=3,
    step=3,
    kind="delta",
    coder="gap",
    base=Base(version=2, manifest="weights/x.json", state_digest="ab" * 32),
    state_digest="cd" * 32,
    full_bytes=24,
    changed_elements=1,
    total_elements=12,
    tensors=(TensorEntry("w", "BF16", (3, 4), ""),),
    objects=(ObjectEntry(key="k", size=9, sha256="ef" * 32, file="", head=5),),
    sums=None,
)
GOLDEN = (
    b'{"format":2,"model":"org/policy","lineage":"L","version":3,"step":3,"kind":"delta","coder":"gap",'
    b'"base":{"version":2,"manifest":"weights/x.json","state_digest":"' + b"ab" * 32 + b'"},'
    b'"state_digest":"' + b"cd" * 32 + b'","full_bytes":24,"changed_elements":1,"total_elements":12,'
    b'"tensors":[["w","BF16",[3,4],""]],"objects":[{"key":"k","size":9,"sha256":"'
    + b"ef" * 32
    + b'","file":"","head":5}],"sums":null}'
)


def test_golden_bytes() -> None:
    """What was published stays readable, and is written the same way."""
    claim, data = encode_manifest(MANIFEST)
    assert data == GOLDEN
    assert decode_manifest(GOLDEN) == MANIFEST
    assert claim.key == f"weights/org%2Fpolicy/manifests/{sha256_hex(GOLDEN)}.json"
    assert (claim.size, claim.sha256) == (len(GOLDEN), sha256_hex(GOLDEN))


def test_a_manifest_that_says_what_its_version_was_made_from_is_of_its_own_format() -> None:
    """A release that does not know it asks for an upgrade, and does not call it damaged."""
    made_from = MadeFrom((OffsetRange(topic="packed-batches", partition=0, start=4, end=5),), "12" * 32)
    manifest = msgspec.structs.replace(MANIFEST, format=3, made_from=made_from)
    _, data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert data == GOLDEN[:-1].replace(b'"format":2', b'"format":3') + (
        b',"made_from":{"consumed":[{"topic":"packed-batches","partition":0,"start":4,"end":5}],'
        b'"plan_digest":"' + b"12" * 32 + b'"}}'
    )
    for torn in (
        msgspec.structs.replace(manifest, format=2),
        msgspec.structs.replace(manifest, made_from=None),
    ):
        with pytest.raises(DeltaCorrupt, match="made_from"):
            decode_manifest(encode_manifest(torn)[1])


def test_strictness() -> None:
    value = json.loads(GOLDEN)
    for changed in (
        value | {"extra": 1},
        {k: v for k, v in value.items() if k != "step"},
        value | {"version": "3"},
        value | {"version": 3.5},
        value | {"kind": "anchor"},
        value | {"base": None},
        value | {"kind": "sideways"},
    ):
        with pytest.raises(DeltaCorrupt):
            decode_manifest(json.dumps(changed).encode())
    with pytest.raises(DeltaCorrupt):
        decode_manifest(GOLDEN + b"{}")


@pytest.mark.parametrize(("found", "advice"), [(4, "upgrade"), (1, "publish the weights again")])
def test_another_format_is_named_with_what_to_do(found: int, advice: str) -> None:
    """A newer manifest may hold anything: only its number is looked at."""
    with pytest.raises(FormatUnknown, match=f"has format {found}, this release reads 2 and 3: {advice}"):
        decode_manifest(json.dumps({"format": found, "extents": [1]}).encode())


def test_c27_tensors_must_match_on_both_sides() -> None:
    """C27."""
    w = tensor("BF16", (3, 4), bytes(24))
    check_tensors(MANIFEST, {"w": w})
    for state in (
        {"v": w},
        {"w": w, "v": w},
        {},
        {"w": tensor("BF16", (4, 3), bytes(24))},
        {"w": tensor("F16", (3, 4), bytes(24))},
    ):
        with pytest.raises(StateMismatch):
            check_tensors(MANIFEST, state)


def test_keys() -> None:
    assert delta_key("policy", "00ff") == "weights/policy/deltas/00ff.rwdl"
    assert anchor_key("a/b", "00ff", "model.safetensors.index.json") == "weights/a%2Fb/anchors/00ff.json"
    assert anchor_key("a", "00ff", "model.safetensors") == "weights/a/anchors/00ff.safetensors"
    assert manifest_key("..", "0") == "weights/../manifests/0.json"
