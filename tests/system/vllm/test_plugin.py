"""`vllm serve` with Tandem's drafter, through its HTTP API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.tools.local.process import ServiceProcess
from tests.exactness import SMALLEST_P
from tests.support.laws.conditional import p_value, rows_of, softmax
from tests.support.models.tiny import save_random_llama
from tests.support.processes.ports import free_ports
from tests.support.processes.vllm_serve import VllmServer, arguments, vllm_serve
from tests.support.waiting import wait_until
from tests.system.vllm.conftest import save_for_vllm
from tests.system.vllm.test_target import MISSING, nucleus

pytestmark = [
    pytest.mark.campaign(
        "`vllm serve` with drafters: the law, grammars, ranks, lost drafters",
        "unit/tandem_vllm: the rule's law, rows; service/plugin: drafters that come, go or are "
        "late",
    ),
    pytest.mark.skipif(find_spec("vllm") is None, reason=MISSING),
]
# What an array of booleans is made of.
WORDS = ["[", "]", ",", "true", "false", "</s>"]
OPEN, CLOSE, COMMA, TRUE, FALSE, END = range(len(WORDS))
PROMPT = [TRUE, COMMA, OPEN]
NEW_TOKENS = 16
FREE: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": NEW_TOKENS,
    "temperature": 1.0,
    "ignore_eos": True,
}
# A multiple of 64: requests have eight texts, seeds a quarter of them, and ranks a half.
TEXTS = 1_024
# Whatever a busy machine takes.
PATIENT = {"WAIT_SECONDS": "60", "DRAFT_SECONDS": "60", "STAGE_FLOOR_SECONDS": "60"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SCHEMA = {"type": "array", "items": {"type": "boolean"}}
GRAMMAR = """
root ::= "[" ("]" | value rest)
rest ::= "]" | "," value rest
value ::= "true" | "false"
"""


@dataclass
class Pair:
    """A drafter's and a target's folder, with one tokenizer."""

    drafter: Path
    target: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("plugin")
    words = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, merges=[]))
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    found = Pair(
        save_random_llama(folder / "drafter", 2, len(WORDS)),
        save_for_vllm(folder / "target", 1, len(WORDS)),
    )
    for place in (found.drafter, found.target):
        tokenizer.save_pretrained(place)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "eos_token_id": END}))
    return found


@contextmanager
def drafting(pair: Pair, log: Path, port: int = 0) -> Iterator[ServiceProcess]:
    """A drafter that serves, and that nobody stops before the end."""
    settings = {
        "MODEL": str(pair.drafter),
        "LISTEN": f"127.0.0.1:{port}",
        "DRAFT_SUPPORT": "0",
        "THREADS": "1",
    }
    own = {f"TANDEM_DRAFTER_{name}": value for name, value in settings.items()}
    process = ServiceProcess("drafter", "drafter_svc", "127.0.0.1", own, log)
    try:
        # While nobody computes: ranks that wait for each other leave others little of two cores.
        wait_until(lambda: process.port and serves(process))
        yield process
    finally:
        process.kill()


def opened_sequences(drafter: ServiceProcess) -> int:
    with grpc.insecure_channel(drafter.address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        return int(stub.GetModelInfo(drafter_pb2.GetModelInfoRequest()).stats.opened_sequences)


def serves(drafter: ServiceProcess) -> bool:
    with suppress(grpc.RpcError):
        opened_sequences(drafter)
        return True
    return False


def arrays(texts: Sequence[Sequence[int]]) -> list[npt.NDArray[np.bool_]]:
    """For each token of each text, [V]: those that an array of booleans may have there."""
    behind = {
        None: [OPEN],
        OPEN: [CLOSE, TRUE, FALSE],
        COMMA: [TRUE, FALSE],
        TRUE: [CLOSE, COMMA],
        FALSE: [CLOSE, COMMA],
        CLOSE: [END],
    }
    masks = []
    for text in texts:
        mask = np.zeros((len(text), len(WORDS)), dtype=bool)
        for place, before in enumerate([None, *text[:-1]]):
            mask[place, behind[before]] = True
        masks.append(mask)
    return masks


def law_of(
    model: Path, texts: Sequence[Sequence[int]], process: Callable[[Tensor], Tensor] = softmax
) -> float:
    """How likely such texts are, of a model's rows."""
    return p_value(texts, rows_of(model, PROMPT, texts, process), PROMPT[-1])


