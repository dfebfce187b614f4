"""Compares greedy texts of the services with transformers decoding the target alone."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import grpc
import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tests.support.processes.services import generation, trio
from tests.support.repository import ROOT

TARGET = ROOT / "models" / "target"
GAMMAS = (1, 4, 8)
VERIFIERS = ("token", "block", "greedy_block")
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """A greedy text by transformers.

    Attributes:
        prompt: token ids.
        tokens: greedy continuation.
        gaps: difference of the two largest logits at each token of it.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]

    def difference(self, tokens: list[int]) -> str | None:
        """Where `tokens` differ beyond a near-tie; None if nowhere."""
        for place, (ours, theirs) in enumerate(zip(tokens, self.tokens, strict=False)):
            if ours != theirs:
                gap = self.gaps[place]
                return None if gap < NEAR_TIE else f"token {place}: {ours}, not {theirs} ({gap=})"
        return None if len(tokens) == len(self.tokens) else f"{len(tokens)} tokens"

    def near_tie(self, tokens: list[int]) -> bool:
        """Whether `tokens` leave the reference at a near-tie."""
        return tokens != self.tokens and self.difference(tokens) is None


def source_lines(count: int) -> list[str]:
    """Prompts: lines of Python's own sources, up to a few dozen tokens each."""
    sources = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    lines = [line for path in sources for line in path.read_text().splitlines()]
    picked = [line for line in lines if line.startswith(("def ", "class ", "    def ", "import "))]
    step = max(len(picked) // count, 1)
    return [f"{line}\n" for line in picked[::step]][:count]


def references(texts: list[str], tokens: int, target: Path = TARGET) -> list[Reference]:
    """Greedy decoding of the target alone, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found = []
    for text in texts:
        prompt = tokenizer(text).input_ids
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = torch.cat(output.logits).topk(2).values
        continuation = output.sequences[0, len(prompt) :].tolist()
        found.append(Reference(prompt, continuation, (top[:, 0] - top[:, 1]).tolist()))
    return found


async def texts_of(
    address: str,
    wanted: list[Reference],
    tokens: int,
    verifier: str,
    gamma: int,
    max_nodes: int | None = None,
) -> list[list[int]]:
    """Texts of the services for the same prompts at temperature 0, eight at a time."""
    places = asyncio.Semaphore(8)

    async def one(
        stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub, prompt: list[int]
    ) -> list[int]:
        message = generation(
            prompt,
            max_new_tokens=tokens,
            temperature=0,
            verifier=verifier,
            gamma=gamma,
            max_nodes=max_nodes,
        )
        async with places:
            reply = await stub.Complete(pb.CompleteRequest(generation=message), timeout=300)
        return list(reply.token_ids)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        return await asyncio.gather(*(one(stub, reference.prompt) for reference in wanted))


def compare_greedy(console: Console, prompts: int, tokens: int) -> bool:
    """Compare every verifier and draft length; prints near-ties and differences."""
    wanted = references(source_lines(prompts), tokens)
    equal, ties = True, 0
    cases = [("block", 0), *product(VERIFIERS, GAMMAS)]
    with tempfile.TemporaryDirectory() as scratch, trio(Path(scratch)) as services:
        for verifier, gamma in track(cases, "greedy", console=console):
            address = services.orchestrator.address
            texts = asyncio.run(texts_of(address, wanted, tokens, verifier, gamma))
            for reference, text in zip(wanted, texts, strict=True):
                if problem := reference.difference(text):
                    console.print(f"[red]{verifier}, gamma {gamma}: {problem}[/]")
                    equal = False
                elif reference.near_tie(text):
                    ties += 1
                    console.print(f"near-tie: {verifier}, gamma {gamma}")
    compared = len(cases) * len(wanted)
    console.print(
        f"{compared} greedy texts of {tokens} tokens: {'equal' if equal else 'DIFFERENT'}"
        f" to transformers, {ties} of them up to a near-tie"
    )
    return equal
