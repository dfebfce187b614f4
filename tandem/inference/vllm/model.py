"""A target's model, computed by vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import structlog
import torch
from torch import Tensor, nn

from tandem.errors import StartupError, Unsupported, first_line
from tandem.inference.check.plain import Plain
from tandem.inference.check.probe import probe
from tandem.inference.choice.speed import profile_of
from tandem.inference.description import Description
from tandem.inference.feed import DrawnToken, Feed, listed
from tandem.inference.loading.weights import device_of, dtype_of
from tandem.inference.model import Model
from tandem.inference.output import PassOutput
from tandem.inference.threads import use_threads
from tandem.inference.vllm.arguments import VllmOptions, check_version, engine_arguments
from tandem.inference.vllm.other_ranks import OtherRanks, free_address
from tandem.inference.vllm.rank import Rank, RankPlan, end_process
from tandem.inference.vllm.reference import reference_of
from tandem.inference.vllm.tether import Tether

_log = structlog.get_logger(__name__)


class VllmModel(Model):
    """A model whose passes vLLM computes, by a pass of ragged chains over its paged KV cache.

    Attributes:
        of_layers: hidden states are not given.
        blocks: its layers are not compared one by one.
        takes_trees: rows of a sequence are a chain.
        busy: nothing else uses it while it is measured.
    """

    of_layers: tuple[int, ...] = ()
    blocks: Sequence[nn.Module] = ()
    takes_trees = False
    engine = "vllm"

    def __init__(
        self, about: Description, dtype: str, rank: Rank, others: OtherRanks, tether: Tether
    ) -> None:
        from tandem.inference.vllm.memory import BlockMemory

        self.about = replace(about, max_length=min(about.max_length, rank.max_length))
        self._dtype, self._rank, self._others, self._tether = dtype, rank, others, tether
        self.device = rank.device
        self.busy: Any = nullcontext()
        self._memory = BlockMemory(rank.core)
        self._masked: torch.Tensor | None = None  # when its rows have been compared

    @classmethod
    def load(cls, options: VllmOptions) -> VllmModel:
        """Load a checkpoint.

        Raises:
            StartupError: one sentence on what is missing, broken or too large.
        """
        check_version()
        ranks = options.ranks
        device = device_of(options.device)
        if device.index:
            raise StartupError(
                f"DEVICE={options.device}: vLLM takes the first devices; set"
                f" DEVICE=cuda and CUDA_VISIBLE_DEVICES={device.index}"
            )
        dtype = dtype_of(options.model, options.device, options.dtype)
        reference = reference_of(options, dtype)
        model, about = reference.checkpoint.model, reference.checkpoint.about
        arguments = engine_arguments(options, dtype, model.config)
        use_threads(options.threads, about.parameters)
        threads = max(torch.get_num_threads() // options.tensor_parallel, 1)
        torch.set_num_threads(threads)
        # Its configuration is all that is needed from here on.
        model.to("meta")
        address = options.leader if options.nodes > 1 else free_address()
        plan = RankPlan(arguments, 0, 0, device.type, address, threads)
        others = OtherRanks(plan, ranks[1:], 0, end_process)
        tether = Tether(end_process)
        if options.nodes > 1:
            tether.listen(options.tether[1])
        try:
            rank = Rank(plan)
            loaded = cls(about, dtype, rank, others, tether)
            loaded._compare(reference.expected)
            loaded._masked = loaded.masked
        except BaseException:
            tether.close()
            others.close()
            raise
        return loaded

    def _compare(self, expected: Plain | None) -> None:
        """Raises StartupError if rows differ from the plain ones."""
        if expected is None:
            return
        with torch.inference_mode():
            compared = probe(self, expected, len(expected.texts.first))
        if not compared.holds:
            raise StartupError(
                f"vLLM computes other logits for {self.about.name} than transformers: {compared};"
                " TANDEM_TARGET_VLLM_CHECKED=false serves it all the same"
            )

    @property
    def dtype(self) -> str:
        """Of weights and passes."""
        return self._dtype

    @property
    def pool(self) -> Any:
        """vLLM's blocks."""
        return self._memory

    def reserve(self, capacity: int, nodes: int = 0, held: int | None = None) -> Any:
        """See `Model`; a sequence holds all from the start."""
        return self._memory.reserve(capacity, nodes)

    def release(self, cache: Any) -> None:
        """See `Model`."""
        self._memory.release(cache)

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `Model`."""
        tokens = _on_host(feeds)
        step = self._pass(feeds, tokens)
        for feed in feeds:
            cast("Any", feed.cache).known = True
        names, logits = self._rank.score(step)
        for feed, fed in zip(feeds, tokens, strict=True):
            cast("Any", feed.cache).grow(fed)
        self.forward_passes += 1
        self.fed_tokens += sum(map(len, tokens))
        return PassOutput(_in_order(feeds, names, logits)).without(self._masked)

    def _pass(self, feeds: Sequence[Feed], tokens: Sequence[list[int]]) -> Any:
        """The pass for vLLM."""
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

        from tandem.inference.vllm.worker import RaggedPass

        begun, going = [], CachedRequestData.make_empty()
        fed: dict[str, list[int]] = {}
        drafted: dict[str, list[int]] = {}
        for feed, ids in zip(feeds, tokens, strict=True):
            cache: Any = feed.cache
            if cache.name in fed:
                raise ValueError("two feeds of one sequence")
            if cache.length + len(ids) > cache.capacity:
                raise ValueError(f"{len(ids)} tokens after {cache.length} of {cache.capacity}")
            fed[cache.name] = ids
            if feed.rows > 1:
                drafted[cache.name] = ids[1 - feed.rows :]
            if not cache.known:
                begun.append(
                    NewRequestData(
                        req_id=cache.name,
                        prompt_token_ids=[*cache.tokens, *ids],
                        mm_features=[],
                        sampling_params=cache.request.sampling_params,
                        pooling_params=None,
                        block_ids=self._memory.blocks_of(cache),
                        num_computed_tokens=cache.length,
                        lora_request=None,
                    )
                )
                continue
            going.req_ids.append(cache.name)
            going.new_block_ids.append(None)
            going.num_computed_tokens.append(cache.length)
            going.num_output_tokens.append(0)
        return RaggedPass(
            scheduled_new_reqs=begun,
            scheduled_cached_reqs=going,
            num_scheduled_tokens={name: len(ids) for name, ids in fed.items()},
            total_num_scheduled_tokens=sum(map(len, fed.values())),
            scheduled_spec_decode_tokens=drafted,
            scheduled_encoder_inputs={},
            finished_req_ids=self._memory.gone(),
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._memory.to_zero(),
            tokens=fed,
        )

    def measure(self, longest: int) -> None:
        """See `Model`."""
        try:
            with torch.inference_mode():
                self.pass_times = profile_of(self, min(longest, self.about.max_length))
        except Exception as error:
            _log.warning("passes are not measured", reason=first_line(error))

    def forget_prefixes(self) -> int:
        """See `Model`: the blocks are vLLM's."""
        raise Unsupported("vLLM's cache of prefixes is emptied by a restart of the target alone")

    def close(self) -> None:
        """End the other ranks."""
        self._tether.close()
        self._rank.end()
        self._others.close(told=True)
        self._rank.close()


def _on_host(feeds: Sequence[Feed]) -> list[list[int]]:
    """The tokens of each feed; those of one draw come from the device at once."""
    draws: dict[int, list[int]] = {}

    def id_of(token: int | DrawnToken) -> int:
        if not isinstance(token, DrawnToken):
            return token
        if (key := id(token.draws)) not in draws:
            draws[key] = token.draws.tokens.tolist()
        return draws[key][token.index]

    return [[id_of(token) for token in listed(feed.token_ids)] for feed in feeds]


def _in_order(feeds: Sequence[Feed], names: Sequence[str], logits: Tensor) -> Tensor:
    """The rows asked for, feed by feed: vLLM has its own order, and a row of each sequence."""
    rows = {cast("Any", feed.cache).name: max(feed.rows, 1) for feed in feeds}
    first, firsts = 0, {}
    for name in names:
        firsts[name] = first
        first += rows[name]
    wanted = [
        firsts[cast("Any", feed.cache).name] + row for feed in feeds for row in range(feed.rows)
    ]
    if wanted == list(range(first)):
        return logits
    return logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]
