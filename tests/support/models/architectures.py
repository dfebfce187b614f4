"""The architectures of the parity matrix, as tiny random-weight models.

python -m tests.support.models.architectures writes docs/architectures.md.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "architectures.md"
WINDOW = 8
VOCAB_SIZE = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # Makes attention and distributions far from flat, so that a single wrong key shows.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # tied ones tend to repeat the last token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_PAIRS: dict[str, Any] = {"num_key_value_heads": 2}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
_ALTERNATING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix.

    Attributes:
        name: for people.
        model_type: in a checkpoint's config.json.
        tried: what the tiny model has besides plain causal attention.
        options: of its config, in addition to the tiny sizes.
    """

    name: str
    model_type: str
    tried: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slides(self) -> bool:
        """Whether some layer has a sliding window."""
        return "sliding_window" in self.options


@dataclass(frozen=True)
class Refused:
    """An architecture that cannot be served.

    Attributes:
        name: for people.
        model_type: in a checkpoint's config.json.
        reason: part of the sentence that refuses it.
        options: of its config, in addition to the tiny sizes.
    """

    name: str
    model_type: str
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


SUPPORTED = (
    Architecture("Llama", "llama", "grouped key heads", _GROUPED),
    Architecture("Mistral", "mistral", "sliding window", {**_GROUPED, "sliding_window": WINDOW}),
    Architecture(
        "Qwen2",
        "qwen2",
        "sliding window in the upper layers, biases",
        {**_PAIRS, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    ),
    Architecture(
        "Qwen3",
        "qwen3",
        "norms of queries and keys, sliding window in the upper layers",
        {**_GROUPED, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    ),
    Architecture(
        "Gemma 2",
        "gemma2",
        "alternating sliding windows, soft caps of scores and logits",
        {
            **_GROUPED,
            **_ALTERNATING,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    Architecture(
        "Gemma 3 (text)",
        "gemma3_text",
        "alternating sliding windows, a RoPE for each kind of layer",
        {**_GROUPED, **_ALTERNATING, "query_pre_attn_scalar": 8},
    ),
    Architecture(
        "Phi-3", "phi3", "sliding window, fused projections", {**_PAIRS, "sliding_window": WINDOW}
    ),
    Architecture("GPT-2", "gpt2", "learned positions, biases"),
    Architecture("GPT-NeoX", "gpt_neox", "partial RoPE, parallel blocks"),
    Architecture(
        "OPT",
        "opt",
        "learned positions with an offset",
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    Architecture(
        "Mixtral",
        "mixtral",
        "mixture of experts",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture("Qwen3-MoE", "qwen3_moe", "mixture of experts", {**_GROUPED, **_EXPERTS}),
    Architecture("Qwen2-MoE", "qwen2_moe", "shared and routed experts", {**_PAIRS, **_EXPERTS}),
    Architecture("Gemma", "gemma", "scaled embeddings", _GROUPED),
    Architecture("Phi", "phi", "partial RoPE, parallel blocks", _PAIRS),
    Architecture("GPT-BigCode", "gpt_bigcode", "one key head for all queries"),
    Architecture(
        "StarCoder2", "starcoder2", "sliding window, biases", {**_PAIRS, "sliding_window": WINDOW}
    ),
    Architecture("Granite", "granite", "multipliers", _GROUPED),
    Architecture(
        "Cohere 2",
        "cohere2",
        "alternating sliding windows, full layers without positions",
        {**_GROUPED, **_ALTERNATING, "logit_scale": 1.0},
    ),
    Architecture("OLMo 2", "olmo2", "norms after the blocks", _PAIRS),
    Architecture("OLMo 3", "olmo3", "alternating sliding windows", {**_PAIRS, **_ALTERNATING}),
    Architecture("GLM-4", "glm4", "partial RoPE, norms around the blocks", _GROUPED),
    Architecture(
        "SmolLM3",
        "smollm3",
        "layers without positions",
        {**_PAIRS, "no_rope_layers": [0, 1]},
    ),
)

_STATE = "its recurrent state cannot be rewound after a rejection"
_OWN = "its attention cannot be replaced by a batched one"
LLAMA = next(row for row in SUPPORTED if row.model_type == "llama")
# Positions that are learned, turned in whole and in part; experts; layers with windows and without.
# OpenVINO's conversion of each of the others is held to the plain logits alone, unless a campaign
# runs (tests/unit/inference/openvino).
KINDS = [
    row
    for row in SUPPORTED
    if row.model_type in ("llama", "gpt2", "gpt_neox", "qwen2_moe", "mistral", "gemma3_text")
]
# For tests of what happens around a pass.
SMALL = replace(LLAMA, options={**LLAMA.options, "num_hidden_layers": 1})
# Options that tell a layer from the next one.
_OF_LAYERS = ("layer_types", "max_window_layers", "no_rope_layers")


def one_layer(row: Architecture) -> Architecture:
    """With one layer, which shows what two would, if all are alike."""
    if any(name in row.options for name in _OF_LAYERS):
        return row
    return replace(row, options={**row.options, "num_hidden_layers": 1})


def light(row: Architecture) -> Architecture:
    """With two layers if it stands for a kind, or if they differ."""
    return row if row in KINDS else one_layer(row)


REFUSED = (
    Refused("Mamba", "mamba", _STATE),
    Refused("RecurrentGemma", "recurrent_gemma", _STATE),
    Refused("Jamba", "jamba", _STATE, _PAIRS),
    Refused("RWKV", "rwkv", _STATE),
    Refused("LFM2", "lfm2", "layers of the kind 'conv'", {"layer_types": ["conv", "conv"]}),
    Refused("Bloom (ALiBi)", "bloom", _OWN),
    Refused("Falcon (ALiBi or not)", "falcon", _OWN, {"alibi": True}),
    Refused("MPT (ALiBi)", "mpt", _OWN, {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    Refused("GPT-J", "gptj", _OWN, {"rotary_dim": 4}),
    Refused("StableLM", "stablelm", _OWN, _PAIRS),
    Refused("gpt-oss (attention sinks)", "gpt_oss", "attention with 's_aux'", _GROUPED),
    Refused("Llama 4 (text)", "llama4_text", "layers of the kind 'chunked_attention'", _GROUPED),
    Refused(
        "Phi-3.5-MoE",
        "phimoe",
        "a sliding window that is only in its mask",
        # Wider than the probe at the start, which could not notice it.
        {**_PAIRS, "num_local_experts": 4, "sliding_window": 64},
    ),
)


def build(row: Architecture | Refused, **options: Any) -> PreTrainedModel:
    """A tiny model of an architecture in float32, with the same weights each time; its matrices
    are bfloat16's, as in published checkpoints."""
    given = {**_SIZES, **row.options, **options}
    key = row.model_type, repr(given)
    if key not in _BUILT:
        _BUILT[key] = _built(row.model_type, given)
    return copy.deepcopy(_BUILT[key])


_BUILT: dict[tuple[str, str], PreTrainedModel] = {}


def _built(model_type: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # By default biases are 0 and norms 1, and leaving them out would not show.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(parameter.bfloat16())
    return model


def document() -> str:
    """docs/architectures.md, from the tables above."""
    supported = "\n".join(f"| {r.name} | `{r.model_type}` | {r.tried} |" for r in SUPPORTED)
    refused = "\n".join(f"| {r.name} | `{r.model_type}` | {r.reason} |" for r in REFUSED)
    heads = "\n".join(f"| {' | '.join(row)} |" for row in _HEADS)
    return _PAGE.format(supported=supported, heads=heads, refused=refused)


# Method, layout, what it is recognised by, tensors.
_HEADS = (
    (
        "`medusa`",
        "the authors', vLLM's",
        "`medusa_num_heads` in `config.json`, or `model_type` `medusa`",
        "`HEAD.LAYER.linear.*` and `HEAD.LAYERS.weight`; or `blocks.HEAD.layers.LAYER.*` and"
        " `lm_heads.HEAD.weight` or `lm_head.weight`",
    ),
    (
        "`medusa`",
        "Tandem's own, for multi-token prediction",
        "these keys, and `layer_config`, the configuration of a layer",
        "`blocks.HEAD.self_attn.*`, `.mlp.*` and the layer's norms",
    ),
    (
        "`hydra`",
        "the authors'",
        "`hydra_num_heads` in `config.json`",
        "`hydra_mlp.*`, `hydra_lm_head.*`; with a prefix layer `prefix_embeding_layer.*`",
    ),
    (
        "`eagle`",
        "EAGLE and EAGLE-2, the authors'",
        "the tensor `fc.weight`",
        "`fc.*`, `layers.0.*`",
    ),
    (
        "`eagle`",
        "EAGLE-3, the authors' and speculators'",
        "`fc.weight` and `midlayer.*` or `layers.0.hidden_norm.weight`",
        "these, `norm.weight`, `lm_head.weight`, `d2t`",
    ),
)

_PAGE = """\
# Which models can be served

Written by `python -m tests.support.models.architectures` from the table that
`tests/unit/inference/passes/test_architectures.py` runs; do not edit.

## Supported

Each architecture is tested with tiny random weights in float32:

- **Logits** equal those of the model's own attention, one token at a time (within 1e-4). The tests
  cover ragged batches with rollbacks, chunked prompts, and sequences longer than the window.
- **Trees** of up to 16 random nodes, fed in two parts, give the same logits on every path. The
  tests cover windows shorter than a tree's depth, and decoding after an accepted path.
- **Greedy text** through a drafter's and a target's engine equals that of
  `transformers`, token for token.

| architecture | `model_type` | tested besides causal attention |
|---|---|---|
{supported}

With torch, Llama, Mistral, Qwen2 and Qwen3 run as a plain list of operators
(`tandem/inference/passes/torch_llama.py`). The others run through the modules of `transformers`.

OpenVINO (`ENGINE`, on a CPU) is tested against the same logits for all of them except Gemma 2. For
Gemma 2, whose attention scores are capped, the service logs a warning and uses torch. Trees of
models with sliding windows also run with torch.

A target never draws ids that its tokenizer has no token for: rows that pad the model's vocabulary
(Qwen, Phi), and holes in it. They are no text. This is a part of the law: all other ids keep their
ratios, and log probabilities are those of the rest. `TANDEM_TARGET_PADDED_IDS=keep` serves the
model's own distribution; texts then equal those of `transformers` also where such an id is drawn.

A checkpoint with `longrope` is served up to its original length, for instance 4,096 positions for
a Phi-3 checkpoint of 128k tokens. Beyond it, `transformers` would switch the frequencies of the
whole batch.

## Heads

[Heads](recipes.md#heads) are recognised by their files. Weights must be `*.safetensors`.

| method | layout | recognised by | tensors |
|---|---|---|---|
{heads}

The layer of an EAGLE head is Llama's or Qwen3's. Embedding and output matrix come from the target's
checkpoint where the head has none. The target can have any supported architecture. Tests compare
the rows of each layout with the paper's formula, and those of EAGLE with the layers of
`transformers`.

## Refused

A service refuses these at its start, with the reason:

| architecture | `model_type` | reason |
|---|---|---|
{refused}

Other models are refused for the same reasons:

- recurrent and hybrid models, such as Mamba-2, Zamba, Bamba, Falcon-H1, Qwen3-Next and xLSTM;
- older models with attention code of their own, such as GPT-Neo, CodeGen, XGLM and BioGPT;
- models with another form of KV cache: DeepSeek-V2 and V3, for which `transformers` stores latents.

## Not tested

A service checks any other decoder at its start. It feeds 24 tokens (72 on a GPU and with OpenVINO,
144 with vLLM) in one plain pass, and then as a ragged batch with a rollback. If a layer differs by
more than the model's own noise explains, it refuses the model, and says which layers, which rows,
and by how much. If only a small tree differs, it serves the model without trees. This check cannot
find differences that begin after these tokens,
such as sparse attention over long texts. Sliding windows are checked by configuration: a layer that
is configured to slide must pass its window to the attention.

Never tested: models with images or sound, quantised weights, and one model on several devices with
Tandem's own engine.

Next: [recipes](recipes.md) for drafting methods, [settings](settings.md) for back ends.
"""


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
