"""Turns what pydantic says of a wrong setting into one sentence with the nearest right name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from rollwire.schemas.errors import ConfigError

Location = Sequence[int | str]


def config_error(error: ValidationError, model: type[BaseModel], *, where: str) -> ConfigError:
    """One `ConfigError` for all that is wrong. `where` names the source of the values (a file, "the command line")."""
    problems = [
        _problem(details["type"], details["loc"], details["msg"], model) for details in error.errors()
    ]
    return ConfigError(f"{where}: " + "; ".join(problems))


def suggest(word: str, known: Sequence[str]) -> str | None:
    """The known name that is nearest to `word`, or None if none is near. Case and `-` against `_` do not count."""
    folded = {name.lower().replace("-", "_"): name for name in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def _problem(kind: str, location: Location, message: str, model: type[BaseModel]) -> str:
    dotted = ".".join(str(part) for part in location) or "the settings"
    if kind != "extra_forbidden":
        return f"{dotted}: {message[:1].lower()}{message[1:]}"
    parents, word = [str(part) for part in location[:-1]], str(location[-1])
    known = _keys_at(model, parents)
    near = suggest(word, known)
    if near is not None:
        return f"{dotted} is not a setting: did you mean {'.'.join([*parents, near])}?"
    return f"{dotted} is not a setting; there are: {', '.join(sorted(known))}"


def _keys_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys that `model` knows under the dotted `path`; empty where the path leaves the models."""
    for part in path:
        field = model.model_fields.get(part)
        nested = None if field is None else _model_in(field.annotation)
        if nested is None:
            return []
        model = nested
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in {typing.Union, types.UnionType, typing.Annotated}:
        return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)
    return None