def law_of_arrays(pair: Pair, texts: Sequence[Sequence[int]]) -> float:
    """How likely such texts are, of the target's rows at which all else is forbidden."""
    rows = [
        (row * mask) / (row * mask).sum(-1, keepdims=True)
        for row, mask in zip(rows_of(pair.target, PROMPT, texts), arrays(texts), strict=True)
    ]
    return p_value(texts, rows, PROMPT[-1])


@dataclass(frozen=True)
class Way:
    """To have drafts.

    Attributes:
        level: without (0) or with the drafts' rows (1).
        rule: of level 1.
        ranks: that share the model.
    """

    level: int
    rule: str = "block"
    ranks: int = 1


WAYS = [Way(0), Way(1), Way(1, "token", 2), Way(0, ranks=2)]


@pytest.fixture(scope="module")
def tokens_a_pass() -> dict[Way, float]:
    return {}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_law_is_the_targets(
    way: Way, pair: Pair, tmp_path: Path, tokens_a_pass: dict[Way, float]
) -> None:
    (port,) = free_ports(1)
    traces = tmp_path / "traces.jsonl"
    settings = {
        "DRAFTERS": f"127.0.0.1:{port}",
        "VERIFIER": way.rule,
        **PATIENT,
        "TRACE_FILE": str(traces),
    }
    with (
        drafting(pair, tmp_path / "drafter.log", port) as drafter,
        vllm_serve(
            pair.target, tmp_path / "vllm.log", arguments(way.level), settings, way.ranks
        ) as server,
    ):
        before, count = opened_sequences(drafter), TEXTS // way.ranks
        texts = server.texts(count, **FREE)
        # Only one rank asks. At level 0 a text may be lost sight of and opened anew, or go on with
        # the sequence of one that began as it does.
        opened = opened_sequences(drafter) - before
        assert opened == count if way.level else count / 2 < opened < 1.2 * count
        assert law_of(pair.target, texts) > SMALLEST_P
        assert law_of(pair.drafter, texts) < SMALLEST_P, "the drafter's law would pass"
        tokens_a_pass[way] = server.tokens_a_pass()

        cool = server.texts(count, **{**FREE, "temperature": 0.7, "top_p": 0.99})
        assert law_of(pair.target, cool, nucleus) > SMALLEST_P
        seeded = server.texts(count // 4, seeds=True, **FREE)
        assert law_of(pair.target, seeded) > SMALLEST_P

        answers = server.completions([{**FREE, "temperature": 0.0}] * 8)
        model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
        expected = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        for answer in answers:
            assert answer["choices"][0]["token_ids"] == expected[0, len(PROMPT) :].tolist()

        for kind in ({"json": SCHEMA}, {"grammar": GRAMMAR}):
            found = server.texts(count, **{**FREE, "ignore_eos": False, "structured_outputs": kind})
            assert law_of_arrays(pair, found) > SMALLEST_P, kind

        if way.level:
            assert_a_request_is_traced(server, traces)
        assert_the_law_holds_without_the_drafter(server, drafter, pair, tmp_path, port, count)


def assert_a_request_is_traced(server: VllmServer, traces: Path) -> None:
    """In its caller's trace; nobody else asked for one."""

    def ask() -> list[dict[str, Any]]:
        return server.completions([FREE], {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})

    def found() -> set[str]:
        spans = [
            span
            for line in traces.read_text().splitlines()
            for resource in json.loads(line)["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]
        own = {span["name"] for span in spans if span["traceId"] == TRACE}
        assert {span["name"] for span in spans if span["traceId"] != TRACE} <= {"pass"}
        linked = [link["traceId"] for span in spans for link in span.get("links", [])]
        return own | ({"pass"} if TRACE in linked else set())

    # A text may end before a busy drafter has opened it.
    wait_until(lambda: ask() and found() >= {"generate", "call.prefill", "call.draft", "pass"})


def assert_the_law_holds_without_the_drafter(
    server: VllmServer, drafter: ServiceProcess, pair: Pair, logs: Path, port: int, count: int
) -> None:
    """It is killed in the middle of texts, and another one comes."""
    name = "vllm:spec_decode_num_drafts_total"
    drafts = server.counter(name)

    def kill() -> None:
        wait_until(lambda: server.counter(name) > drafts + 50)
        drafter.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    texts = server.texts(count, **FREE)
    killer.join()
    assert [len(text) for text in texts] == [NEW_TOKENS] * count
    assert law_of(pair.target, texts) > SMALLEST_P
    drafts = server.counter(name)
    with drafting(pair, logs / "next.log", port):
        # Long enough for a drafter that opens late.
        long = {**FREE, "max_tokens": 100}
        wait_until(lambda: server.texts(8, **long) and server.counter(name) > drafts)


def test_texts_of_all_kinds_share_a_batch(pair: Pair, tmp_path: Path) -> None:
    """Prompts in several chunks, texts up to the longest, too little memory for all of them, drafts
    that are often late, greedy texts beside drawn ones, penalties, log probabilities."""
    prompt = [(3 * i + i // 7) % END for i in range(150)] + [COMMA]
    long: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 400,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    kinds: list[dict[str, Any]] = [
        long,
        {**long, "max_tokens": 100, "logprobs": 0},
        {**long, "max_tokens": 60, "temperature": 0.0},
        # Without seeds: vLLM's CPU build ends at one that begins anew ("does not use offset").
        {**long, "max_tokens": 80},
        {**long, "max_tokens": 80, "presence_penalty": 1.0, "temperature": 0.5},
    ]
    options = ["--num-gpu-blocks-override", "9", "--max-num-batched-tokens", "128"]
    options += ["--max-num-seqs", "16", *arguments(1)]
    with (
        drafting(pair, tmp_path / "drafter.log") as drafter,
        vllm_serve(
            pair.target,
            tmp_path / "vllm.log",
            options,
            {"DRAFTERS": drafter.address, "WAIT_SECONDS": "0.02"},
        ) as server,
    ):
        answers = server.completions([kinds[i % len(kinds)] for i in range(100)])
        texts = [answer["choices"][0]["token_ids"] for answer in answers]
        # Of 512 positions.
        assert [len(text) for text in texts[:5]] == [512 - len(prompt), 100, 60, 80, 80]
        drawn = [text for i, text in enumerate(texts) if i % 5 in (0, 1)]
        assert p_value(drawn, rows_of(pair.target, prompt, drawn), prompt[-1]) > SMALLEST_P
        assert len({tuple(text) for text in texts[2::5]}) == 1
        for answer, text in list(zip(answers, texts, strict=True))[1::5]:
            (own,) = rows_of(pair.target, prompt, [text])
            told = answer["choices"][0]["logprobs"]["token_logprobs"]
            expected = np.log(own[np.arange(len(text)), text])
            np.testing.assert_allclose(told, expected, atol=1e-4)
        assert server.counter("vllm:num_preemptions_total") > 0
        # All but one token of the prompt are in the cache: vLLM pads such a text's first pass.
        begun = server.texts(512, **{**long, "prompt": prompt[:129], "max_tokens": 8})
        rows = rows_of(pair.target, prompt[:129], begun)
        assert p_value(begun, rows, prompt[128]) > SMALLEST_P
        drafts = server.counter("vllm:spec_decode_num_drafts_total")
        # After late drafts some passes do not ask.
        odd = [{**FREE, "max_tokens": 100}] * 8, {"X-Request-Id": "x" * 300}
        wait_until(
            lambda: (
                server.completions(*odd)
                and server.counter("vllm:spec_decode_num_drafts_total") > drafts
            )
        )


def test_rows_are_worth_tokens(tokens_a_pass: dict[Way, float]) -> None:
    if len(tokens_a_pass) < len(WAYS):
        pytest.skip("it compares what the tests before it measured")
    certain, block, token, _ = (tokens_a_pass[way] for way in WAYS)
    assert block >= token > certain > 1, tokens_a_pass


@pytest.mark.parametrize(
    ("worker", "scheduler", "body"),
    [
        ("tests.system.vllm.mutants.LenientWorker", "", FREE),
        (
            "",
            "tests.system.vllm.mutants.CuttingScheduler",
            {**FREE, "ignore_eos": False, "structured_outputs": {"grammar": GRAMMAR}},
        ),
    ],
    ids=["a rule that is too lenient", "drafts cut at forbidden tokens"],
)
def test_a_wrong_one_fails(
    worker: str, scheduler: str, body: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    options = arguments(1, worker, scheduler)
    with (
        drafting(pair, tmp_path / "drafter.log") as drafter,
        vllm_serve(
            pair.target,
            tmp_path / "vllm.log",
            options,
            {"DRAFTERS": drafter.address, **PATIENT},
        ) as server,
    ):
        texts = server.texts(2 * TEXTS, **body)
        if "structured_outputs" in body:
            assert law_of_arrays(pair, texts) < SMALLEST_P
        else:
            assert law_of(pair.target, texts) < SMALLEST_P
