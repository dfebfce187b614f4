"""Certificates for tests: an authority, and certificates that it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)
_USES = [
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
]
_SIGNS = x509.KeyUsage(**{use: use == "key_cert_sign" for use in _USES})
Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """An authority that signs certificates; its own certificate is `cert`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        own = _builder(self._name, self._name, self._key, 1)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        mine = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        own = own.add_extension(mine, critical=False)
        own = own.add_extension(_SIGNS, critical=True)
        self.cert = _written(folder / f"{name}.pem", own.sign(self._key, hashes.SHA256()))

    def sign(
        self,
        name: str,
        *,
        days: float = 1,
        key: Key | None = None,
        file: str = "",
        bare: bool = False,
    ) -> Pair:
        """A certificate for a name and 127.0.0.1. With negative `days` it has expired; a `bare` one
        has only a common name; with an empty name it has no name at all."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.1"))]
        builder = _builder(_named(name), self._name, key, days)
        if name and not bare:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        # Python from 3.13 on wants this, and what an authority's key is for.
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        cert = builder.sign(self._key, hashes.SHA256())
        stem = self._folder / (file or name or "nameless")
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        stem.with_suffix(".key").write_bytes(secret)
        return Pair(_written(stem.with_suffix(".crt"), cert), stem.with_suffix(".key"))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _written(path: Path, certificate: x509.Certificate) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path
