"""TLS settings that could not work, or would show keys to others, are refused at the start."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from rollwire.producers.gateway.tls import TlsConfig, check_exposure, check_tls, is_loopback, tls_config
from rollwire.schemas.errors import ConfigError

NOW = datetime(2026, 6, 1, tzinfo=UTC)
NOW_US = round(NOW.timestamp() * 1e6)
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def ec_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def write(
    folder: Path,
    key: Key,
    *,
    begins: timedelta = timedelta(days=-1),
    ends: timedelta = timedelta(days=90),
    named: bool = True,
    passphrase: bytes | None = None,
) -> TlsConfig:
    """A self-signed certificate for localhost and 127.0.0.1, and its key, as files."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW + begins)
        .not_valid_after(NOW + ends)
    )
    if named:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    locked = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase)
    )
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    key_file.chmod(0o600)
    return TlsConfig(cert=cert_file, key=key_file)


def test_a_good_pair_says_what_it_is_for(tmp_path: Path) -> None:
    found = check_tls(write(tmp_path, ec_key()), NOW_US)
    assert found.names == ("localhost", "127.0.0.1")
    assert found.ends_us == NOW_US + 90 * 86_400_000_000


@pytest.mark.parametrize(
    ("begins", "ends"), [(timedelta(days=-9), timedelta(0)), (timedelta(days=1), timedelta(days=9))]
)
def test_a_certificate_out_of_its_time_is_refused(tmp_path: Path, begins: timedelta, ends: timedelta) -> None:
    with pytest.raises(ConfigError, match="not now"):
        check_tls(write(tmp_path, ec_key(), begins=begins, ends=ends), NOW_US)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    good = write(tmp_path, ec_key())
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", ec_key())
    with pytest.raises(ConfigError, match=r"key\.pem is no private key"):
        check_tls(TlsConfig(cert=good.cert, key=other.key), NOW_US)
    with pytest.raises(ConfigError, match="no certificate"):
        check_tls(TlsConfig(cert=good.key, key=good.key), NOW_US)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_tls(TlsConfig(cert=tmp_path / "none.pem", key=good.key), NOW_US)
    with pytest.raises(ConfigError, match="subjectAltName"):
        check_tls(write(tmp_path, ec_key(), named=False), NOW_US)
    with pytest.raises(ConfigError, match="passphrase"):
        check_tls(write(tmp_path, ec_key(), passphrase=b"secret"), NOW_US)
    with pytest.raises(ConfigError, match="go together"):
        tls_config(good.cert, None)
    assert tls_config(None, None) is None
    assert tls_config(good.cert, good.key) == good


def test_a_weak_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check_tls(write(tmp_path, rsa.generate_private_key(65_537, 1024)), NOW_US)


def test_an_address_that_others_reach_needs_tls_and_keys() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("gateway.example.com")
    check_exposure("127.0.0.1", tls=False, behind_proxy=False, open_to_all=True)
    check_exposure("0.0.0.0", tls=True, behind_proxy=False, open_to_all=False)
    check_exposure("0.0.0.0", tls=False, behind_proxy=True, open_to_all=False)
    with pytest.raises(ConfigError, match="in the clear"):
        check_exposure("0.0.0.0", tls=False, behind_proxy=False, open_to_all=False)
    with pytest.raises(ConfigError, match="without API keys"):
        check_exposure("0.0.0.0", tls=True, behind_proxy=True, open_to_all=True)
