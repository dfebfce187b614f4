"""A name server whose records tests can change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class Names(asyncio.DatagramProtocol):
    """Answers questions for A records.

    Attributes:
        records: addresses by name; other names do not exist.
        silent: if set, it answers nothing.
        asked: questions so far.
        port: that it listens on.
    """

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.silent = False
        self.asked = 0
        self.port = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked += 1
        if self.silent:
            return
        query = dns.message.from_wire(data)
        question = query.question[0]
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.AA
        found = self.records.get(question.name.to_text(omit_final_dot=True))
        if found is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif found and question.rdtype == dns.rdatatype.A:
            reply.answer.append(dns.rrset.from_text(question.name, 0, "IN", "A", *found))
        self._transport.sendto(reply.to_wire(), addr)


@asynccontextmanager
async def serve_names(listener: socket.socket | None = None) -> AsyncIterator[Names]:
    """A server without records, on a socket or on a free port of loopback."""
    if listener is None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listener.bind(("127.0.0.1", 0))
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(Names, sock=listener)
    try:
        yield names
    finally:
        transport.close()
