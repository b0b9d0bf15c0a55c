"""JSON over HTTP to an inference engine's server: one deadline a call, and errors that say who answered what."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx

from rollwire.schemas.errors import EngineRefused, EngineUnavailable

# What a server says, or a proxy in front of it, while there will be another answer later.
PASSING: Final = frozenset({429, 502, 503, 504})


def read_answer(response: httpx.Response) -> Any:
    """The JSON of an answer, None for an empty one. Raises `EngineUnavailable` for `PASSING`, else `EngineRefused`."""
    where = f"{response.request.method} {response.request.url}"
    if not response.is_success:
        said = f"{where} answered {response.status_code}: {response.text[:500]}"
        raise EngineUnavailable(said) if response.status_code in PASSING else EngineRefused(said)
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError as error:
        raise EngineRefused(f"{where} answered what is no JSON: {response.text[:200]!r}") from error


def headers_of(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


class EngineCalls:
    """One server, one thread at a time. Never follows a redirect, and uses no proxy of the environment."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url, headers=headers_of(api_key), timeout=timeout_s, trust_env=False
        )

    def get(self, path: str) -> Any:
        """Raises `EngineUnavailable`, `EngineRefused`."""
        return self._call("GET", path, None, None, None)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Raises `EngineUnavailable`, `EngineRefused`."""
        return self._call("POST", path, body, query, timeout_s)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> Any:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            response = self._client.request(method, path, json=body, params=query, timeout=timeout)
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"{method} {self.url}{path}: {type(error).__name__}: {error}; is the engine there?"
            ) from error
        return read_answer(response)


def field(answer: Any, name: str, kind: type[Any]) -> Any:
    """A field of an answer. Raises `EngineRefused` where it is missing or of another type."""
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise EngineRefused(f"an engine's answer lacks {name!r} ({kind.__name__}): {str(answer)[:300]}")
    return value
