"""`rollwire audit query`: the commonest questions, or any in SQL, over a lake in a folder."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from rollwire.ops.auditing import JsonFile, auditing
from rollwire.ops.lake.queries import Answer, ask, open_lake, queries
from rollwire.ops.printing import console, table, write_json
from rollwire.schemas.errors import ConfigError

_ROWS: Final = 200  # that are printed; the JSON has all


def query(
    name: str | None = None,
    /,
    *,
    lake: Path,
    where: str | None = None,
    sql: str | None = None,
    json: JsonFile = None,
) -> int:
    """Ask a lake that `rollwire audit export` wrote into a folder. Without a question: show which there are.

    Each topic is a view, its name with _ for -: group_fates, train_steps. Hours are UTC.

    Parameters
    ----------
    name
        One of the questions.
    lake
        Folder of the lake.
    where
        Only rows of the answer for which this holds, as in: version = 17
    sql
        A question of your own.
    """
    with auditing():
        if name is not None and sql is not None:
            raise ConfigError("say the name of a question or --sql, not both")
        if name is None and sql is None:
            _show()
            return 0
        text = sql if sql is not None else _named(name or "")
        connection = open_lake(lake)
        try:
            answer = ask(connection, text, where=where)
        finally:
            connection.close()
        if json is not None:
            rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
            write_json(json, rows, enc_hook=str)
        _print(answer)
        return 0


def _named(name: str) -> str:
    known = queries()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"{name!r} is no question; {hint}")
    return known[name].sql


def _show() -> None:
    known = table("name", "question")
    for one in queries().values():
        known.add_row(one.name, one.question)
    console().print(known)


def _print(answer: Answer) -> None:
    rows = table(*answer.columns)
    for row in answer.rows[:_ROWS]:
        rows.add_row(*("" if value is None else str(value) for value in row))
    out = console()
    out.print(rows, markup=False)
    more = len(answer.rows) - _ROWS
    out.print(f"{len(answer.rows):,} rows" + (f", {more:,} not shown: --json has all" if more > 0 else ""))
