"""vLLM's sampling parameters, for a request's drafts."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from tandem.speculation.request.sampling import MAX_SEED, Sampling
from tandem.speculation.request.shaping import NO_SHAPING, Grammar, GrammarKind, Shaping


def sampling_of(params: Any, with_grammar: bool = True) -> Sampling:
    """What drafts are drawn by. Where it says less than vLLM's parameters do, or more, fewer
    drafted tokens are kept.

    Args:
        params: vLLM's `SamplingParams`.
        with_grammar: whether a grammar holds from the first token on.
    """
    return Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=_own_seed(params.seed),
        shaping=_shaping_of(params, with_grammar),
    )


def _shaping_of(params: Any, with_grammar: bool) -> Shaping:
    try:
        return Shaping(
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            grammar=_grammar_of(params.structured_outputs) if with_grammar else None,
        )
    except ValueError:  # beyond a drafter's bounds
        return NO_SHAPING


def _grammar_of(wanted: Any) -> Grammar | None:
    if wanted is None:
        return None
    if wanted.json is not None:
        schema = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
        return Grammar(GrammarKind.JSON_SCHEMA, schema)
    return None if wanted.regex is None else Grammar(GrammarKind.REGEX, wanted.regex)


def _own_seed(seed: int | None) -> int:
    """Of drafts and verdicts. vLLM draws by the request's seed too, perhaps with the same
    generator: what decides a draft must be independent of that."""
    if seed is None:
        return secrets.randbelow(MAX_SEED + 1)
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8, person=b"tandem-vllm").digest()
    return int.from_bytes(digest, "little")
