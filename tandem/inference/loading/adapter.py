"""Low-rank changes of a checkpoint (LoRA, Hu et al., arXiv 2106.09685), in the files of `peft`.

They are added to the weights when a checkpoint is read, so that the adapted model is a model like
any other: with its own fingerprint, in every back end, without a further operator.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tandem.errors import StartupError, first_line
from tandem.inference.fingerprint import fingerprints

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_fingerprint(folder: str) -> str:
    """SHA-256 of an adapter's weights; empty for no folder.

    Raises:
        StartupError: there are none.
    """
    if not folder:
        return ""
    try:
        with (Path(folder) / WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StartupError(f"no adapter in {folder!r}: {first_line(error)}") from error


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with an adapter's changes in its weights.

    Args:
        model: loaded, whole. It is changed.
        folder: of the adapter, local.

    Raises:
        StartupError: the adapter is missing, broken, or for another model; in one sentence.
    """
    place = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (place / name).is_file():
            raise StartupError(f"no adapter in {folder!r}: there is no {name}")
    try:
        own = json.loads((place / CONFIG).read_text())
        made_for = str(own.get("tandem", {}).get("made_for", ""))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise StartupError(f"cannot read {folder}/{CONFIG}: {first_line(error)}") from error
    if made_for and made_for != fingerprints(model, "").weights:
        raise StartupError(
            f"the adapter {folder!r} is for another model: its weights have the fingerprint"
            f" {made_for[:12]}"
        )
    try:
        return _merged(model, place, own)
    except StartupError:
        raise
    except Exception as error:  # peft and safetensors pass on exceptions of any kind
        raise StartupError(
            f"cannot use the adapter {folder!r}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _merged(model: PreTrainedModel, place: Path, own: dict[str, Any]) -> PreTrainedModel:
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict  # takes seconds
    from safetensors.torch import load_file

    tensors = load_file(place / WEIGHTS, device=str(model.device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the key `tandem`, and of what is checked below
        config: Any = PeftConfig.from_pretrained(str(place))
        adapted: Any = get_peft_model(model, config)
        if not hasattr(adapted, "merge_and_unload"):
            raise StartupError(
                f"the adapter {str(place)!r} is of the kind {own.get('peft_type')}, which cannot be"
                " added to weights; LORA can"
            )
        found: Any = set_peft_model_state_dict(adapted, tensors)
        lacking = [name for name in found.missing_keys if ".lora_" in name]
        if lacking or found.unexpected_keys:
            odd = [*lacking, *found.unexpected_keys]
            raise StartupError(
                f"the adapter {str(place)!r} does not fit the model: {odd[0]} is"
                f" {'missing' if lacking else 'none of its weights'}"
            )
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    return merged.requires_grad_(False)
