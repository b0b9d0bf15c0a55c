"""Whether every field of a record has its declared type, exactly: a struct does not check its fields when it is made.

A value of another type is refused even where Avro would take it: an int in a float field, a bool in an int field, a number of
another library (C58). A list is as good as the tuple that is declared.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from itertools import product
from operator import attrgetter
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

Check = Callable[[Any], bool]

_SIMPLE: Final = (str, int, float, bool, bytes)
_NONE: Final = type(None)
_SEQUENCES: Final = (tuple, list)


def _literal(values: tuple[Any, ...]) -> Check:
    known = frozenset(values)
    return lambda value: type(value) is str and value in known


def _any(checks: tuple[Check, ...]) -> Check:
    return lambda value: any(check(value) for check in checks)


def _none_or(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _items(kind: Any) -> Check:
    """Of a tuple or list: simple items by the set of their types, all others one by one."""
    branches = _branches(kind)
    if all(branch in (*_SIMPLE, _NONE) for branch in branches):
        allowed = frozenset(branches)
        return lambda value: type(value) in _SEQUENCES and allowed.issuperset(map(type, value))
    check = compile_check(kind)
    simple = frozenset(branch for branch in branches if branch in (*_SIMPLE, _NONE))
    if not simple:
        return lambda value: type(value) in _SEQUENCES and all(map(check, value))
    return lambda value: (
        type(value) in _SEQUENCES and (simple.issuperset(map(type, value)) or all(map(check, value)))
    )


def _mapping(key: Check, content: Check) -> Check:
    def every(value: Any) -> bool:
        return type(value) is dict and all(key(k) and content(v) for k, v in value.items())

    return every


def _exactly(kind: type) -> Check:
    return lambda value: type(value) is kind


def _branches(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of any other type, itself."""
    if get_origin(kind) in (typing.Union, types.UnionType):
        return get_args(kind)
    return (kind,)


def _struct(kind: type[msgspec.Struct]) -> Check:
    """Simple fields together: the tuple of their types must be one that may be. All others by a check of their own."""
    simple: dict[str, tuple[type, ...]] = {}
    others: list[tuple[Callable[[Any], Any], Check]] = []
    for name, declared in get_type_hints(kind).items():
        branches = _branches(declared)
        if all(branch in (*_SIMPLE, _NONE) for branch in branches):
            simple[name] = branches
        else:
            others.append((attrgetter(name), compile_check(declared)))
    # One name gives a value, two or more a tuple: the class stands at the end, and before it once more.
    of_simple = attrgetter(*simple, "__class__", "__class__")
    allowed = frozenset((*types_, type(kind), type(kind)) for types_ in product(*simple.values()))

    def check(value: Any) -> bool:
        if type(value) is not kind or tuple(map(type, of_simple(value))) not in allowed:
            return False
        for field, wanted in others:  # noqa: SIM110 - a loop is twice as fast as all() here, on every event
            if not wanted(field(value)):
                return False
        return True

    return check


def compile_check(kind: Any) -> Check:
    """A function that says whether a value is of a type. Raises `TypeError` for a type that no record of ours has."""
    branches = _branches(kind)
    if len(branches) == 2 and _NONE in branches:
        return _none_or(compile_check(next(branch for branch in branches if branch is not _NONE)))
    if len(branches) > 1:
        return _any(tuple(map(compile_check, branches)))
    if kind in (*_SIMPLE, _NONE):
        return _exactly(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _items(arguments[0])
    if origin in (dict, Mapping):
        return _mapping(compile_check(arguments[0]), compile_check(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(kind)
    raise TypeError(f"no record of ours has a field of type {kind}")


def wrong_field(value: msgspec.Struct) -> str:
    """The first field of a record that is not of its declared type; empty where all are."""
    for name, declared in get_type_hints(type(value)).items():
        if not compile_check(declared)(getattr(value, name)):
            return name
    return ""
