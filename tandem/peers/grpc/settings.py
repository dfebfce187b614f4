"""How drafters, and other peers, are found, connected to and waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from tandem.settings import Names


class PeerSettings(BaseSettings):
    """What a process that asks drafters reads from its environment."""

    drafters: Names = Field(
        ("127.0.0.1:50051",),
        description="gRPC addresses of the drafters, comma separated; each address that"
        " dns:///NAME:PORT resolves to is a replica; empty decodes without drafts",
    )
    peer_ca: Path | None = Field(
        None,
        description="PEM file of the CA certificates that sign drafters' and targets'"
        " certificates; connections to them are then by TLS only",
    )
    peer_cert: Path | None = Field(
        None,
        description="PEM file of the certificate to show drafters and targets that ask for one",
    )
    peer_key: Path | None = Field(None, description="PEM file of the certificate's key")
    peer_plaintext: Literal["loopback", "allow"] = Field(
        "loopback",
        description="which drafters and targets may be reached without TLS: loopback permits"
        " those on loopback addresses and Unix sockets, allow permits all",
    )
    peer_connection_seconds: float = Field(
        300.0,
        gt=0,
        description="age at which a connection to a drafter or target is replaced, so that each"
        " side checks the other's certificate again; texts finish on the old"
        " connection. One that cannot be replaced takes no new texts from twice this"
        " age on",
    )
    drafter_tls_name: str = Field(
        "",
        description="name that each drafter's certificate must have; empty takes the host in"
        " DRAFTERS",
    )
    connect_seconds: float = Field(
        5.0, gt=0, description="how long a drafter or target may take to answer the handshake"
    )
    resolve_seconds: float = Field(
        3.0, gt=0, description="how often names of several replicas (dns:///) are looked up again"
    )
    open_seconds: float = Field(120.0, gt=0, description="how long a prefill may take")
    draft_seconds: float = Field(
        10.0,
        gt=0,
        description="how long a draft may take; then the text continues without that drafter",
    )
    stage_floor_seconds: float = Field(
        2.0,
        gt=0,
        description="shortest deadline of a stage. A stage's deadline is five times its longest"
        " recent time, at least this value and at most OPEN_SECONDS, DRAFT_SECONDS or"
        " VERIFY_SECONDS",
    )
