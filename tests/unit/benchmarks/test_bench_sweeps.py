"""The sweeps' own mathematics, and the slow network."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest
import torch
from torch import Tensor

from benchmarks.sweep.delay_proxy import DelayProxy
from benchmarks.sweep.expectation import expected_emitted
from benchmarks.sweep.recorded import Recorder, Rounds, Texts
from benchmarks.sweep.support_size import SUPPORTS, support_sizes
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS

DRAWS = 40_000


def random_rows(generator: torch.Generator, *shape: int) -> Tensor:
    return (2 * torch.randn(*shape, generator=generator)).softmax(-1)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_expectation_is_what_the_rule_does_on_average(rule: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, p = random_rows(generator, 1, 4, 5), random_rows(generator, 1, 5, 5)
    tokens = torch.multinomial(q[0], 1, generator=generator).T
    expected = expected_emitted(rule, Rounds(tokens, q, p), 3)
    many = Proposal.from_dense(tokens[:, :3].expand(DRAWS, -1), q[:, :3].expand(DRAWS, -1, -1))
    uniforms = torch.rand(DRAWS, 4, generator=generator, dtype=torch.float64)
    verdict = VERIFIERS[rule].verify(many, p[:, :4].expand(DRAWS, -1, -1), uniforms)
    emitted = verdict.num_accepted.double() + 1
    error = emitted.std() / DRAWS**0.5
    assert abs(float(emitted.mean() - expected[0])) < 4 * float(error)


class KnownRows:
    """A recorder whose rows are made up."""

    def rows(self, texts: Texts) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return random_rows(generator, 20, 2048), random_rows(generator, 20, 2048)


def test_more_support_loses_less_overlap_and_takes_more_bytes() -> None:
    found = support_sizes(cast(Recorder, KnownRows()), [Texts(torch.zeros(1, 1), 1)])
    assert [each.support for each in found] == list(SUPPORTS)
    losses = [each.overlap_lost for each in found]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == pytest.approx(0, abs=1e-3)
    assert found[0].bytes_a_round == 4 * 16 * 6
    assert found[-1].bytes_a_round > found[-2].bytes_a_round


async def test_delayed_chunks_do_not_wait_for_each_other() -> None:
    loop = asyncio.get_running_loop()
    arrived: list[tuple[bytes, float]] = []

    class Far:
        def write(self, chunk: bytes) -> None:
            arrived.append((chunk, loop.time() - started))

        async def drain(self) -> None: ...

        def can_write_eof(self) -> bool:
            return False

    proxy, reader = DelayProxy("127.0.0.1:1"), asyncio.StreamReader()
    proxy.delay_s, started = 0.03, loop.time()
    pump = asyncio.create_task(proxy._pump(reader, cast(asyncio.StreamWriter, Far())))
    for number in range(5):
        reader.feed_data(bytes([number]))
        await asyncio.sleep(0.004)
    reader.feed_eof()
    await pump
    assert [chunk for chunk, _ in arrived] == [bytes([number]) for number in range(5)]
    assert [at for _, at in arrived] == pytest.approx([0.03 + 0.004 * n for n in range(5)])


@pytest.mark.real_time  # sockets
async def test_a_delayed_network_delays_each_way_and_keeps_every_byte() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1000):
            writer.write(chunk)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, DelayProxy(f"{host}:{port}").serving() as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        proxy.delay_s = 0.03
        started = time.perf_counter()
        for number in range(5):
            writer.write(bytes([number]))
            await asyncio.sleep(0.004)
        assert await reader.readexactly(5) == bytes(range(5))
        assert time.perf_counter() - started >= 0.06  # both ways
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
