"""Certificates, keys and authorities in PEM files: read and checked.

gRPC itself accepts unusable ones, and then silently refuses every connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tandem.rpc.security.files import NamedFile


@dataclass(frozen=True)
class KeyPair:
    """A certificate with its chain of intermediates, and its key, as PEM."""

    chain: bytes
    key: bytes


def read_pair(certificate: NamedFile, key: NamedFile) -> KeyPair:
    """A certificate that is valid now, with its key.

    Raises:
        StartupError: one of the files is not usable; says which, and why.
    """
    chain, secret = certificate.read(), key.read()
    own = _certificates(certificate, chain)[0]
    if fault := _out_of_force(own):
        raise certificate.unfit(fault)
    try:
        private = serialization.load_pem_private_key(secret, password=None)
    except TypeError:
        raise key.unfit("has a passphrase; give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise key.unfit("holds no PEM private key") from None
    if not isinstance(private, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
        # The handshake would find no signature algorithm that both sides support.
        raise key.unfit("is of a kind that gRPC does not take; use ECDSA (P-256) or RSA")
    if private.public_key() != _public_key(certificate, own):
        raise key.unfit(f"does not fit the certificate in {certificate.path}")
    return KeyPair(chain, secret)


def read_authorities(file: NamedFile) -> bytes:
    """The certificates of authorities, of which at least one is valid now.

    Raises:
        StartupError: the file is not usable; says why.
    """
    content = file.read()
    faults = [_out_of_force(certificate) for certificate in _certificates(file, content)]
    if all(faults):
        raise file.unfit(faults[0])
    return content


def _certificates(file: NamedFile, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise file.unfit("holds no PEM certificate") from None


def _public_key(file: NamedFile, certificate: x509.Certificate) -> object:
    try:
        return certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise file.unfit("is for a kind of key that is not known") from None


def _out_of_force(certificate: x509.Certificate) -> str:
    """Why a certificate is not valid now; empty if it is."""
    now = datetime.now(UTC)
    if now >= certificate.not_valid_after_utc:
        return f"expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return ""
