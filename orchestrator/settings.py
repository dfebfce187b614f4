"""The orchestrator's settings, from TANDEM_ORCHESTRATOR_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.peers.grpc.settings import PeerSettings
from tandem.settings import LONGEST_DRAFT, MOST_NODES, Address, Names, ServiceSettings


class OrchestratorSettings(PeerSettings, ServiceSettings):
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
        description="shorter limit while every slot is taken and others wait: the text whose"
        " client has read nothing for longest is ended. While the service drains, it is the limit"
        " of all",
    )
    connection_seconds: float = Field(
        0.0,
        ge=0,
        description="age of a connection at which its client is asked to reconnect, so that it"
        " finds new replicas and shows its certificate again; 0 never asks",
    )
    connection_grace_seconds: float = Field(
        600.0,
        gt=0,
        description="how long texts on the old connection may take to finish; set it longer than"
        " the longest text",
    )
    http_listen: Address | None = Field(
        None,
        description="host:port to serve OpenAI's HTTP API on; port 0 takes a free one; unset, there"
        " is none. PLAINTEXT and the TLS files apply as for LISTEN",
    )
    http_origins: Names = Field(
        (),
        description="origins whose pages may call by HTTP (CORS), comma separated, as"
        " https://chat.example.com; * permits all. Pages of the service itself always may",
    )
    trace_url: Annotated[str, Field(pattern=r"^https?://\S*\{request\}")] | None = Field(
        None,
        description="address of a text's trace, to which the page at / links; {request} in it is"
        " the text's id, as in http://jaeger:16686/search?service=orchestrator&tags="
        '{"tandem.request_id":"{request}"}. Unset, the page shows the command that reads it',
    )
    http_connections: int = Field(
        1024, ge=1, description="HTTP connections at once; one more is closed"
    )
    http_texts: int = Field(
        64, ge=1, description="texts that one HTTP call may ask for: its prompts times n"
    )
    model_names: Names = Field(
        (),
        description="names of the target for HTTP clients, comma separated: answers have the first,"
        " calls may name any; empty takes the name of the target's folder",
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="what becomes of fields of HTTP bodies that are not known: the call is refused,"
        " or they have no effect and the log names each once (the first 64)",
    )
    targets: Names = Field(
        ("127.0.0.1:50052",),
        min_length=1,
        description="gRPC addresses of the targets, comma separated, as for the drafters",
    )
    draft_by: Literal["auto", "drafters", "target"] = Field(
        "auto",
        description="which services draft: auto takes drafters if any match, else targets (their"
        " DRAFTS); drafters and target permit only one of the two",
    )
    ahead: Literal["auto", "off", "held", "sent"] = Field(
        "auto",
        description="whether drafters with AHEAD prepare drafts while targets verify: off (no),"
        " held (kept until they are asked for), sent (sent at once) or auto (what makes rounds"
        " fastest)",
    )
    route_by_prefix: bool = Field(
        True,
        description="send a text to the replicas that were sent its beginning before, if they are"
        " among the least loaded; false: to the least loaded",
    )
    cache_scope: Literal["caller", "all"] = Field(
        "caller",
        description="whose texts may share computed prefixes: those of one caller, by its name in"
        " a token or certificate or in CLIENT_HEADER, or those of all. Texts with different"
        " cache_salt never do",
    )
    token_file: Path | None = Field(
        None,
        description="file of bearer tokens; each call then needs one. A line has a name, and a"
        " token or sha256: with the token's digest; read again when it changes",
    )
    token_jwks_file: Path | None = Field(
        None,
        description="file with the JWK set of an issuer, whose JSON Web Tokens are then accepted"
        " beside the tokens of TOKEN_FILE; read again when it changes. Needs TOKEN_ISSUER and"
        " TOKEN_AUDIENCE",
    )
    token_jwks_url: str = Field(
        "",
        description="https address of the JWK set, instead of TOKEN_JWKS_FILE; fetched every 5"
        " minutes, and within 10 s after a token with an unknown key",
    )
    token_issuer: str = Field(
        "", description="value that the claim iss of a JSON Web Token must have"
    )
    token_audience: str = Field(
        "", description="value that the claim aud of a JSON Web Token must contain"
    )
    token_name_claim: str = Field(
        "sub",
        min_length=1,
        description="the claim of a JSON Web Token that names the client in logs and shares",
    )
    token_leeway_seconds: float = Field(
        60.0,
        ge=0,
        le=600,
        description="how far the clocks of the orchestrator and the issuer may be apart",
    )
    target_tls_name: str = Field(
        "",
        description="name that each target's certificate must have; empty takes the host in"
        " TARGETS",
    )
    verifier: str = Field("block", description="default verifier")
    allow_lossy: bool = Field(
        False,
        description="offer verifiers that change the law of the text, such as lossy_typical",
    )
    gamma: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] | Literal["auto"] = Field(
        "auto",
        description="default draft length; auto chooses it round by round by measured gain (a"
        " seed then repeats the distribution, but not the text)",
    )
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] | Literal["auto"] = Field(
        "auto",
        description="default number of drafted tokens a round, if drafters make trees",
    )
    max_new_tokens: int = Field(256, ge=1, description="default number of tokens to generate")
    max_requests: int = Field(
        256,
        ge=1,
        description="requests at once, including those that wait for a slot; one more is refused",
    )
    max_waiting: int = Field(
        64, ge=0, description="texts that may wait for a slot on a target; one more is refused"
    )
    queue_seconds: float = Field(
        5.0,
        ge=0,
        description="longest expected wait for a slot: a text that would wait longer is refused"
        " at once, with the time after which to try again. A text that all targets refuse for room"
        " asks them again for that long. A text with a seed and a gamma, and"
        " without a deadline, waits that long for its drafter",
    )
    max_client_requests: int = Field(
        0,
        ge=0,
        description="most texts of one client, running or waiting; 0 sets no limit. In either"
        " case the client with the fewest texts is served first",
    )
    client_header: str = Field(
        "",
        pattern=r"^[a-z0-9_.-]*$",
        description="metadata key that names a request's client if no token or certificate does;"
        " set it only behind a proxy that writes it. Requests without a name count as one client's",
    )
    max_encoding: int = Field(
        2, ge=1, description="prompts that are tokenized at once, each in a thread"
    )
    max_encoding_waiting: int = Field(
        64, ge=0, description="prompts that may wait to be tokenized; one more is refused"
    )
    reading_seconds: float = Field(
        300.0,
        gt=0,
        description="total time that a text may wait for its client; bounds how long a client that"
        " reads slowly keeps its slot",
    )
    verify_seconds: float = Field(60.0, gt=0, description="how long a verdict may take")
    failover_seconds: float = Field(
        5.0,
        ge=0,
        description="how long a text waits for a target after the last one was lost",
    )
    retry_share: float = Field(
        1.0,
        ge=0,
        description="texts that may move to another target within about ten seconds, as a share"
        " of the texts of that time, plus 16. With 1.0, all texts of a target that"
        " dies can move, and targets that all fail get at most twice the load",
    )

    trace_text: bool = Field(
        False, description="write the texts of drafted and emitted tokens into spans"
    )
