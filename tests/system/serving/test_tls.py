"""Real processes with mutual TLS on every hop, and what openssl finds at their ports."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tandem.client.connection import Connection
from tandem.failure import Failure
from tandem.rpc.endpoint import Endpoint
from tests.support.processes.authorities import Authority
from tests.support.processes.services import Trio, generation, trio

OPENSSL = shutil.which("openssl") or ""
needs_openssl = pytest.mark.skipif(not OPENSSL, reason="openssl is not installed")
SERVICES = ("drafter", "target", "orchestrator")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def secured(folder: Path, random_pair: tuple[Path, Path]) -> Iterator[Trio]:
    """All three, each with a certificate of its own and an ear for some only."""
    authority = Authority(folder)
    settings: dict[str, dict[str, str]] = {}
    for name in SERVICES:
        # Of RSA, so that ciphers are refused that only such a key could speak.
        key = rsa.generate_private_key(65_537, 2048) if name == "orchestrator" else None
        pair = authority.sign(name, key=key)
        settings[name] = {
            "TLS_CERT": str(pair.cert),
            "TLS_KEY": str(pair.key),
            "TLS_CLIENT_CA": str(authority.cert),
            "TLS_CLIENTS": "client" if name == "orchestrator" else "orchestrator",
        }
    own, client = settings["orchestrator"], authority.sign("client")
    own |= {"PEER_CA": str(authority.cert), "PEER_CERT": own["TLS_CERT"]}
    own |= {"PEER_KEY": own["TLS_KEY"], "DRAFTER_TLS_NAME": "drafter", "TARGET_TLS_NAME": "target"}
    for name, model in zip(("drafter", "target"), random_pair, strict=True):
        settings[name] |= {"MODEL": str(model), "ADMIN_LISTEN": "127.0.0.1:0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CA", str(authority.cert))
        patch.setenv("TANDEM_CERT", str(client.cert))
        patch.setenv("TANDEM_KEY", str(client.key))
        with trio(folder / "logs", **settings) as services:  # type: ignore[arg-type]
            yield services


def test_a_text_is_drafted_decided_and_delivered(secured: Trio) -> None:
    with Connection(secured.stack.endpoint("orchestrator")) as client:
        reply = client.complete(generation([1], max_new_tokens=16, gamma=4), 30)
    assert reply.summary.new_tokens == 16
    assert not reply.summary.drafter_lost
    assert reply.summary.drafted_tokens


def test_plaintext_is_answered_by_nobody(secured: Trio) -> None:
    for service in secured.processes:
        with pytest.raises(Failure, match="no orchestrator answers"), Connection(service.address):
            pass


def test_another_services_certificate_opens_no_text(secured: Trio, folder: Path) -> None:
    """A drafter that was taken over knows its own key only."""
    from tandem.rpc.security.files import NamedFile
    from tandem.rpc.security.tls import ClientTls

    drafters = ClientTls(
        NamedFile("CA", folder / "authority.pem"),
        NamedFile("CERT", folder / "drafter.crt"),
        NamedFile("KEY", folder / "drafter.key"),
    )
    with (
        Connection(Endpoint(secured.orchestrator.address, drafters)) as client,
        pytest.raises(Failure, match="no name that may call here"),
    ):
        client.complete(generation([1], max_new_tokens=4, gamma=0), 30)


def test_the_log_says_how_it_listens(secured: Trio, folder: Path) -> None:
    lines = (folder / "logs" / "target.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    (listening,) = [entry for entry in entries if entry["event"] == "listening"]
    assert listening["tls"] is True
    with grpc.insecure_channel(f"127.0.0.1:{listening['admin_port']}") as channel:
        grpc.channel_ready_future(channel).result(timeout=10)


def s_client(secured: Trio, folder: Path, *words: str, client: str = "client") -> tuple[int, str]:
    """What openssl says of a handshake with the orchestrator."""
    command = [OPENSSL, "s_client", "-connect", secured.orchestrator.address, "-brief"]
    command += ["-CAfile", str(folder / "authority.pem"), "-verify_return_error", "-alpn", "h2"]
    if client:
        pair = folder / f"{client}.crt", folder / f"{client}.key"
        command += ["-cert", str(pair[0]), "-key", str(pair[1])]
    done = subprocess.run([*command, *words], input=b"", capture_output=True, timeout=30)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


@needs_openssl
@pytest.mark.parametrize(
    ("words", "version"), [(["-tls1_2"], "TLSv1.2"), (["-tls1_3"], "TLSv1.3"), ([], "TLSv1.3")]
)
def test_versions_from_1_2_are_spoken(
    words: list[str], version: str, secured: Trio, folder: Path
) -> None:
    code, said = s_client(secured, folder, *words)
    assert code == 0, said
    assert f"Protocol version: {version}" in said
    (suite,) = [line for line in said.splitlines() if line.startswith("Ciphersuite: ")]
    assert "GCM" in suite or "CHACHA20" in suite


@needs_openssl
@pytest.mark.parametrize(
    "words",
    [
        ["-tls1", "-cipher", "ALL:@SECLEVEL=0"],
        ["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"],
        # No forward secrecy, no authenticated encryption, none at all.
        ["-tls1_2", "-cipher", "kRSA:@SECLEVEL=0"],
        ["-tls1_2", "-cipher", "ECDHE-RSA-AES128-SHA256:ECDHE-RSA-AES128-SHA:@SECLEVEL=0"],
        ["-tls1_2", "-cipher", "NULL:eNULL:aNULL:@SECLEVEL=0"],
    ],
)
def test_what_is_weak_is_not(words: list[str], secured: Trio, folder: Path) -> None:
    code, said = s_client(secured, folder, *words)
    assert code != 0, said
    assert "Ciphersuite" not in said
