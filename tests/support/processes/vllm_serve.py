"""`vllm serve` with Tandem's drafter, as a process, and its HTTP API."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.support.processes.ports import free_port
from tests.support.repository import ROOT

READY_SECONDS = 300
GAMMA = 3
# Texts of the batch: so many requests of so many.
_AT_ONCE, _TEXTS_A_REQUEST = 8, 8
_NO_HEADERS: Mapping[str, str] = {}
_PLAIN = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # Of requests whose callers have a trace.
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}


@dataclass
class VllmServer:
    """A running server.

    Attributes:
        url: of its API.
        model: its name there.
        log: file of what it says.
        process: its first one.
    """

    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes]

    def completions(
        self, bodies: Sequence[Mapping[str, Any]], headers: Mapping[str, str] = _NO_HEADERS
    ) -> list[dict[str, Any]]:
        """Answers to requests, some at once."""

        async def all_of_them() -> list[dict[str, Any]]:
            places = asyncio.Semaphore(_AT_ONCE)
            async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none") as client:

                async def one(body: Mapping[str, Any]) -> dict[str, Any]:
                    async with places:
                        answer = await client.completions.create(
                            model=self.model,
                            prompt="",
                            timeout=300,
                            extra_headers=headers,
                            extra_body={"return_token_ids": True, **body},
                        )
                        return answer.model_dump()

                return list(await asyncio.gather(*map(one, bodies)))

        return asyncio.run(all_of_them())

    def texts(self, count: int, *, seeds: bool = False, **body: Any) -> list[list[int]]:
        """Token ids of so many texts of one prompt.

        Args:
            count: a multiple of eight.
            seeds: whether each has a seed of its own; vLLM then draws row by row.
            body: of the requests.
        """
        each = _TEXTS_A_REQUEST
        found = self.completions(
            [{**body, "n": each, **({"seed": i} if seeds else {})} for i in range(0, count, each)]
        )
        return [choice["token_ids"] for answer in found for choice in answer["choices"]]

    def counter(self, name: str) -> float:
        """Of vLLM's metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def tokens_a_pass(self) -> float:
        """That a text had of each pass with a draft, so far."""
        accepted = self.counter("vllm:spec_decode_num_accepted_tokens_total")
        return 1 + accepted / self.counter("vllm:spec_decode_num_drafts_total")


def arguments(level: int | None, worker: str = "", scheduler: str = "") -> list[str]:
    """Of `vllm serve`, for Tandem's drafter at level 0 or 1; None for none."""
    if level is None:
        return []
    found = [
        "--speculative-config",
        f'{{"method": "custom_class", "model": "tandem_vllm.Proposer",'
        f' "num_speculative_tokens": {GAMMA}}}',
    ]
    if level:
        found += ["--worker-cls", worker or "tandem_vllm.DraftingWorker"]
        found += ["--scheduler-cls", scheduler or "tandem_vllm.DraftingScheduler"]
    return found


@contextmanager
def vllm_serve(
    model: Path,
    log: Path,
    options: Sequence[str],
    settings: Mapping[str, str],
    ranks: int = 1,
) -> Iterator[VllmServer]:
    """Start a server, wait until it answers, and stop it at the end.

    Args:
        model: folder of the checkpoint.
        log: file for what it says.
        options: of `vllm serve`, besides the usual ones.
        settings: of the plugin, without their prefix.
        ranks: that share the model.
    """
    port = free_port()
    # What `vllm serve` runs; the command itself does not start from the CPU build's package.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64"]
    # Nobody listens there: vLLM passes its callers' traces on where it has somewhere to send them.
    command += ["--otlp-traces-endpoint", "grpc://127.0.0.1:9"]
    command += ["--enforce-eager", "--tensor-parallel-size", str(ranks), *options]
    environment = {
        **os.environ,
        **_PLAIN,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))) if ranks > 1 else "nobind",
        **{f"TANDEM_VLLM_{name}": value for name, value in settings.items()},
    }
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=written, start_new_session=True
        )
    server = VllmServer(f"http://127.0.0.1:{port}", "model", log, process)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(server):
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _answers(server: VllmServer) -> bool:
    if server.process.poll() is not None:
        raise AssertionError(server.log.read_text()[-4000:])
    with suppress(OSError), urllib.request.urlopen(f"{server.url}/health") as answer:
        return bool(answer.status == 200)
    return False
