"""Who is meant by a command about one person: by the name that a product uses, or by the pseudonym that stands in the log."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from rollwire.ops.keys import pseudonym_secret
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.pseudonyms import is_pseudonym, pseudonym_of

Subject = Annotated[
    str | None, Parameter(name="--subject", help="The person, exactly as the product names them in feedback.")
]
Tenant = Annotated[
    str | None, Parameter(name="--tenant", help="With --subject: the tenant of the product's API key.")
]
Pseudonym = Annotated[
    str | None, Parameter(name="--pseudonym", help="Instead of --subject: the pseudonym, 32 hex digits.")
]


def person_of(stack: StackInfo, subject: str | None, tenant: str | None, pseudonym: str | None) -> str:
    """Their pseudonym. Raises `ConfigError` where it is not said who is meant."""
    if (subject is None) == (pseudonym is None) or (tenant is None) != (subject is None):
        raise ConfigError("say who is meant: --subject and --tenant, or --pseudonym alone")
    if pseudonym is not None:
        if not is_pseudonym(pseudonym):
            raise ConfigError(f"--pseudonym {pseudonym!r} is not 32 hex digits in lower case")
        return pseudonym
    try:
        return pseudonym_of(pseudonym_secret(stack), tenant or "", subject or "")
    except Refused as refused:
        raise ConfigError(f"--subject: {refused.detail}") from None
