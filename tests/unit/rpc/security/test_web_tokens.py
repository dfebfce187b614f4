"""JSON Web Tokens: who is let in, by which keys, and what is said to all others."""

from __future__ import annotations

import base64
import http.client
import io
import json
import queue
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from orchestrator.front.tokens import tokens_of
from orchestrator.settings import OrchestratorSettings
from tandem.errors import StartupError, Unauthenticated, Unavailable
from tandem.rpc.security import web_tokens
from tandem.rpc.security.tokens import BearerTokens
from tandem.rpc.security.web_tokens import UrlKeys, keys_in

EC, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
RSA = rsa.generate_private_key(65537, 2048)
NOW = int(time.time())
CLAIMS = {"iss": "https://id.example", "aud": "tandem", "sub": "ann", "exp": NOW + 10**6}
FILE_TOKEN = "a-token-of-the-file"
# A header of many lists, after the {" that a token begins with.
DEEP = base64.urlsafe_b64encode(b'{"a":' + b"[" * 5000).decode().rstrip("=")[3:]


def jwk(key: Any, key_id: str) -> dict[str, Any]:
    kind: Any = jwt.algorithms.ECAlgorithm if key is not RSA else jwt.algorithms.RSAAlgorithm
    algorithm = "RS256" if key is RSA else "ES256"
    public = json.loads(kind.to_jwk(key.public_key()))
    return {**public, "kid": key_id, "alg": algorithm, "use": "sig"}


def key_set(*keys: Mapping[str, Any]) -> str:
    return json.dumps({"keys": keys})


def signed(key: Any = EC, key_id: str | None = "one", alg: str = "ES256", **changes: Any) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode(claims, key, algorithm=alg, headers=headers)


def settings(folder: Path, **changes: Any) -> OrchestratorSettings:
    chosen = {"token_issuer": CLAIMS["iss"], "token_audience": CLAIMS["aud"], **changes}
    return OrchestratorSettings(**chosen)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_text(key_set(jwk(EC, "one"), jwk(RSA, "two")))
    return path


@pytest.fixture
def tokens(keys: Path, tmp_path: Path) -> BearerTokens:
    (tmp_path / "tokens").write_text(f"bob {FILE_TOKEN}\n")
    found = tokens_of(settings(tmp_path, token_jwks_file=keys, token_file=tmp_path / "tokens"))
    assert found is not None
    return found


def owner(tokens: BearerTokens, token: str) -> str:
    return tokens.owner_of([f"Bearer {token}"])


def test_who_has_a_signed_token_is_known_by_its_subject(tokens: BearerTokens) -> None:
    assert owner(tokens, signed()) == "ann"
    assert owner(tokens, signed(RSA, "two", "RS256", aud=["other", "tandem"])) == "ann"
    assert owner(tokens, FILE_TOKEN) == "bob", "a token of the file is one as before"


@pytest.mark.parametrize(
    ("token", "sentence"),
    [
        (signed(exp=NOW - 120), "has expired; get another one"),
        (signed(exp=None), "is not valid here"),
        (signed(nbf=NOW + 10**6), "is not valid here"),
        (signed(iss="https://elsewhere.example"), "is not valid here"),
        (signed(aud="another"), "is not valid here"),
        (signed(sub=None), "is not valid here"),
        (signed(sub="two words"), "sub is no name of a caller"),
        (signed(sub="x" * 129), "sub is no name of a caller"),
        (signed(OTHER), "is not valid here"),
        (signed(key_id="three"), "is not valid here"),
        (signed(key_id=None), "is not valid here"),
        (signed(RSA, "one", "RS256"), "is not valid here"),
        (signed(None, "one", "none"), "is not valid here"),
        (signed("a secret that both sides would have to share", "one", "HS256"), "not valid here"),
        (signed()[:-4] + "AAAA", "is not valid here"),
        ("eyJ.e30.x", "is not valid here"),
        (f"eyJ{DEEP}.e30.AAAA", "is not valid here"),
        ("eyJhbGciOiJFUzI1NiJ9..", "is not valid here"),
        (signed(more="x" * 9000), "is not valid here"),
    ],
)
def test_nobody_else_is_let_in_and_nothing_is_repeated(
    token: str, sentence: str, tokens: BearerTokens
) -> None:
    with pytest.raises(Unauthenticated, match=sentence) as refused:
        owner(tokens, token)
    assert not any(part in str(refused.value) for part in token.split(".") if len(part) > 3)
    assert "\n" not in str(refused.value)


