"""The questions that a lake answers by name, and a lake opened in DuckDB: one view a topic."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError, EnvironmentMissing

_FOLDER: Final = Path(__file__).parent / "queries"


class Query(NamedTuple):
    name: str
    question: str
    sql: str  # without the question, and without a semicolon


class Answer(NamedTuple):
    columns: list[str]
    rows: list[tuple[Any, ...]]


@cache
def queries() -> dict[str, Query]:
    """By name: `queries/<name>.sql`, whose first line is the question."""
    found: dict[str, Query] = {}
    for file in sorted(_FOLDER.glob("*.sql")):
        first, _, sql = file.read_text("utf-8").partition("\n")
        found[file.stem] = Query(file.stem, first.removeprefix("-- "), sql.strip().removesuffix(";"))
    return found


def view_of(topic: str) -> str:
    """A topic's name in SQL."""
    return topic.replace("-", "_")


def open_lake(folder: Path) -> Any:
    """A `duckdb.DuckDBPyConnection` with a view of every topic; one that the lake does not have is empty. Hours are UTC.

    Raises `ConfigError` where `folder` holds no lake, `EnvironmentMissing` without the extra `lake`.
    """
    try:
        import duckdb

        from rollwire.consumers.audit.lake_plan import LAKE
        from rollwire.consumers.audit.lake_schema import table_of
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(
            f"{error.name} is not installed; install the extra: pip install 'rollwire[lake]'"
        ) from error
    if not (folder / LAKE).is_file():
        raise ConfigError(f"{folder} holds no lake: make one with `rollwire audit export --to {folder}`")
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for topic in TOPICS:
        if any((folder / f"topic={topic}").glob("*/*.parquet")):
            files = str(folder / f"topic={topic}" / "*" / "*.parquet").replace("'", "''")
            read = f"read_parquet('{files}', hive_partitioning = true, hive_types = {{'hour': VARCHAR}}, union_by_name = true)"
            connection.execute(f"CREATE VIEW {view_of(topic)} AS SELECT * FROM {read}")
        else:
            connection.register(f"_empty_{view_of(topic)}", table_of(topic).schema.empty_table())
            connection.execute(
                f"CREATE VIEW {view_of(topic)} AS SELECT *, ''::VARCHAR AS hour FROM _empty_{view_of(topic)}"
            )
    return connection


def ask(connection: Any, sql: str, *, where: str | None = None) -> Answer:
    """Raises `ConfigError` where the SQL is wrong."""
    import duckdb

    text = sql if where is None else f"SELECT * FROM (\n{sql}\n) WHERE {where}"
    try:
        result = connection.execute(text)
        return Answer([column[0] for column in result.description], result.fetchall())
    except duckdb.Error as error:
        raise ConfigError(f"the lake does not answer: {error}") from error
