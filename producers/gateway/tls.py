"""TLS of the gateway's address: files that are wrong are named at the start, not at the first handshake.

Keys travel in every request, so an address that others reach takes TLS, or stands behind a proxy that does.
"""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from pydantic import BaseModel, ConfigDict, Field

from rollwire.schemas.errors import ConfigError

_logger = structlog.get_logger("rollwire.gateway")
_RSA_BITS: Final = 2048
_SOON_S: Final = 14 * 24 * 3600


class TlsConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: Path = Field(description="PEM file: the certificate, then the chain up to a known authority")
    key: Path = Field(description="PEM file with its private key, without a passphrase")


class Certificate(NamedTuple):
    names: tuple[str, ...]
    ends_us: int


def tls_config(cert: Path | None, key: Path | None) -> TlsConfig | None:
    """Both or neither. Raises `ConfigError`."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together")
    return TlsConfig(cert=cert, key=key)


def check_tls(config: TlsConfig, now_us: int) -> Certificate:
    """Raises `ConfigError` where no browser could connect: files missing or of no known form, a key of another
    certificate, a certificate out of its time or too weak."""
    for file in (config.cert, config.key):
        try:
            file.read_bytes()
        except OSError as failure:
            raise ConfigError(f"{file} cannot be read: {failure.strerror}") from failure
    try:
        chain = x509.load_pem_x509_certificates(config.cert.read_bytes())
    except ValueError as failure:
        raise ConfigError(f"{config.cert} holds no certificate in PEM form") from failure
    try:
        # No passphrase is asked for: a service has nobody to type it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.cert, config.key, password="")
    except (ssl.SSLError, ValueError) as failure:
        raise ConfigError(
            f"{config.key} is no private key of the certificate in {config.cert}, or has a passphrase: {failure}"
        ) from failure
    first = chain[0]
    public = first.public_key()
    if isinstance(public, RSAPublicKey) and public.key_size < _RSA_BITS:
        raise ConfigError(
            f"{config.cert}: RSA with {public.key_size} bits; clients demand {_RSA_BITS} at least"
        )
    now = datetime.fromtimestamp(now_us / 1e6, UTC)
    begins, ends = first.not_valid_before_utc, first.not_valid_after_utc
    if not begins <= now < ends:
        raise ConfigError(
            f"{config.cert} is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, not now"
        )
    if (ends - now).total_seconds() < _SOON_S:
        _logger.warning("gateway.certificate_ends_soon", cert=str(config.cert), ends=ends.isoformat())
    if config.key.stat().st_mode & 0o007:
        _logger.warning(
            "gateway.key_file_open", key=str(config.key), detail="every user can read it: chmod 600"
        )
    try:
        alternative = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ConfigError(f"{config.cert} names no host (subjectAltName), which clients demand") from None
    names = [str(name.value) for name in alternative if isinstance(name, (x509.DNSName, x509.IPAddress))]
    return Certificate(tuple(names), round(ends.timestamp() * 1e6))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, *, tls: bool, behind_proxy: bool, open_to_all: bool) -> None:
    """Raises `ConfigError` for an address that others reach in the clear, or without keys."""
    if is_loopback(host):
        return
    if open_to_all:
        raise ConfigError(
            f"a gateway without API keys serves this machine alone: --host 127.0.0.1, not {host}"
        )
    if not tls and not behind_proxy:
        raise ConfigError(
            f"on {host} API keys would travel in the clear: give --tls-cert and --tls-key, or --behind-proxy "
            "where a proxy in front ends TLS"
        )
