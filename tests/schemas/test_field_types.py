"""Exact types: what a check says of every record's fields, and of every kind of wrong value."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.field_types import compile_check, wrong_field
from rollwire.schemas.golden import all_examples

WRONG: tuple[Any, ...] = (
    1,
    True,
    1.0,
    "text",
    b"bytes",
    bytearray(b"b"),
    None,
    {"a": 1},
    ("text", 1),
    np.float64(1.0),
    np.int64(1),
    object(),
)


@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.topic)
def test_every_example_has_the_types_it_declares(example: Any) -> None:
    assert compile_check(type(example.event))(example.event)
    assert wrong_field(example.event) == ""


@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.topic)
def test_a_wrong_value_in_any_field_is_found_as_msgpack_finds_it(example: Any) -> None:
    """msgpack tells every type apart: what changes or fails on a round trip through the declared types is wrong."""
    kind = type(example.event)
    check, decoder = compile_check(kind), msgspec.msgpack.Decoder(kind)
    for name in kind.__struct_fields__:
        for value in WRONG:
            event = msgspec.structs.replace(example.event, **{name: value})
            try:
                packed = msgspec.msgpack.encode(event)
                good = msgspec.msgpack.encode(decoder.decode(packed)) == packed
            except (TypeError, ValueError):
                good = False
            if type(value) is bytearray:
                good = False  # of arrays only bytes are taken
            assert check(event) == good, f"{name}={value!r}"
            assert wrong_field(event) == ("" if good else name)


def test_a_list_is_as_good_as_a_tuple() -> None:
    check = compile_check(tuple[str, ...])
    assert check(("a", "b"))
    assert check(["a"])
    assert check(())
    assert not check("ab")
    assert not check(("a", 1))


def test_every_record_of_the_catalogue_compiles_and_nothing_else() -> None:
    for spec in TOPICS.values():
        compile_check(spec.record_class)
    for kind in (list[int], set[str], complex, tuple[int, str]):
        with pytest.raises(TypeError, match="no record"):
            compile_check(kind)
