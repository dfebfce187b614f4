"""Bearer tokens: those that a service takes, with their owners, and a caller's own token."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import Unauthenticated
from tandem.rpc.security.files import NamedFile, WatchedFiles
from tandem.rpc.security.web_tokens import WebTokens, looks_signed

# Tells a caller what to send.
_HOW = "send the metadata 'authorization: Bearer TOKEN'"
# A shorter token could be guessed; `openssl rand -hex 32` gives 64 characters.
_SHORTEST = 16
# RFC 6750's alphabet of a bearer token, which HTTP headers carry unescaped.
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
_NAME = re.compile(r"[\w.@:/-]{1,128}", re.ASCII)
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class _Entry:
    name: str
    digest: bytes


class BearerTokens:
    """The tokens that may call, with their owners. The file is read again when it changes.

    Args:
        file: a line for each token: the name of its owner, a blank, and the token or
            "sha256:" with the token's digest. Empty lines and those that begin with # are ignored.
            None if only the issuer's tokens may call.
        issued: checks JSON Web Tokens; None if only those of the file may call.

    Raises:
        StartupError: the file is missing, unreadable, malformed or has no token.
    """

    def __init__(self, file: NamedFile | None, issued: WebTokens | None = None) -> None:
        self._issued = issued
        # Digests are looked up by a keyed hash, so that the time of a look-up tells nothing about
        # the digests in the file.
        self._secret = secrets.token_bytes(32)
        self._watched = (
            None if file is None else WatchedFiles([file.path], lambda: self._table(file))
        )
        if file is not None and not self._known:
            raise file.unfit("holds no token: nobody could call")

    def owner_of(self, presented: Sequence[str]) -> str:
        """The owner of the token in a call's `authorization` values.

        Raises:
            Unauthenticated: there is not exactly one value, or its token is unknown or not valid;
                the message says what to send, and never repeats what was sent.
            Unavailable: see `WebTokens`.
        """
        if not presented:
            raise Unauthenticated(f"no bearer token; {_HOW}")
        scheme, _, token = presented[0].partition(" ")
        if len(presented) > 1 or scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated(f"the authorization is no bearer token; {_HOW}")
        token = token.strip()
        if self._issued is not None and looks_signed(token):
            return self._issued.owner_of(token)
        digest = hashlib.sha256(token.encode()).digest()
        entry = self._known.get(self._key(digest))
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            raise Unauthenticated(f"the bearer token is unknown or was revoked; {_HOW}")
        return entry.name

    @property
    def _known(self) -> Mapping[bytes, _Entry]:
        return {} if self._watched is None else self._watched.look()[1]

    def _key(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def _table(self, file: NamedFile) -> Mapping[bytes, _Entry]:
        try:
            lines = file.read().decode().splitlines()
        except UnicodeDecodeError:
            raise file.unfit("is no text") from None
        table: dict[bytes, _Entry] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            entry = _entry(file, number, line.split())
            key = self._key(entry.digest)
            if key in table:
                raise file.unfit(f"has the token of line {number} twice")
            table[key] = entry
        return table


def _entry(file: NamedFile, number: int, words: list[str]) -> _Entry:
    """A line's token. Error messages never quote the line."""
    if len(words) != 2:
        raise file.unfit(f"line {number} is not a name and a token")
    name, token = words
    if not _NAME.fullmatch(name):
        raise file.unfit(f"line {number}: a name has letters, digits and _.@:/- only")
    if hashed := _HASHED.fullmatch(token):
        return _Entry(name, bytes.fromhex(hashed[1]))
    if len(token) < _SHORTEST or not _TOKEN.fullmatch(token):
        raise file.unfit(
            f"line {number}: a token has at least {_SHORTEST} letters, digits and -._~+/, or is"
            " sha256: with 64 hexadecimal digits"
        )
    return _Entry(name, hashlib.sha256(token.encode()).digest())


def read_token(file: NamedFile) -> str:
    """A caller's token, which must be alone in its file.

    Raises:
        StartupError: the file is missing or unreadable, or does not hold exactly one token.
    """
    try:
        token = file.read().decode().strip()
    except UnicodeDecodeError:
        raise file.unfit("is no text") from None
    if not _TOKEN.fullmatch(token):
        raise file.unfit("does not hold one bearer token and nothing else")
    return token
