"""Settings that every service has. One frozen, validated object, built in `__main__`."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tandem.errors import StartupError
from tandem.lengths import ANY_LENGTH, TOKENS_EACH
from tandem.speculation.tree import LONGEST_DRAFT as LONGEST_DRAFT  # bounds of settings too
from tandem.speculation.tree import MOST_NODES as MOST_NODES

_MAX_PORT = 65_535
# Variables that Kubernetes sets for a Service with a name like that of a prefix (`tandem-target`).
# One that ends in PORT has a protocol, unless it is a mistaken setting.
_LINK = re.compile(
    r"_SERVICE_HOST=|_SERVICE_PORT(_\w+)?=|_PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?=|_PORT=[a-z]+://"
)


def _with_real_port(address: str) -> str:
    # gRPC would take such a port modulo 65,536 and say nothing.
    if int(address.rpartition(":")[2]) > _MAX_PORT:
        raise ValueError(f"a port is at most {_MAX_PORT}")
    return address


def split(value: object) -> object:
    """A comma-separated text as its parts; anything else as it is."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


# Comma separated in the environment.
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)]
Address = Annotated[str, Field(pattern=r"^\S+:\d{1,5}$"), AfterValidator(_with_real_port)]


class ServiceSettings(BaseSettings):
    """What a service reads from its environment; each field's name follows the prefix.

    Attributes:
        others: what follows the prefix in variables that something else of the service reads.
    """

    others: ClassVar[tuple[str, ...]] = ()

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    listen: Address = Field(
        "127.0.0.1:0", description="host:port to serve on; port 0 takes a free one"
    )
    drain_seconds: float = Field(
        30.0, ge=0, description="how long running requests may take to finish after SIGTERM"
    )
    idle_seconds: float = Field(
        150.0,
        gt=0,
        description="how long a sequence may send no request, or a caller leave answers unread,"
        " before it is ended",
    )
    # Longer than a draft may take by default (10 s), for which a target hears nothing of a text.
    full_idle_seconds: float = Field(
        15.0,
        gt=0,
        description="shorter limit while every slot is taken and others wait: the sequence that"
        " has been silent longest is ended",
    )
    max_message_mib: int = Field(
        4,
        ge=1,
        le=256,
        description="largest request to accept, in MiB; 4 MiB hold a prompt of a million ids, or"
        " a draft of 16 rows of 40,000 tokens",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log line to write"
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto is console on a terminal and JSON elsewhere"
    )
    trace_file: Path | None = Field(
        None, description="write spans to this file as OTLP-JSON lines, regardless of OTEL_*"
    )
    metrics_listen: Address | None = Field(
        None,
        description="host:port to serve metrics on for Prometheus; port 0 takes a free one;"
        " unset, there is no endpoint",
    )
    # Orchestrators leave theirs earlier by themselves (PEER_CONNECTION_SECONDS).
    connection_seconds: float = Field(
        3600.0,
        ge=0,
        description="age of a connection at which its caller is asked to reconnect, and so to"
        " show its certificate again; 0 never asks",
    )
    connection_grace_seconds: float = Field(
        3600.0,
        gt=0,
        description="how long texts on the old connection may take to finish; set it longer than"
        " the longest text",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file of the server's certificate and its chain; read again when it"
        " changes, as are all TLS files",
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of the CA certificates that sign clients' certificates; a client"
        " without such a certificate gets no connection",
    )
    tls_clients: Names = Field(
        (),
        description="names that clients' certificates may have (subject alternative names, else"
        " the common name), comma separated; empty permits every name",
    )
    plaintext: Literal["loopback", "allow"] = Field(
        "loopback",
        description="where the service may listen without TLS: loopback permits loopback"
        " addresses only, allow permits every address",
    )
    admin_listen: Address | None = Field(
        None,
        description="host:port of a second server, in plaintext, with health checks, reflection and"
        " channelz, ForgetPrefixes of a drafter or target, and LearningService of a drafter: for"
        " probes that have no certificate, and for operators; port 0 takes a free one",
    )


