"""What is told of a loaded model, whatever computes its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from tandem.inference.compatibility import max_positions
from tandem.inference.fingerprint import tokenizer_fingerprint
from tandem.inference.hidden_states import Layers


@dataclass(frozen=True)
class Description:
    """A model by its configuration, its tokenizer and its hashes.

    Attributes:
        name: the checkpoint's name, for people.
        vocab_size: width of the logits.
        max_length: the most positions that the model was made for.
        parameters: how many it has.
        hidden_size: width of hidden states.
        layers: of the model.
        eos_token_ids: ids that end a text, see `end_token_ids`.
        tokenizer: of the checkpoint; None without one.
        tokenizer_fingerprint: of its token-to-id table; empty without a tokenizer.
        fingerprint: of a loaded checkpoint, see `Fingerprints.model`; else empty.
        weights_fingerprint: likewise, see `Fingerprints.weights`.
        of_layers: whose hidden states its passes can give, see `Layers`.
        probe_tokens: extra embeddings, which the ids from `vocab_size` on name.
        masked_ids: that texts never have, see `CheckpointSource`.
        weights_version: of learnt weights in place of the checkpoint's; 0 for those.
    """

    name: str
    vocab_size: int
    max_length: int
    parameters: int
    hidden_size: int
    layers: int
    eos_token_ids: Sequence[int] = ()
    tokenizer: Any = None
    tokenizer_fingerprint: str = ""
    fingerprint: str = ""
    weights_fingerprint: str = ""
    of_layers: Layers = ()
    probe_tokens: int = 0
    masked_ids: Sequence[int] = ()
    weights_version: int = 0

    def tokenizer_json(self) -> bytes:
        """The serialised fast tokenizer; empty where there is none."""
        if self.tokenizer is None:
            return b""
        return bytes(self.tokenizer.backend_tokenizer.to_str(), "utf-8")

    def chat_template(self) -> str:
        """The checkpoint's Jinja template of chats; empty where there is none."""
        template = getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):  # one for each purpose
            template = template.get("default")
        return template if isinstance(template, str) else ""

    def special_tokens(self) -> dict[str, str]:
        """The texts of tokens by the names that the template has for them."""
        named = {} if self.tokenizer is None else self.tokenizer.special_tokens_map
        return {name: str(token) for name, token in named.items() if not isinstance(token, list)}


def describe(model: PreTrainedModel, name: str, tokenizer: Any = None) -> Description:
    """What a causal language model's configuration and tokenizer tell; the hashes are empty.

    Args:
        model: loaded; on "meta" without its weights.
        name: of the checkpoint.
        tokenizer: of the checkpoint; None without one.
    """
    config = model.config.get_text_config()
    return Description(
        name=name,
        vocab_size=int(config.vocab_size),
        max_length=max_positions(config),
        parameters=sum(p.numel() for p in model.parameters()),
        hidden_size=int(config.hidden_size),
        layers=int(config.num_hidden_layers),
        eos_token_ids=end_token_ids(model, tokenizer),
        tokenizer=tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
    )


def end_token_ids(model: PreTrainedModel, tokenizer: Any = None) -> list[int]:
    """Ids that end a text, in their order: those of the generation config, of the model's config,
    and the tokenizer's own, as far as the vocabulary has them."""
    config = model.config.get_text_config()
    found = [model.generation_config, tokenizer]
    # Classes of transformers have an id of their own, which a checkpoint may never have named.
    found += [each for each in (model.config, config) if _ends(each) != _ends(type(each))]
    ends = set().union(*map(_ends, found)) or _ends(config)
    return sorted(end for end in ends if 0 <= end < config.vocab_size)


def _ends(named: Any) -> frozenset[int]:
    """The ids that a config, its class or a tokenizer names."""
    ends = getattr(named, "eos_token_id", None)
    if isinstance(ends, int):
        return frozenset([ends])
    return frozenset(ends) if isinstance(ends, (list, tuple)) else frozenset()
