"""The target's settings, from TANDEM_TARGET_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from tandem.settings import MOST_NODES, ModelSettings, Names


class TargetSettings(ModelSettings):
    """Everything that can be set about a target."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TARGET_")
    others = ("VLLM_",)  # see `VllmSettings`

    engine: Literal["auto", "torch", "openvino", "vllm"] = Field(  # type: ignore[assignment]
        "auto",
        description="what computes the model. vllm: vLLM, on one or several devices (see"
        " TANDEM_TARGET_VLLM_*). auto: torch; on a CPU it changes to OpenVINO's runtime if that"
        " gives the same logits and is faster, and the next start begins with the faster one",
    )
    model: str = Field("models/target", description="directory or hub id of the checkpoint")
    adapter: str = Field(
        "",
        description="folder of a low-rank adapter (peft's files) that is merged into MODEL's"
        " weights; texts follow the adapted model. Empty for none",
    )
    extra_embeddings: str = Field(
        "",
        description="folder with extra_embeddings.safetensors: additional input embeddings for the"
        " probes of drafters (look-ahead tokens). They change no text. Empty takes those in"
        " ADAPTER's folder, if there are any",
    )
    padded_ids: Literal["mask", "keep"] = Field(
        "mask",
        description="ids of the model that its tokenizer has no token for (rows that pad the"
        " vocabulary): mask never draws them, and the probabilities of all others grow by their"
        " share; keep draws them as the model does, and they are no text",
    )
    max_nodes: int = Field(
        64,
        ge=0,
        le=MOST_NODES,
        description="most tokens of a draft that is a tree, its probes included; 0 accepts chains"
        " without probes only",
    )
    max_rounds: int = Field(
        32,
        ge=1,
        le=1024,
        description="rounds that a caller may request in advance, without drafts or with drafts of"
        " the target's own; also the most that are computed for a caller that has stopped reading",
    )
    drafts: str = Field(
        "",
        description="recipe by which the target drafts in its own process: the name of a method or"
        " a TOML file; its settings are those of a drafter (`TANDEM_DRAFTER_MODEL` and so on)."
        " Empty: the target does not draft",
    )
    feedback: str = Field(
        "none",
        pattern=r"^(none|(\d{1,4}|last)(,(\d{1,4}|last))*)$",
        description="layers whose hidden states drafters can get, such as `2,16,29,last`: 0 is the"
        " embedding, i the output of layer i, `last` what the output matrix reads; at most four",
    )
    draft_device: str = Field("", description="device of the models of DRAFTS; empty takes DEVICE")
    overlap: str = Field(
        "",
        pattern=r"^(|[1-9]\d{0,3}|cycles)$",
        description="layers that overlap in rounds without a draft: while a token goes through the"
        " upper layers, guesses of the next one go through the lower ones, and a right guess goes"
        " on from there. A number is that of the lower layers, whose exit guesses; `cycles` is for"
        " a model that uses its layers several times. With the same seed, texts in float32 stay"
        " the same. Empty for none",
    )
    overlap_guesses: int = Field(
        1,
        ge=1,
        le=16,
        description="guesses of the next token that go through the lower layers together, where"
        " OVERLAP names an exit",
    )
    overlap_pipelines: int = Field(
        1,
        ge=1,
        le=2,
        description="2 computes the lower and the upper layers at the same time, with half of the"
        " CPU threads each, where OVERLAP names an exit",
    )
    verifiers: Names = Field(
        (),
        description="rules of installed packages to offer beside the built-in ones, by name, comma"
        " separated; this runs the packages' code",
    )


class VllmSettings(BaseSettings):
    """Everything that can be set about vLLM beside the target's own settings."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TARGET_VLLM_", frozen=True, extra="ignore")

    tensor_parallel: int = Field(
        1, ge=1, description="devices that share each layer; on a CPU processes"
    )
    nodes: int = Field(
        1, ge=1, description="machines among which the devices of TENSOR_PARALLEL are divided"
    )
    node: int = Field(
        0, ge=0, description="number of this machine; 0 serves, the others compute for it"
    )
    leader: str = Field(
        "",
        description="host:port of machine 0, reachable from the others, where they meet; only with"
        " several NODES",
    )
    quantization: str = Field(
        "", description="vLLM's name of a quantisation; empty takes the checkpoint's own, if any"
    )
    memory_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of a GPU's memory for weights and KV cache, unless CACHE_TOKENS is set",
    )
    eager: bool = Field(False, description="whether passes run without compilation and CUDA graphs")
    arguments: Path | None = Field(
        None,
        description="TOML file of further arguments of vLLM's engine, by their names in its"
        " `EngineArgs`",
    )
    checked: bool = Field(
        True,
        description="whether the target at its start compares logits with those of transformers"
        " (plain weights only); for that the host computes one pass of the model",
    )
