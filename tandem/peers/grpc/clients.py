"""Client side of the drafter and the target: one object a peer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import Exhausted, StartupError
from tandem.peers.grpc.calls import CountingOn
from tandem.peers.grpc.connection import Peer
from tandem.peers.grpc.deadlines import Waits
from tandem.peers.grpc.draft_call import DRAFT_METHOD, DraftCall
from tandem.peers.grpc.settings import PeerSettings
from tandem.peers.grpc.verify_call import VERIFY_METHOD, VerifyCall
from tandem.peers.text.record import TextRecord
from tandem.peers.text.tokenizer_files import TokenizerFiles
from tandem.rpc.channel import Dialer
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.plaintext import check_plaintext
from tandem.rpc.streams.call import SequenceCall
from tandem.rpc.streams.link import Link
from tandem.settings import variable_of
from tandem.target.v1 import target_pb2, target_pb2_grpc

_TRIAL = "trial"
_TRIAL_SAMPLING = common_pb2.Sampling(temperature=0.0, seed=0)

_DraftSequence = SequenceCall[drafter_pb2.SequenceRequest, drafter_pb2.SequenceResponse]
_VerifySequence = SequenceCall[target_pb2.SequenceRequest, target_pb2.SequenceResponse]


class DrafterClient(Peer):
    """A drafter at an address."""

    role = "drafter"
    _service = "tandem.drafter.v1.DrafterService"

    def _over(self, channel: grpc.aio.Channel) -> tuple[Any, Link[Any]]:
        start: Any = channel.stream_stream(
            f"/{DRAFT_METHOD}", response_deserializer=drafter_pb2.DraftResponse.FromString
        )
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        return stub, Link(self.role, self.address, start)

    async def model_info(self, seconds: float) -> drafter_pb2.GetModelInfoResponse:
        """What it serves."""
        request = drafter_pb2.GetModelInfoRequest()
        reply: drafter_pb2.GetModelInfoResponse = await self._call(
            self._now.stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    def sequence(
        self,
        seconds: float | None,
        waits: Waits,
        record: TextRecord,
        max_bytes: int,
        target_max_bytes: int,
        counting_on: CountingOn,
    ) -> DraftCall:
        """A fresh sequence, for at most `seconds`.

        Args:
            seconds: None for any time.
            waits: its deadlines.
            record: the text's.
            max_bytes: of a message that the drafter takes.
            target_max_bytes: of a message that the target takes.
            counting_on: what is expected of the process that answers.
        """
        call = self._sequence(seconds, max_bytes)
        return DraftCall(call, waits, record, target_max_bytes, counting_on)

    def _sequence(self, seconds: float | None, max_bytes: int) -> _DraftSequence:
        close = drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())
        return SequenceCall(self._now.link, drafter_pb2.DraftRequest, close, seconds, max_bytes)

    async def trial(self, reply: drafter_pb2.GetModelInfoResponse, seconds: float) -> None:
        """Have it draft one token of a sequence of no text; each answer may take a time.

        Raises:
            TandemError: it cannot.
        """
        call = self._sequence(None, reply.info.max_message_bytes)
        opening = drafter_pb2.OpenSequence(
            request_id=_TRIAL,
            token_ids=[0],
            sampling=_TRIAL_SAMPLING,
            target_vocab_size=reply.info.vocab_size or 1,
            max_new_tokens=2,
        )
        step = drafter_pb2.DraftStep(round=1, position=1, new_token_ids=[0], gamma=1)
        with _answered(call):
            await call.open(drafter_pb2.SequenceRequest(open=opening), "opened", seconds)
            await call.ask(drafter_pb2.SequenceRequest(draft=step), "drafted", seconds)


class TargetClient(Peer):
    """A target at an address."""

    role = "target"
    _service = "tandem.target.v1.TargetService"

    def _over(self, channel: grpc.aio.Channel) -> tuple[Any, Link[Any]]:
        start: Any = channel.stream_stream(
            f"/{VERIFY_METHOD}", response_deserializer=target_pb2.VerifyResponse.FromString
        )
        stub = target_pb2_grpc.TargetServiceStub(channel)
        return stub, Link(self.role, self.address, start)

    async def model_info(self, seconds: float) -> target_pb2.GetModelInfoResponse:
        """What it serves."""
        request = target_pb2.GetModelInfoRequest()
        reply: target_pb2.GetModelInfoResponse = await self._call(
            self._now.stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    async def tokenizer(self, seconds: float) -> TokenizerFiles:
        """Its tokenizer; empty where it has none."""
        call = self._now.stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=seconds)
        if await call.code() == grpc.StatusCode.NOT_FOUND:
            return TokenizerFiles()
        reply: target_pb2.GetTokenizerResponse = await self._call(call)
        return TokenizerFiles(reply.tokenizer_json, reply.chat_template, dict(reply.special_tokens))

    def sequence(
        self,
        seconds: float | None,
        waits: Waits,
        record: TextRecord,
        max_bytes: int,
        counting_on: CountingOn,
    ) -> VerifyCall:
        """A fresh sequence, for at most `seconds` and with messages of at most `max_bytes`."""
        call = self._sequence(seconds, max_bytes)
        return VerifyCall(call, waits, record, counting_on)

    def _sequence(self, seconds: float | None, max_bytes: int) -> _VerifySequence:
        close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
        return SequenceCall(self._now.link, target_pb2.VerifyRequest, close, seconds, max_bytes)

    async def trial(self, reply: target_pb2.GetModelInfoResponse, seconds: float) -> None:
        """Have it make two tokens of a sequence of no text; each answer may take a time.

        Raises:
            TandemError: it cannot.
        """
        rule = next((info.name for info in reply.verifiers if not info.fixed_gamma), None)
        if rule is None:  # one that would need a draft: its health has to do
            return
        call = self._sequence(None, reply.info.max_message_bytes)
        opening = target_pb2.OpenSequence(
            request_id=_TRIAL,
            token_ids=[0],
            sampling=_TRIAL_SAMPLING,
            verifier=rule,
            max_new_tokens=2,
        )
        step = target_pb2.VerifyStep(round=1, position=2)
        with _answered(call):
            await call.open(target_pb2.SequenceRequest(open=opening), "opened", seconds)
            await call.ask(target_pb2.SequenceRequest(verify=step), "verdict", seconds)


@contextmanager
def _answered(call: _DraftSequence | _VerifySequence) -> Iterator[None]:
    """Cancel a trial at the end of the block. A refusal because all slots are taken passes it."""
    try:
        yield
    except Exhausted:
        pass
    finally:
        call.cancel()


def dialers_of(settings: PeerSettings, *roles: str) -> list[Dialer]:
    """One for each role, "drafter" or "target".

    Raises:
        StartupError: which setting or file is unfit, and how.
    """

    def named(name: str) -> str:
        return variable_of(type(settings), name)

    ca, cert, key = settings.peer_ca, settings.peer_cert, settings.peer_key
    names = {role: getattr(settings, f"{role}_tls_name") for role in roles}
    for given, name, lacking in (
        (cert and not key, "peer_cert", "peer_key"),
        (key and not cert, "peer_key", "peer_cert"),
        (cert and not ca, "peer_cert", "peer_ca"),
        *((tls_name and not ca, f"{role}_tls_name", "peer_ca") for role, tls_name in names.items()),
    ):
        if given:
            raise StartupError(f"{named(name)} needs {named(lacking)} too")
    if ca is None:
        for role in roles:
            for address in getattr(settings, f"{role}s"):
                permitted, by = settings.peer_plaintext, named("peer_plaintext")
                check_plaintext(address, permitted, named(f"{role}s"), named("peer_ca"), by)
        return [Dialer(age_seconds=settings.peer_connection_seconds)] * len(roles)
    # What reads certificates takes a tenth of a second to import.
    from tandem.rpc.security.tls import ClientTls

    tls = ClientTls(
        NamedFile(named("peer_ca"), ca),
        NamedFile(named("peer_cert"), cert) if cert else None,
        NamedFile(named("peer_key"), key) if key else None,
    )
    return [Dialer(tls, name, settings.peer_connection_seconds) for name in names.values()]
