"""Drafting methods by name, and how a service of each is loaded. A new one is one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.drafting.drafter import Drafter
from tandem.drafting.lookup import LookupDrafter
from tandem.engine.admission import Admission
from tandem.engine.engine import Engine
from tandem.engine.schedule import BatchLimits
from tandem.errors import StartupError
from tandem.rpc.messages import PROTOCOL_VERSION
from tandem.serving.fingerprint import fingerprint_of
from tandem.serving.servicer import Loaded, admission_limits
from tandem.settings import MIB

if TYPE_CHECKING:
    from tandem.engine.asks import Truncation
    from tandem.inference.decoder import Decoder


@dataclass(frozen=True)
class LoadedDrafter(Loaded):
    """A drafter with its method.

    Attributes:
        drafter: drafts.
    """

    drafter: Drafter


def _load_model(settings: DrafterSettings) -> LoadedDrafter:
    """Drafts by a decoder."""
    # Here, since the other methods run where torch is not installed.
    from tandem.drafting.model import ModelDrafter
    from tandem.engine.asks import Truncation
    from tandem.serving.model import engine_over, info_of, load_decoder

    decoder = load_decoder(settings, drafts=True)
    truncation = Truncation(settings.draft_mass, settings.draft_support)
    return LoadedDrafter(
        engine_over(decoder, settings, "drafter-engine"),
        info_of(decoder, settings, "model", settings.draft_mass, settings.draft_support),
        decoder,
        ModelDrafter(decoder, truncation),
    )


def _load_tree(settings: DrafterSettings) -> LoadedDrafter:
    """Drafts trees by a decoder."""
    from tandem.drafting.tree import TreeDrafter

    def make(decoder: Decoder, truncation: Truncation) -> Drafter:
        return TreeDrafter(decoder, truncation, settings.acceptance, settings.max_nodes)

    return _load_branching(settings, make, *settings.acceptance)


def _load_chains(settings: DrafterSettings) -> LoadedDrafter:
    """Drafts several chains by a decoder."""
    from tandem.drafting.chains import ChainsDrafter

    def make(decoder: Decoder, truncation: Truncation) -> Drafter:
        return ChainsDrafter(decoder, truncation, settings.chains, settings.max_nodes)

    return _load_branching(settings, make, settings.chains)


def _load_branching(
    settings: DrafterSettings, make: Callable[[Decoder, Truncation], Drafter], *law: float
) -> LoadedDrafter:
    """Drafts by a decoder that computes branches."""
    from tandem.engine.asks import Truncation
    from tandem.serving.model import engine_over, info_of, load_decoder

    decoder = load_decoder(settings, drafts=True, trees=True)
    if not decoder.takes_trees:
        raise StartupError(
            f"TANDEM_DRAFTER_METHOD: the model {decoder.name} cannot compute trees; use model"
        )
    truncation = Truncation(settings.draft_mass, settings.draft_support)
    method = settings.method
    info = info_of(decoder, settings, method, settings.draft_mass, settings.draft_support, *law)
    info.max_nodes = settings.max_nodes
    engine = engine_over(decoder, settings, "drafter-engine")
    return LoadedDrafter(engine, info, decoder, make(decoder, truncation))


def _load_lookup(settings: DrafterSettings) -> LoadedDrafter:
    """Drafts from the text itself: no model, no pool, no step of the engine."""
    engine = Engine(
        "drafter-engine", Admission((), admission_limits(settings)), BatchLimits(), None
    )
    info = common_pb2.ModelInfo(
        model="lookup",
        protocol_version=PROTOCOL_VERSION,
        max_length=settings.max_length,
        max_gamma=settings.max_gamma,
        max_sequences=settings.max_sequences,
        device="cpu",
        max_message_bytes=settings.max_message_mib * MIB,
        fingerprint=fingerprint_of("lookup", settings.lookup_ngram, settings.lookup_window),
        zone=settings.zone,
    )
    drafter = LookupDrafter(settings.lookup_ngram, settings.lookup_window)
    return LoadedDrafter(engine, info, None, drafter)


METHODS: dict[str, Callable[[DrafterSettings], LoadedDrafter]] = {
    "model": _load_model,
    "tree": _load_tree,
    "chains": _load_chains,
    "lookup": _load_lookup,
}
