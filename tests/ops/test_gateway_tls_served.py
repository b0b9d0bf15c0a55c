"""The gateway over TLS, as `rollwire gateway --tls-cert --tls-key` serves it."""

from __future__ import annotations

import gc
import socket
import ssl
import sys
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Queue

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rollwire.ops.gateway import run_gateway
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.serve import make_app
from rollwire.producers.gateway.tls import TlsConfig
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log_memory import MemoryLog


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    """The gateway tunes its process, which here is the tests'."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def certificate(folder: Path, ends: timedelta = timedelta(days=30)) -> TlsConfig:
    """Self-signed, for localhost."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + ends)
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    config = TlsConfig(cert=folder / "cert.pem", key=folder / "key.pem")
    config.cert.write_bytes(built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    config.key.write_bytes(key.private_bytes(*form))
    config.key.chmod(0o600)
    return config


def config_with(tls: TlsConfig) -> GatewayConfig:
    return GatewayConfig.model_validate({"port": 0, "tls": tls, "open_to_all": True})


def test_it_speaks_tls_1_2_and_newer_alone(tmp_path: Path) -> None:
    tls, stop, ready = certificate(tmp_path), threading.Event(), Queue[str]()
    app = make_app(MemoryLog({"user-feedback": 4}), MemoryKeys(), b"s" * 32)
    thread = threading.Thread(
        target=run_gateway, args=(app, config_with(tls), stop), kwargs={"ready": ready.put}, daemon=True
    )
    thread.start()
    try:
        url = ready.get(timeout=60)
        assert url.startswith("https://127.0.0.1:")
        port = int(url.rpartition(":")[2])
        trusting = ssl.create_default_context(cafile=str(tls.cert))
        with urllib.request.urlopen(
            f"https://localhost:{port}/healthz", context=trusting, timeout=30
        ) as answer:
            assert answer.status == 204
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as wire,
            trusting.wrap_socket(wire, server_hostname="localhost") as secure,
        ):
            assert secure.version() == "TLSv1.3"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
            wire.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert not wire.recv(100).startswith(b"HTTP/")  # in the clear nothing is said
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_certificate_that_is_over_is_refused_at_the_start(tmp_path: Path) -> None:
    app = make_app(MemoryLog({"user-feedback": 4}), MemoryKeys(), b"s" * 32)
    tls = certificate(tmp_path, timedelta(seconds=-1))
    with pytest.raises(ConfigError, match="not now"):
        run_gateway(app, config_with(tls), threading.Event(), ready=lambda url: pytest.fail(url))
