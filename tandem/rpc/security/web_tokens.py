"""JSON Web Tokens (RFC 7519) of an issuer, checked by its published keys (a JWK set, RFC 7517)."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import jwt
import structlog

from tandem.errors import StartupError, Unauthenticated, Unavailable
from tandem.rpc.security.files import NamedFile, WatchedFiles

_log = structlog.get_logger(__name__)

# Signatures by an issuer's private key. Those by a shared secret, and "none", prove nothing here.
_ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
# A token of an issuer has one or two KiB; what is longer is not even decoded.
_LONGEST = 8192
# What a log line and a share of the queue have as a name.
_NAME = re.compile(r"[\x21-\x7e]{1,128}")
# An issuer announces a key a day or more before it uses it, but some do not.
_REFRESH_SECONDS = 300.0
_AGAIN_SECONDS = 10.0
_FETCH_SECONDS = 5.0
_MOST_BYTES = 1 << 20

# Keys by their ids.
Keys = Mapping[str, jwt.PyJWK]


@dataclass(frozen=True)
class Claims:
    """What a token must say.

    Attributes:
        issuer: its `iss`.
        audience: one of its `aud`.
        name: the claim that names the caller.
        leeway_seconds: by which two clocks may differ.
    """

    issuer: str
    audience: str
    name: str = "sub"
    leeway_seconds: float = 60.0


class WebTokens:
    """Callers whose issuer signs for them.

    Args:
        claims: that are wanted.
        keys: of the issuer, now; is called with the id of the key that a token names.
    """

    def __init__(self, claims: Claims, keys: Callable[[str], Keys]) -> None:
        self._claims = claims
        self._keys = keys

    def owner_of(self, token: str) -> str:
        """The caller's name.

        Raises:
            Unauthenticated: the token is not valid here; the sentence repeats nothing of it.
            Unavailable: the issuer's keys are not known yet.
        """
        claims = self._claims
        try:
            key = self._key_of(token)
            found = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=claims.audience,
                issuer=claims.issuer,
                leeway=claims.leeway_seconds,
                options={"require": ["exp", "iss", "aud", claims.name]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the bearer token has expired; get another one") from None
        except (jwt.PyJWTError, ValueError):
            raise Unauthenticated("the bearer token is not valid here") from None
        name = found[claims.name]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Unauthenticated(f"the bearer token's {claims.name} is no name of a caller")
        return name

    def _key_of(self, token: str) -> jwt.PyJWK:
        if len(token) > _LONGEST:
            raise jwt.InvalidTokenError
        named = jwt.get_unverified_header(token).get("kid", "")
        keys = self._keys(named)
        if not named and len(keys) == 1:
            return next(iter(keys.values()))
        if named not in keys:
            raise jwt.InvalidTokenError
        return keys[named]


class FileKeys:
    """The keys of a file, which is read again when it changes.

    Raises:
        StartupError: it is missing or unreadable, or holds no key that can be used.
    """

    def __init__(self, file: NamedFile) -> None:
        def read() -> Keys:
            try:
                return keys_in(file.read())
            except ValueError as error:
                raise file.unfit(str(error)) from None

        self._watched = WatchedFiles([file.path], read)

    def __call__(self, key_id: str) -> Keys:
        """All of them."""
        return self._watched.look()[1]


class UrlKeys:
    """The keys that an address publishes, fetched by a thread of its own: now and then, and soon
    after a token names a key that is not among them.

    Args:
        setting: that names the address, for the log.
        url: https, or http on this machine.
        fetch: returns the document.
    """

    def __init__(self, setting: str, url: str, fetch: Callable[[str], bytes] | None = None) -> None:
        self._setting, self._url = setting, url
        self._fetch = fetch or _fetched
        self._keys: Keys | None = None
        self._wanted = threading.Event()
        threading.Thread(target=self._follow, name="jwks", daemon=True).start()

    def __call__(self, key_id: str) -> Keys:
        """Those that are known now.

        Raises:
            Unavailable: none were fetched yet.
        """
        if self._keys is None:
            raise Unavailable("the keys of the tokens' issuer are not known yet; try again")
        if key_id not in self._keys:
            self._wanted.set()
        return self._keys

    def _follow(self) -> None:
        while True:
            self._wanted.clear()
            self._renew()
            time.sleep(_AGAIN_SECONDS)  # whatever callers send, an issuer is not asked more often
            self._wanted.wait(_REFRESH_SECONDS if self._keys is not None else 0.0)

    def _renew(self) -> None:
        try:
            self._keys = keys_in(self._fetch(self._url))
        except Exception as error:  # whatever an issuer sends, the thread goes on
            _log.warning("no keys were fetched", setting=self._setting, reason=str(error))


def keys_in(document: bytes) -> Keys:
    """The keys of a JWK set by their ids; those of other uses are left out.

    Raises:
        ValueError: it is no JWK set, or has no key that a token can be checked by; a sentence.
    """
    try:
        listed = json.loads(document)["keys"]
        entries: list[dict[str, Any]] = [each for each in listed if isinstance(each, dict)]
    except (ValueError, KeyError, TypeError):
        raise ValueError("is no JWK set: an object with a list of keys") from None
    found: dict[str, jwt.PyJWK] = {}
    for entry in entries:
        try:
            key = jwt.PyJWK(entry)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue  # of a kind that is not known here
        if key.algorithm_name in _ALGORITHMS and entry.get("use", "sig") == "sig":
            found[str(entry.get("kid", ""))] = key
    if not found:
        raise ValueError("has no public key that signs tokens")
    return found


def _fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_FETCH_SECONDS) as reply:
        if not _trusted(reply.url):
            raise ValueError(f"the address leads to {reply.url}, which anybody could answer for")
        document: bytes = reply.read(_MOST_BYTES + 1)
    if len(document) > _MOST_BYTES:
        raise ValueError(f"the document is larger than {_MOST_BYTES >> 20} MiB")
    return document


def looks_signed(token: str) -> bool:
    """Whether it is written as a JSON Web Token: a header, claims and a signature."""
    return token.startswith("eyJ") and token.count(".") == 2


def check_url(setting: str, url: str) -> None:
    """Raises StartupError for an address that anybody on the way could answer for."""
    if not _trusted(url):
        raise StartupError(f"{setting}: {url} must begin with https://")


def _trusted(url: str) -> bool:
    """Whether the answer is the named host's: by TLS, or on this machine."""
    try:
        parts = urlsplit(url)
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and local)
