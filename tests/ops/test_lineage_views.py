"""How lineage is shown: a tree that stays short, and a picture whose boxes never lie on one another, however much there is."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ET  # of pictures that were drawn here
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from rollwire.consumers.audit.lineage import (
    Answer,
    FeedbackLine,
    GroupLine,
    Reached,
    RewardLine,
    RolloutLine,
    Serving,
    SettingsLine,
    StepLine,
    Stored,
    VersionLine,
    WayStep,
)
from rollwire.ops.lineage_boxes import SOME, Graph
from rollwire.ops.lineage_graph import graph_of
from rollwire.ops.lineage_page import write_picture
from rollwire.ops.lineage_svg import draw_svg
from rollwire.ops.lineage_text import draw_answer
from rollwire.schemas.records import Claim, OffsetRange, Position
from rollwire.streams.findings import Finding, Kind, Report

SVG = "{http://www.w3.org/2000/svg}"
LINEAGE = "0198a5c0-0000-7000-8000-000000000001"
START_US = 1_767_225_600_000_000


class Shape(NamedTuple):
    """Of an answer that is made up."""

    groups: int
    size: int
    said: int  # feedback events
    versions: tuple[int, ...]  # that the groups were trained into, in turn
    replicas: int
    asked: int | None = None  # the version asked for; None = the first rollout is
    ended: int = 0  # groups that came to nothing


SHAPES = {
    "one": Shape(1, 1, 1, (12,), 1),
    "ten": Shape(2, 4, 3, (12,), 2, asked=12),
    "some": Shape(8, 8, 40, (12,), 3, asked=12),
    "many": Shape(250, 8, 900, (12,), 40, asked=12, ended=30),
    "person": Shape(300, 1, 500, tuple(range(20, 160, 2)), 5, ended=80),
    "nothing": Shape(0, 0, 0, (), 0, asked=0),
}


def at(topic: str, offset: int) -> Position:
    return Position(topic=topic, partition=offset % 4, offset=offset)


def group_id(n: int) -> str:
    return f"0198a5c0-{n % 65536:04x}-7{n % 4096:03x}-8000-{n:012x}"


def rollout(rng: random.Random, n: int, index: int, said: int, *, user: bool, trained: bool) -> RolloutLine:
    name = f"{group_id(n)}.{index}"
    value = rng.choice((None, -1.0, -0.4, 0.3, 1.0)) if user else rng.choice((0.0, 0.0, 0.2, 1.0))
    feedback = tuple(
        FeedbackLine(
            feedback_id=f"f-{n}-{index}-{k}",
            rollout_id=name,
            signal=rng.choice(("thumb", "accept", "edit_survival", "rating", "a_long_name_of_a_signal")),
            said=rng.choice(("1", "-1", "0.31", "good")),
            subject=f"{rng.randrange(50):032x}",
            received_us=START_US,
            at=at("user-feedback", n),
        )
        for k in range(said)
    )
    reward = RewardLine(
        rollout_id=name,
        reward=value,
        outcome="right",
        source="user" if user else "verifier",
        verifier="countdown 1",
        evidence=tuple(one.feedback_id for one in feedback),
        scored_us=START_US,
        at=at("rewards", n),
    )
    return RolloutLine(
        rollout_id=name,
        group_id=group_id(n),
        lineage=LINEAGE,
        environment="countdown",
        fleet="sampling",
        replica=f"sampling-{n % 3}",
        versions=tuple(range(8 + n % 4, 10 + n % 4)),
        tokens=31,
        finished_us=START_US,
        subject="ab" * 16 if user else "",
        erased=user and n % 7 == 0,
        trained=trained and value is not None,
        rewards=(reward,),
        feedback=feedback,
        at=at("rollouts", n),
    )


def made(shape: Shape) -> Answer:
    rng = random.Random(3)
    left = shape.said
    groups: list[GroupLine] = []
    for n in range(shape.groups + shape.ended):
        into = shape.versions[n % len(shape.versions)] if n < shape.groups else None
        share = math.ceil(left / max(1, shape.groups - n)) if into is not None else 0
        left -= share
        members = tuple(
            rollout(
                rng,
                n,
                index,
                share if index == 0 else 0,
                user=shape.size == 1,
                trained=into is not None,
            )
            for index in range(shape.size)
        )
        fate = ("kept", "trained") if into is not None else ("dropped", rng.choice(("stale", "over_budget")))
        groups.append(
            GroupLine(
                group_id=group_id(n),
                fate=fate[0],
                reason=fate[1],
                detail="",
                decided_us=START_US,
                planned=into,
                made=into,
                rollouts=members,
                absent=(),
                at=at("group-fates", n),
            )
        )
    numbers = sorted(set(shape.versions))
    asked = shape.asked
    shown = numbers if asked is None else [asked]
    carried = tuple(range(shown[0], shown[-1] + 8)) if shown else ()
    return Answer(
        asked=f"rollout {group_id(0)}.0" if asked is None else f"version {asked}",
        focus=() if asked is not None else (f"{group_id(0)}.0",),
        lineage=LINEAGE,
        model="policy",
        groups=tuple(groups),
        steps=tuple(step(n, shape.groups) for n in numbers),
        versions=tuple(version(n) for n in shown),
        reached=(
            Reached(
                lineage=LINEAGE, model="policy", trained=tuple(shown), carried=carried, left=(), newest=200
            ),
        ),
        served=tuple(
            Serving(
                fleet=f"fleet-{n % 3}",
                replica=f"replica-{n}",
                version=shown[0],
                from_us=START_US,
                until_us=None if n % 2 else START_US + 9_000_000,
                at=at("fleet-status", n),
            )
            for n in range(shape.replicas)
        ),
        way=() if asked is None else (WayStep(kind="anchor", base=None, version=0, bytes=9_000),),
        line=() if asked is None else tuple(range(asked + 1)),
        decided_by=()
        if asked is None
        else (
            SettingsLine(
                processor="pack",
                code="0.1.0",
                digest="ab" * 32,
                config={"pack": {"max_lag_versions": 3}},
                since_us=START_US,
                at=at("notices", 0),
            ),
        ),
        objects=() if asked is None else (Stored(key="k", size=1, sha256="", what="shard", there=False),),
        report=Report(
            command="audit lineage",
            findings=(Finding(kind=Kind.OBJECT_MISSING, where="<k>", detail="it is not there"),),
            checked={"records": 3},
            notes=("a note",),
        ),
    )


def step(number: int, groups: int) -> StepLine:
    return StepLine(
        lineage=LINEAGE,
        step=number,
        base_version=number - 1,
        version=number,
        reverts_to=None,
        consumed=(OffsetRange(topic="packed-batches", partition=0, start=number, end=number + 1),),
        plan_digest="ab" * 32,
        state_digest="cd" * 32,
        loss=-0.5,
        reward_mean=0.25,
        learning_rate=1e-4,
        max_lag=2,
        groups=groups,
        sequences=groups,
        trained_tokens=5_000,
        erased_sequences=0,
        code="0.1.0+g0123456789ab",
        settings={"torch": "2.15"},
        finished_us=START_US,
        plan_from="packed-batches",
        at=at("train-steps", number),
    )


def version(number: int) -> VersionLine:
    return VersionLine(
        lineage=LINEAGE,
        model="policy",
        version=number,
        kind="delta" if number else "anchor",
        base_version=number - 1 if number else None,
        reverts_to=None,
        step=number,
        state_digest="cd" * 32,
        manifest=Claim(key="weights/m.json", size=9, sha256="ef" * 32),
        anchor=None,
        checkpoint=None,
        coder="gap",
        changed_elements=5,
        total_elements=100,
        stored_bytes=70_000,
        full_bytes=670_000,
        published_us=START_US,
        at=at("weight-versions", number),
    )


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    root = ET.fromstring(svg)
    found: list[tuple[float, float, float, float]] = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "box":
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            x, y, w, h = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + w, y + h))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_boxes_lie_within_the_picture_and_not_on_one_another(name: str) -> None:
    svg = draw_svg(graph_of(made(SHAPES[name])))
    root = ET.fromstring(svg)
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    assert width < 2_000
    assert height < 1_500
    assert len(svg) < 600_000
    found = boxes(svg)
    assert found
    for left, top, right, bottom in found:
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= height
    for a, b in combinations(found, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "box":
            outer = group.find(f"{SVG}rect")
            assert outer is not None
            for rect in group.iter(f"{SVG}rect"):
                assert float(rect.get("x", "nan")) + float(rect.get("width", "nan")) <= float(
                    outer.get("x", "nan")
                ) + float(outer.get("width", "nan"))


@pytest.mark.parametrize("name", SHAPES)
def test_every_way_joins_two_boxes_and_every_rollout_is_in_one(name: str) -> None:
    answer = made(SHAPES[name])
    graph = graph_of(answer)
    names = {node.name for node in graph.nodes}
    assert len(names) == len(graph.nodes)
    for edge in graph.edges:
        assert {edge.source, edge.target} <= names
    assert sum(len(node.cells) for node in graph.nodes) == len(answer.rollouts)
    for column in range(7):
        assert sum(node.column == column for node in graph.nodes) <= SOME + 3
    said = sum(edge.weight for edge in graph.edges if column_of(graph, edge.source) == 0)
    assert said == sum(len(one.feedback) for one in answer.rollouts)


def column_of(graph: Graph, name: str) -> int:
    return next(node.column for node in graph.nodes if node.name == name)


def test_the_way_of_what_was_asked_for_is_lit_to_its_version() -> None:
    graph = graph_of(made(SHAPES["one"]))
    lit = {edge.source[0] + edge.target[0] for edge in graph.edges if edge.focus}
    assert lit >= {"fr", "rg", "gp", "ps", "sv"} - {"fr"}
    assert [node.tone for node in graph.nodes if node.column in (1, 2)] == ["focus", "focus"]


def test_a_page_needs_nothing_from_elsewhere_and_says_what_was_found(tmp_path: Path) -> None:
    write_picture(made(SHAPES["many"]), tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert "object_missing" in page
    assert "max_lag_versions" in page
    assert "&lt;k&gt;" in page
    assert re.findall(r'(?:src|href)="', page) == []
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    write_picture(made(SHAPES["many"]), tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text() in page


@pytest.mark.parametrize("name", SHAPES)
def test_the_tree_stays_short_and_says_how_much_more_there_is(name: str) -> None:
    shape = SHAPES[name]
    out = StringIO()
    Console(file=out, width=400, color_system=None).print(draw_answer(made(shape), 3))
    text = out.getvalue()
    assert len(text.splitlines()) < 60
    more = shape.groups + shape.ended - 3
    if more > 0:
        assert f"and {more:,} more groups" in text
    if shape.asked is not None:
        assert "1 objects looked for, 1 are missing" in text
        assert f"state digest {'cd' * 32}" in text
