"""The orchestrator's settings, from TANDEM_ORCHESTRATOR_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import LONGEST_DRAFT, MOST_NODES, Address, Names, ServiceSettings


class OrchestratorSettings(ServiceSettings):
    """Everything that can be set about an orchestrator."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_ORCHESTRATOR_")

    listen: Address = Field("127.0.0.1:50050", description="host:port to serve on")
    # Less than the services' own: they hear nothing either while a client stands still, and what
    # ends the text should be the client's silence, not a lost target.
    idle_seconds: float = Field(
        30.0, gt=0, description="how long a client may read nothing before its text is ended"
    )
    # Shorter than for a target's sequences: these wait for this text to be read.
    full_idle_seconds: float = Field(
        10.0,
        gt=0,
        description="the same where every place is taken and others wait for one: the text whose"
        " client has read nothing for the longest is ended",
    )
    connection_seconds: float = Field(
        0.0,
        ge=0,
        description="age at which a client is asked for another connection, so that it finds"
        " replicas that came later, and shows its certificate again; 0 never asks",
    )
    connection_grace_seconds: float = Field(
        600.0,
        gt=0,
        description="how long its texts may go on on the old one: longer than the longest text",
    )
    drafters: Names = Field(
        ("127.0.0.1:50051",),
        description="gRPC targets of the drafters, comma separated; each address behind a"
        " dns:///NAME:PORT is a replica; empty decodes plainly",
    )
    targets: Names = Field(
        ("127.0.0.1:50052",),
        min_length=1,
        description="gRPC targets of the targets, comma separated, as for the drafters",
    )
    token_file: Path | None = Field(
        None,
        description="file of bearer tokens, of which each call then needs one: lines of a name and"
        " a token, or sha256: and its digest; read again when it changes",
    )
    peer_ca: Path | None = Field(
        None,
        description="PEM file of who signs the drafters' and targets' certificates; they are then"
        " spoken to by TLS only",
    )
    peer_cert: Path | None = Field(
        None, description="PEM file of the certificate to show them, where they ask for one"
    )
    peer_key: Path | None = Field(None, description="PEM file of its key")
    peer_plaintext: Literal["loopback", "allow"] = Field(
        "loopback",
        description="which of them to speak to without TLS: loopback is those of this machine,"
        " allow is all",
    )
    peer_connection_seconds: float = Field(
        300.0,
        gt=0,
        description="age at which a connection to one of them is left for another, so that each"
        " side looks at the other's certificate again; texts end where they are, and one that"
        " cannot be replaced is given up at twice the age",
    )
    drafter_tls_name: str = Field(
        "",
        description="name that every drafter's certificate has to have; empty is the host in"
        " DRAFTERS",
    )
    target_tls_name: str = Field(
        "", description="name that every target's certificate has to have, as for drafters"
    )
    verifier: str = Field("block", description="verifier of requests that name none")
    gamma: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] | Literal["auto"] = Field(
        "auto",
        description="draft length of requests that name none; auto follows what it earns, round by"
        " round (a seed then repeats the law, not the text)",
    )
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] | Literal["auto"] = Field(
        "auto",
        description="tokens a round, of requests that name none, where a drafter makes trees",
    )
    max_new_tokens: int = Field(
        256, ge=1, description="tokens to generate for requests that name no limit"
    )
    max_requests: int = Field(256, ge=1, description="texts generated at once; one more is refused")
    max_waiting: int = Field(
        64, ge=0, description="texts that may wait for a place on a target; one more is refused"
    )
    queue_seconds: float = Field(
        5.0,
        ge=0,
        description="how long a text may be expected to wait for it: one that would wait longer is"
        " refused at once, and told when to come again",
    )
    max_client_requests: int = Field(
        0,
        ge=0,
        description="texts of one client that are made or wait, from when they come; 0 leaves it to"
        " fair shares, by which the client with the fewest texts is served first",
    )
    client_header: str = Field(
        "",
        pattern=r"^[a-z0-9_.-]*$",
        description="metadata that names a request's client where no token or certificate does, and"
        " a proxy sets it that clients cannot pass by; without it all are one client",
    )
    max_encoding: int = Field(
        2, ge=1, description="prompts turned into tokens at once, each in a thread"
    )
    max_encoding_waiting: int = Field(
        64, ge=0, description="prompts that may wait for that; one more is refused"
    )
    reading_seconds: float = Field(
        300.0,
        gt=0,
        description="how long a text may wait for its client in all: one that reads a little now"
        " and then would hold its place for ever",
    )
    connect_seconds: float = Field(
        5.0, gt=0, description="how long a peer may take to say what it serves"
    )
    resolve_seconds: float = Field(
        3.0, gt=0, description="how often names of several replicas (dns:///) are looked up again"
    )
    open_seconds: float = Field(120.0, gt=0, description="how long a prefill may take")
    draft_seconds: float = Field(
        10.0, gt=0, description="how long a draft may take before the text goes on without"
    )
    verify_seconds: float = Field(60.0, gt=0, description="how long a verdict may take")
    stage_floor_seconds: float = Field(
        2.0,
        gt=0,
        description="shortest deadline of a stage: each gets five times what the longest of late"
        " has taken, at least this and at most the bounds above",
    )
    failover_seconds: float = Field(
        5.0,
        ge=0,
        description="how long a text waits for a target, where none serves that did a moment ago",
    )
    retry_share: float = Field(
        1.0,
        ge=0,
        description="texts that may be moved to another target, as a share of those of the last ten"
        " seconds, and 16 more: one target of two that dies moves half of them, and targets that"
        " all fail are not asked for more than twice the load",
    )

    trace_text: bool = Field(
        False, description="write the texts of drafted and emitted tokens into spans"
    )