def test_clocks_may_differ(tmp_path: Path, keys: Path) -> None:
    found = tokens_of(settings(tmp_path, token_jwks_file=keys, token_leeway_seconds=600))
    assert found is not None
    assert owner(found, signed(exp=int(time.time()) - 30)) == "ann"


def test_a_public_key_is_no_shared_secret(tmp_path: Path, keys: Path) -> None:
    """The old attack: signed by HMAC with what everybody knows."""
    public = json.loads(keys.read_text())["keys"][1]["n"]
    found = tokens_of(settings(tmp_path, token_jwks_file=keys))
    assert found is not None
    with pytest.raises(Unauthenticated):
        owner(found, signed(public, "two", "HS256"))


def test_keys_are_replaced_with_their_file(tokens: BearerTokens, keys: Path) -> None:
    keys.write_text(key_set(jwk(OTHER, "next")))
    assert owner(tokens, signed(OTHER, "next")) == "ann"
    assert owner(tokens, signed(OTHER, None)) == "ann", "of one key its id need not be said"
    with pytest.raises(Unauthenticated):
        owner(tokens, signed())
    keys.write_text("{}")
    assert owner(tokens, signed(OTHER, "next")) == "ann", "what is unfit changes nothing"


def test_another_claim_may_name_the_caller(tmp_path: Path, keys: Path) -> None:
    chosen = settings(tmp_path, token_jwks_file=keys, token_name_claim="email")
    found = tokens_of(chosen)
    assert found is not None
    assert owner(found, signed(email="ann@example.org")) == "ann@example.org"
    with pytest.raises(Unauthenticated, match="not valid"):
        owner(found, signed())


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("[]", "is no JWK set"),
        ("{", "is no JWK set"),
        ('{"keys": 1}', "is no JWK set"),
        ('{"keys": []}', "no public key that signs"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}, 7]}', "no public key"),
        (key_set({**jwk(EC, "one"), "use": "enc"}), "no public key"),
    ],
)
def test_a_set_without_usable_keys_ends_the_start(
    document: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(document)
    with pytest.raises(StartupError, match=sentence) as refused:
        tokens_of(settings(tmp_path, token_jwks_file=path))
    assert str(refused.value).startswith(f"TANDEM_ORCHESTRATOR_TOKEN_JWKS_FILE: {path}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "TOKEN_ISSUER needs TANDEM_ORCHESTRATOR_TOKEN_JWKS_FILE or"),
        ({"token_jwks_url": "https://id.example/jwks", "token_audience": ""}, "must be set: else"),
        ({"token_jwks_url": "http://id.example/jwks"}, "must begin with https"),
        ({"token_jwks_url": "http://localhost:80@id.example/jwks"}, "must begin with https"),
        ({"token_jwks_url": "file:///etc/jwks"}, "must begin with https"),
        ({"token_jwks_url": "https://a", "token_jwks_file": Path("b")}, "not both"),
    ],
)
def test_settings_that_belong_together(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=sentence):
        tokens_of(settings(tmp_path, **changes))


def test_keys_of_an_address_are_fetched_again_when_one_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And an issuer that does not answer is asked again, while the old keys stay in force."""
    monkeypatch.setattr(web_tokens, "_AGAIN_SECONDS", 0.0)
    answers: queue.Queue[bytes | Exception] = queue.Queue()

    def fetch(url: str) -> bytes:
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = UrlKeys("URL", "https://id.example/jwks", fetch)
    with pytest.raises(Unavailable, match="not known yet"):
        found("one")
    broken = b"", b"[" * 10**5, OSError("away"), http.client.IncompleteRead(b"")
    for answer in (*broken, key_set(jwk(EC, "one")).encode()):
        answers.put(answer)
    while found._keys is None:
        time.sleep(0.001)
    seen = [set(found("one"))]
    for answer in (OSError("away"), key_set(jwk(OTHER, "next")).encode()):
        answers.put(answer)
    while "next" not in seen[-1]:
        seen.append(set(found("next")))  # which asks for the keys again
        time.sleep(0.001)
    assert all(keys == {"one"} for keys in seen[:-1])


def test_an_address_may_not_lead_to_one_that_anybody_could_answer_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reply(io.BytesIO):
        url = "http://elsewhere.example/jwks"

    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Reply(b"{}"))
    with pytest.raises(ValueError, match="leads to http://elsewhere"):
        web_tokens._fetched("https://id.example/jwks")


def test_a_set_keeps_what_it_can_use() -> None:
    found = keys_in(key_set({"kty": "future"}, jwk(EC, "one")).encode())
    assert set(found) == {"one"}
