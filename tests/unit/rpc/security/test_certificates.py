"""Files of TLS and of tokens: the error for an unfit file names setting and file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from drafter_svc.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from tandem.errors import StartupError, Unauthenticated
from tandem.peers.grpc.clients import dialers_of
from tandem.rpc.security import certificates
from tandem.rpc.security.certificates import read_authorities, read_pair
from tandem.rpc.security.files import NamedFile, WatchedFiles
from tandem.rpc.security.settings import tls_of
from tandem.rpc.security.tokens import BearerTokens, read_token
from tandem.settings import ServiceSettings, read_settings
from target_svc.settings import TargetSettings
from tests.support.processes.authorities import Authority, Pair
from tests.support.processes.refusals import refusal

SERVICES = {"DRAFTER": "drafter_svc", "TARGET": "target_svc", "ORCHESTRATOR": "orchestrator"}
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def pair_of(pair: Pair) -> certificates.KeyPair:
    return read_pair(NamedFile("CERT", pair.cert), NamedFile("KEY", pair.key))


def test_a_good_pair_is_taken_as_it_is(authority: Authority) -> None:
    pair = authority.sign("target")
    taken = pair_of(pair)
    assert (taken.chain, taken.key) == (pair.cert.read_bytes(), pair.key.read_bytes())
    assert read_authorities(NamedFile("CA", authority.cert)) == authority.cert.read_bytes()


def missing(pair: Pair) -> None:
    pair.cert.unlink()


def a_folder(pair: Pair) -> None:
    pair.key.unlink()
    pair.key.mkdir()


def no_pem(pair: Pair) -> None:
    pair.cert.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")


def no_key(pair: Pair) -> None:
    pair.key.write_bytes(pair.cert.read_bytes())


def another_key(pair: Pair) -> None:
    write_key(pair, serialization.NoEncryption())


def locked_key(pair: Pair) -> None:
    write_key(pair, serialization.BestAvailableEncryption(b"secret"))


def endless(pair: Pair) -> None:
    pair.cert.write_bytes(b"x" * ((1 << 20) + 1))


def write_key(pair: Pair, encryption: serialization.KeySerializationEncryption) -> None:
    kind = serialization.PrivateFormat.PKCS8
    key = ec.generate_private_key(ec.SECP256R1())
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, encryption))


@pytest.mark.parametrize(
    ("spoil", "named", "fault"),
    [
        (missing, "cert", "cannot be read: No such file"),
        (a_folder, "key", "cannot be read: Is a directory"),
        (no_pem, "cert", "holds no PEM certificate"),
        (no_key, "key", "holds no PEM private key"),
        (another_key, "key", "does not fit the certificate in"),
        (locked_key, "key", "has a passphrase"),
        (endless, "cert", "is larger than 1 MiB"),
    ],
)
def test_an_unfit_file_is_named(
    spoil: Callable[[Pair], None], named: str, fault: str, authority: Authority
) -> None:
    pair = authority.sign("target", file=spoil.__name__)
    spoil(pair)
    path = getattr(pair, named)
    with pytest.raises(StartupError, match=rf"^{named.upper()}: {path} {fault}"):
        pair_of(pair)


def test_a_certificate_out_of_force_is_named(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match=r"CERT: \S+ expired at 20"):
        pair_of(authority.sign("expired", days=-1))
    pair = authority.sign("early")
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", Past)
        with pytest.raises(StartupError, match="is not valid before 20"):
            pair_of(pair)
        with pytest.raises(StartupError, match="is not valid before 20"):
            read_authorities(NamedFile("CA", authority.cert))


class Past:
    """A clock that is years behind."""

    @staticmethod
    def now(zone: object) -> datetime:
        return datetime(2020, 1, 1, tzinfo=UTC)


def test_a_key_that_grpc_refuses_is_refused_first(authority: Authority) -> None:
    """Its handshakes would fail without a word; see `tests/system/serving/test_tls.py`."""
    pair = authority.sign("edwards", key=ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(StartupError, match=r"KEY: .* use ECDSA"):
        pair_of(pair)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_ends_with_one_line_and_code_2(
    service: str, authority: Authority, tmp_path: Path
) -> None:
    """Before it loads a model."""
    pair = authority.sign(service)
    environment = {
        f"TANDEM_{service}_TLS_CERT": str(pair.cert),
        f"TANDEM_{service}_TLS_KEY": str(tmp_path / "none.key"),
    }
    if service != "ORCHESTRATOR":
        environment[f"TANDEM_{service}_MODEL"] = str(tmp_path / "no model")
    line = refusal(SERVICES[service], environment)
    assert f"TANDEM_{service}_TLS_KEY: {tmp_path / 'none.key'} cannot be read" in line


def test_the_orchestrator_names_the_files_for_its_peers_and_callers(
    authority: Authority, tmp_path: Path
) -> None:
    expired = authority.sign("expired", days=-1)
    empty = tmp_path / "tokens"
    empty.write_text("# none yet\n\n")
    prefix = "TANDEM_ORCHESTRATOR_"
    peers = {
        f"{prefix}PEER_CA": str(authority.cert),
        f"{prefix}PEER_CERT": str(expired.cert),
        f"{prefix}PEER_KEY": str(expired.key),
    }
    assert f"{prefix}PEER_CERT: {expired.cert} expired" in refusal("orchestrator", peers)
    tokens = {f"{prefix}TOKEN_FILE": str(empty)}
    assert f"{prefix}TOKEN_FILE: {empty} holds no token" in refusal("orchestrator", tokens)


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (TargetSettings, {"TLS_CERT": "x"}, "TARGET_TLS_CERT needs TANDEM_TARGET_TLS_KEY too"),
        (TargetSettings, {"TLS_KEY": "x"}, "TARGET_TLS_KEY needs TANDEM_TARGET_TLS_CERT too"),
        (TargetSettings, {"TLS_CLIENT_CA": "x"}, "TLS_CLIENT_CA needs TANDEM_TARGET_TLS_CERT"),
        (DrafterSettings, {"TLS_CLIENTS": "x"}, "TLS_CLIENTS needs TANDEM_DRAFTER_TLS_CLIENT_CA"),
        (
            DrafterSettings,
            {"TLS_CERT": "x", "TLS_KEY": "x", "TLS_CLIENTS": "x"},
            "TLS_CLIENTS needs TANDEM_DRAFTER_TLS_CLIENT_CA",
        ),
        (TargetSettings, {"LISTEN": "0.0.0.0:0"}, "TANDEM_TARGET_LISTEN: 0.0.0.0:0 is beyond"),
        (OrchestratorSettings, {"PEER_KEY": "x"}, "PEER_KEY needs TANDEM_ORCHESTRATOR_PEER_CERT"),
        (
            OrchestratorSettings,
            {"PEER_CERT": "x", "PEER_KEY": "x"},
            "PEER_CERT needs TANDEM_ORCHESTRATOR_PEER_CA",
        ),
        (OrchestratorSettings, {"TARGET_TLS_NAME": "x"}, "TARGET_TLS_NAME needs TANDEM_ORCHES"),
        (OrchestratorSettings, {"TARGETS": "dns:///far:1"}, "TARGETS: dns:///far:1 is beyond"),
        (OrchestratorSettings, {"DRAFTERS": "127.0.0.1:1,10.0.0.1:1"}, "DRAFTERS: 10.0.0.1:1 is"),
    ],
)
def test_half_a_set_up_is_refused(
    kind: type[ServiceSettings],
    settings: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"{kind.model_config['env_prefix']}{name}", value)
    chosen = read_settings(kind)
    check: Callable[..., object] = tls_of
    roles: tuple[str, ...] = ()
    if isinstance(chosen, OrchestratorSettings):
        check, roles = dialers_of, ("drafter", "target")
    with pytest.raises(StartupError, match=sentence):
        check(chosen, *roles)


class TestTokens:
    def tokens(self, folder: Path, text: str) -> BearerTokens:
        file = folder / "tokens"
        file.write_text(text)
        return BearerTokens(NamedFile("TOKENS", file))

    def test_plain_and_hashed_ones_are_known(self, tmp_path: Path) -> None:
        digest = hashlib.sha256(b"another-good-token").hexdigest()
        tokens = self.tokens(tmp_path, f"# team\nann {TOKEN}\n\n bob  sha256:{digest} \n")
        assert tokens.owner_of([f"Bearer {TOKEN}"]) == "ann"
        assert tokens.owner_of(["bearer  another-good-token"]) == "bob"

    @pytest.mark.parametrize(
        "sent",
        [
            [],
            [""],
            [TOKEN],
            ["Bearer "],
            [f"Basic {TOKEN}"],
            [f"Bearer {TOKEN}x"],
            [f"Bearer {TOKEN[:-1]}"],
            [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
            [f"Bearer sha256:{hashlib.sha256(TOKEN.encode()).hexdigest()}"],
            ["Bearer ☃"],
        ],
    )
    def test_others_are_told_what_to_send(self, sent: list[str], tmp_path: Path) -> None:
        tokens = self.tokens(tmp_path, f"ann {TOKEN}\n")
        with pytest.raises(Unauthenticated, match="authorization: Bearer TOKEN") as refused:
            tokens.owner_of(sent)
        assert TOKEN[:-1] not in str(refused.value)

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("", "holds no token"),
            ("ann", "line 1 is not a name and a token"),
            (f"ann {TOKEN} more", "line 1 is not a name and a token"),
            (f"\nann {TOKEN[:-1]}", "line 2: a token has at least 16"),
            ("ann sha256:12", "line 1: a token has at least 16"),
            (f"a|n {TOKEN}", "line 1: a name has"),
            (f"ann {TOKEN}\nbob {TOKEN}", "has the token of line 2 twice"),
        ],
    )
    def test_a_bad_file_is_told_without_its_secrets(
        self, text: str, fault: str, tmp_path: Path
    ) -> None:
        with pytest.raises(StartupError, match=f"TOKENS: .*{fault}") as refused:
            self.tokens(tmp_path, text)
        assert TOKEN[:-1] not in str(refused.value)

    def test_a_change_is_in_force_at_once(self, tmp_path: Path) -> None:
        tokens = self.tokens(tmp_path, f"ann {TOKEN}\n")
        file = tmp_path / "tokens"
        file.write_text(f"ann {TOKEN}\nbob {TOKEN[::-1]}\n")
        assert tokens.owner_of([f"Bearer {TOKEN[::-1]}"]) == "bob"
        file.write_text(f"bob {TOKEN[::-1]}\n")
        with pytest.raises(Unauthenticated, match="revoked"):
            tokens.owner_of([f"Bearer {TOKEN}"])
        file.write_text("bob short\n")
        assert tokens.owner_of([f"Bearer {TOKEN[::-1]}"]) == "bob", "what is unfit changes nothing"
        file.write_text("")
        with pytest.raises(Unauthenticated, match="revoked"):
            tokens.owner_of([f"Bearer {TOKEN[::-1]}"])

    def test_a_callers_own_is_alone_in_its_file(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text(f"{TOKEN}\n")
        assert read_token(NamedFile("--token-file", file)) == TOKEN
        file.write_text(f"ann {TOKEN}\n")
        with pytest.raises(StartupError, match=r"--token-file: .* one bearer token"):
            read_token(NamedFile("--token-file", file))


def test_files_are_followed_behind_links(tmp_path: Path) -> None:
    """As Kubernetes mounts a secret: a link to a folder changes, and nothing else."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "now").symlink_to("first")
    path = tmp_path / "now" / "file"
    watched = WatchedFiles([path], path.read_text)
    assert watched.look() == (0, "first")
    (tmp_path / "next").symlink_to("second")
    (tmp_path / "next").rename(tmp_path / "now")
    assert watched.look() == (1, "second")
    assert watched.look() == (1, "second")