class ModelSettings(ServiceSettings):
    """What a service with a model reads besides."""

    model: str = Field(description="directory or hub id of the checkpoint")
    device: str = Field("cpu", description='device of the model ("cpu", "cuda", "cuda:1")')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto is float32 on a CPU and the checkpoint's elsewhere"
    )
    engine: Literal["auto", "torch", "openvino"] = Field(
        "auto",
        description="back end of the model on a CPU: auto begins with torch and changes to"
        " OpenVINO's runtime if that gives the same logits and is faster; the next"
        " start begins with the faster one",
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of the model; 0 takes one, plus one for every 4 million"
        " parameters, at most one a core",
    )
    zone: str = Field(
        "",
        max_length=128,
        description="zone of the service; an orchestrator prefers drafters in their target's zone",
    )
    max_sequences: int = Field(64, ge=1, description="sequences open at once")
    max_length: int = Field(
        0,
        ge=0,
        description="tokens that a sequence may hold, prompt included; less if the model can hold"
        " less. 0 is what the model and the KV cache can hold",
    )
    cache_tokens: int = Field(
        0,
        ge=0,
        description="tokens that the KV cache holds for all sequences together. 0 takes what fits:"
        " on a GPU all that weights and the largest pass leave (see MEMORY_SHARE); on a CPU half of"
        " the free memory, at most 4,096 tokens (MAX_LENGTH, if less) for each of MAX_SEQUENCES, or"
        " one of the longest if that is more",
    )
    memory_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of a GPU's memory for this service, weights included; less where others"
        " have taken it. On a CPU: of the half that CACHE_TOKENS=0 may take. `tandem up` divides a"
        " device among its services",
    )
    overcommit: float = Field(
        1.0,
        ge=1,
        le=100,
        description="how many times the KV cache is promised to sequences. With 1 each holds room"
        " for all of its new tokens, and nothing can run out. With more, sequences take room as"
        " they grow, so that more texts run at once where most end early; where no room is left,"
        " the youngest of those that can wait is given back, and goes on when there is room",
    )
    prefix_cache: bool = Field(
        True,
        description="whether prompts that begin alike are computed once: what sequences have"
        " computed is kept in the KV cache until its room is needed",
    )
    max_waiting: int = Field(
        64, ge=0, description="sequences that may wait for a slot; one more is refused at once"
    )
    admission_seconds: float = Field(
        1.0, ge=0, description="how long a sequence waits for a slot before it is refused"
    )
    max_empty_streams: int = Field(
        64,
        ge=1,
        description="streams that may be without an open sequence; one more ends the oldest of"
        " them, or is refused while all are younger than a second",
    )
    empty_seconds: float = Field(
        10.0, gt=0, description="how long a stream may have no open sequence before it is ended"
    )
    token_budget: int = Field(
        512, ge=1, description="most new tokens of running sequences in one forward pass"
    )
    prefill_chunk: int = Field(
        0,
        ge=0,
        description="prompt tokens in one forward pass, on average; running sequences wait for"
        " them. 0 takes as many as PREFILL_SHARE allows (by the pass times measured at the start),"
        " at most TOKEN_BUDGET. A pass takes more while no sequence is running, or for short"
        " prompts that arrive together",
    )
    prefill_share: float = Field(
        0.0,
        ge=0,
        le=100,
        description="with 0.5, prompts may make a forward pass that they share with running"
        " sequences take 1.5 times as long; used if PREFILL_CHUNK is 0. Many short prompts that"
        " wait take more: their part of the time by number. 0 is 0.5 on a GPU, and 0.3 on a CPU,"
        " whose cores other processes use too",
    )
    graph_rows: int = Field(
        512,
        ge=0,
        le=4096,
        description="new tokens of the largest forward pass that is captured as a CUDA graph;"
        " each captured size takes memory and start-up time; 0 captures none",
    )
    gather: float = Field(
        1.0,
        ge=0,
        description="how long a forward pass may wait for sequences that are expected soon, as a"
        " share of the last pass's time; 0 does not wait",
    )
    max_gamma: int = Field(16, ge=1, le=LONGEST_DRAFT, description="longest draft of one round")

    @field_validator("max_length")
    @classmethod
    def _holds_a_token(cls, length: int) -> int:
        """A prompt, and something after it."""
        if length == 1:
            raise ValueError("must be 0, or 2 at least")
        return length

    @property
    def longest(self) -> int:
        """MAX_LENGTH as a bound: beyond any model's where it is 0."""
        return self.max_length or ANY_LENGTH

    def cache_for(self, room: int) -> int:
        """Tokens of a KV cache for all sequences, if CACHE_TOKENS does not say it, and if they fit
        into memory.

        Args:
            room: positions of each sequence beside its text.
        """
        return self.max_sequences * (min(self.longest, TOKENS_EACH) + room)


S = TypeVar("S", bound=BaseSettings)

KIB, MIB = 1 << 10, 1 << 20


def variable_of(kind: type[BaseSettings], name: str) -> str:
    """The environment's name of a setting."""
    return f"{kind.model_config.get('env_prefix', '')}{name.upper()}"


def read_settings(kind: type[S], *, whole: bool = True) -> S:
    """Read a service's settings from the environment.

    Args:
        kind: of the settings.
        whole: whether all variables with its prefix are its own; a part of a service's settings has
            others beside it.

    Raises:
        StartupError: which variable is wrong, and how; or is unknown, and which one is like it.
    """
    if whole:
        _require_known(kind)
    try:
        return kind(**{})
    except ValidationError as error:
        prefix = str(kind.model_config.get("env_prefix", ""))
        faults = "; ".join(
            f"{prefix}{'_'.join(str(part) for part in fault['loc']).upper()}: {fault['msg']}"
            for fault in error.errors()
        )
        raise StartupError(f"bad settings: {faults}") from None


def _require_known(kind: type[BaseSettings]) -> None:
    """Refuse variables with a service's prefix that nothing would read.

    Raises:
        StartupError: one of them, and the setting that is like it.
    """
    prefix = str(kind.model_config.get("env_prefix", ""))
    known, others = {name.upper() for name in kind.model_fields}, getattr(kind, "others", ())
    for variable, value in sorted(os.environ.items()):
        if not variable.upper().startswith(prefix):  # as settings are read
            continue
        name = variable.upper().removeprefix(prefix)
        if name in known or name.startswith(others) or _LINK.search(f"_{name}={value}"):
            continue
        like = get_close_matches(name, known, 1)
        hint = f"did you mean {prefix}{like[0]}?" if like else "docs/settings.md lists all"
        raise StartupError(f"bad settings: {variable}: there is no such setting; {hint}")
