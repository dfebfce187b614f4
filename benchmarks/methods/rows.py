"""The methods that are measured, and how each is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.tools.local.pair import EMBEDDED_HEADS

DEPTH, NODES, RULE = 4, 16, "token"
_ADAPTER = "models/layerskip"
_SPACE = {"ADAPTER": "models/space", "EXTRA_EMBEDDINGS": "models/space"}
# All candidates of its defaults.
_LOOKAHEAD = 28


@dataclass(frozen=True)
class Method:
    """A row.

    Attributes:
        recipe: a built-in one, or a head's folder.
        drafter: settings of the drafter, without their prefix.
        target: of the target.
        rule: that decides.
        depth: of a draft.
        nodes: of a tree; 0 for chains.
    """

    recipe: str = "model"
    drafter: Mapping[str, str] = field(default_factory=dict)
    target: Mapping[str, str] = field(default_factory=dict)
    rule: str = RULE
    depth: int = DEPTH
    nodes: int = 0


_PART = {"MODEL": "models/target"}
_OWN = {**_PART, "EXIT": "3"}
# SKIP and INDEX are filled in when a run begins.
METHODS: dict[str, Method] = {
    "model": Method(),
    "model, depth 8": Method(depth=8),
    "model, adaptive, depth 8": Method(drafter={"STOP": "adaptive"}, depth=8),
    "model, confidence, depth 8": Method(drafter={"STOP": "confidence"}, depth=8),
    "tree": Method("tree", nodes=NODES),
    "chains, spectr": Method("chains", nodes=NODES, rule="spectr"),
    "chains, gbv": Method("chains", nodes=NODES, rule="gbv"),
    "forest": Method("forest", nodes=NODES),
    "model, block": Method(rule="block"),
    "lookup": Method("lookup"),
    "retrieval, prompt": Method("retrieval", nodes=NODES),
    "retrieval, prompt and bigrams": Method(
        "retrieval", {"STORES": "prompt,bigrams", "INDEX": ""}, nodes=NODES
    ),
    "retrieval, corpus": Method(
        "retrieval", {"STORES": "corpus", "INDEX": "", "MAX_NODES": "64"}, nodes=64
    ),
    "retrieval, prompt and corpus": Method(
        "retrieval", {"STORES": "prompt,corpus", "INDEX": "", "MAX_NODES": "64"}, nodes=64
    ),
    "cascade": Method("cascade"),
    "cascade, depth 8": Method("cascade", depth=8),
    "horizontal": Method("horizontal"),
    # Suffixes take a third of the depth: the model drafts 4 tokens of the first two's.
    "phrases, no suffixes": Method("phrases", {"PHRASES_SUFFIXES": "0"}, nodes=NODES),
    "phrases, depth 6": Method("phrases", depth=6, nodes=NODES),
    "phrases, no suffixes, depth 6": Method(
        "phrases", {"PHRASES_SUFFIXES": "0"}, depth=6, nodes=NODES
    ),
    "phrases, kept, depth 6": Method("phrases", {"PHRASES_KEPT": "true"}, depth=6, nodes=NODES),
    "phrases": Method("phrases", nodes=NODES),
    "exit 3": Method(drafter=_OWN),
    "layerskip, exit 3": Method(
        drafter={**_OWN, "ADAPTER": _ADAPTER}, target={"ADAPTER": _ADAPTER}
    ),
    "skip": Method(drafter={**_PART, "SKIP": ""}),
    "skip, adaptive, depth 8": Method(drafter={**_PART, "SKIP": "", "STOP": "adaptive"}, depth=8),
    **{name: Method(name, nodes=NODES) for name in EMBEDDED_HEADS},
    "jacobi": Method("jacobi"),
    "cllm, jacobi": Method("jacobi", target={"ADAPTER": "models/cllm"}),
    "lookahead": Method("lookahead", nodes=_LOOKAHEAD),
    "lookahead, window 0": Method("lookahead", {"LOOKAHEAD_WINDOW": "0"}, nodes=_LOOKAHEAD),
    "masks, pass": Method("masks", target={"EXTRA_EMBEDDINGS": "models/pass"}),
    "masks, space": Method("masks", target=_SPACE),
    "medusa, lossy_typical": Method("medusa", nodes=NODES, rule="lossy_typical"),
    "model, lossy_topk_gap": Method(rule="lossy_topk_gap"),
    "model, lossy_fallback, confidence": Method(
        drafter={"STOP": "confidence"}, rule="lossy_fallback", depth=8
    ),
}
