"""`rollwire schemas diff | export`: whether a change breaks somebody, and the schemas for other people's tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from rollwire.ops.asyncapi.document import DEFAULT_BOOTSTRAP, DEFAULT_PREFIX
from rollwire.ops.schema_export import Format, exported, write_export
from rollwire.ops.schema_tree import CHECKOUT, newest_release, tree_of_folder, tree_of_ref
from rollwire.schemas.diff import compare, read_tree

app = App(name="schemas", help="Compare schemas with released ones; export them for other tools.")


@app.command
def diff(ref: str | None = None, /, *, checkout: Path = CHECKOUT) -> int:
    """Compare topic files and schemas with released ones. Exit code 1 if a change breaks somebody; it says whom.

    Parameters
    ----------
    ref
        A git tag, branch or commit; by default the newest tag before this commit, without one this commit.
    checkout
        Folder of the checkout.
    """
    now = read_tree(tree_of_folder(checkout))
    against = ref or newest_release(checkout) or "HEAD"
    changes = compare(read_tree(tree_of_ref(checkout, against)), now)
    out = Console(highlight=False, soft_wrap=True, markup=False)
    for change in changes:
        out.print(f"{'BREAKS' if change.breaks else 'fine  '} {change.topic}: {change.text}")
        if change.breaks:
            out.print(f"       breaks {', '.join(change.breaks)}")
    broken = sum(bool(change.breaks) for change in changes)
    out.print(f"{len(changes)} changes since {against}, {broken} of them break somebody")
    return 1 if broken else 0


@app.command
def export(
    *,
    format: Format = "asyncapi",
    out: Path,
    prefix: str = DEFAULT_PREFIX,
    bootstrap: str = DEFAULT_BOOTSTRAP,
    schema_registry: str | None = None,
    check: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write the schemas of all topics as files.

    Parameters
    ----------
    format
        asyncapi: one AsyncAPI 3.1 document. avro: the Avro schemas. json: JSON Schemas of the events as JSON, bytes as base64.
    out
        The folder, made if need be.
    prefix
        Prefix of the topics in the AsyncAPI document.
    bootstrap
        host:port of the broker in the AsyncAPI document.
    schema_registry
        URL of the schema registry that the AsyncAPI document names.
    check
        Have AsyncAPI's own parser read the document (Node.js); exit code 1 if it finds an error.
    """
    files = exported(format, prefix=prefix, bootstrap=bootstrap, registry_url=schema_registry)
    write_export(out, files)
    shown = Console(highlight=False, soft_wrap=True, markup=False)
    for name in files:
        shown.print(str(out / name))
    return _check(files["asyncapi.json"], shown) if check and format == "asyncapi" else 0


def _check(text: str, shown: Console) -> int:
    from rollwire.ops.asyncapi.parser import check_document
    from rollwire.ops.stack.config import default_cache

    notes = Console(stderr=True, highlight=False, markup=False)
    verdict = check_document(text, default_cache(), notes.print)
    for one in verdict.diagnostics:
        shown.print(f"{one.severity} {one.code} at {one.path}: {one.message}")
    if verdict.read is None:
        return 1
    shown.print(f"AsyncAPI {verdict.read.version}: {len(verdict.read.channels)} channels, valid")
    return 0
