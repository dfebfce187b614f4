"""Drafters as they are read, made and written."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from tandem.errors import StartupError
from tandem.inference.loading.shared_layers import CYCLES, as_stored, share_layers
from tandem.vocabulary import difference
from tandem.whole_files import disk_errors

# Of a fresh drafter: the width of a head, and of the feed-forward layer over the model's.
_HEAD, _INNER = 32, 3
# The spread of a fresh matrix.
_SPREAD = 0.02


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's own progress bars and warnings."""
    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def read_model(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A checkpoint's model, for evaluation.

    Raises:
        StartupError: there is none, or it cannot be read.
    """
    try:
        with quiet():
            config = as_stored(folder, AutoConfig.from_pretrained(folder, local_files_only=True))
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                attn_implementation="sdpa",
            )
            share_layers(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise StartupError(f"cannot read the model {folder}: {_why(folder, error)}") from None
    made: PreTrainedModel = model.to(device).eval()
    return made


def read_tokenizer(folder: str) -> Any:
    """A checkpoint's tokenizer.

    Raises:
        StartupError: it has none.
    """
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise StartupError(
            f"cannot read the tokenizer of {folder}: {_why(folder, error)}"
        ) from None


def require_same(target: Any, drafter: Any) -> None:
    """See that a pair's tokenizers are the same.

    Raises:
        StartupError: they differ; says where.
    """
    differs = difference(target.get_vocab(), drafter.get_vocab())
    if differs:
        raise StartupError(
            f"the tokenizers of target and drafter differ: {differs}. A drafter drafts its target's"
            " tokens: take one of the same family, or a fresh one (layers and width)"
        )


def fresh_drafter(target: str, layers: int, width: int, seed: int) -> PreTrainedModel:
    """A new Llama of the target's vocabulary, with tied embeddings.

    Its embedding begins as the target's, projected onto the directions in which that varies most,
    so that tokens that are alike begin alike.

    Args:
        target: directory of the target's checkpoint.
        layers: of the drafter.
        width: of its hidden states; a multiple of 32.
        seed: of its other weights.

    Raises:
        StartupError: the target cannot be read.
    """
    theirs = read_model(target, torch.bfloat16, torch.device("cpu"))
    table: Any = theirs.get_input_embeddings()
    own = theirs.config.get_text_config()
    config = LlamaConfig(
        vocab_size=table.weight.shape[0],
        hidden_size=width,
        intermediate_size=_INNER * width,
        num_hidden_layers=layers,
        num_attention_heads=width // _HEAD,
        num_key_value_heads=width // _HEAD,
        max_position_embeddings=own.max_position_embeddings,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=_SPREAD,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
    )
    torch.manual_seed(seed)
    drafter = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        drafter.get_input_embeddings().weight.copy_(_projected(table.weight, width))
        for name, weight in drafter.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * layers) ** -0.5)
    return drafter


def _projected(table: Tensor, width: int) -> Tensor:
    """A table [vocabulary, width] that keeps most of another's distances, with a usual spread."""
    centred = table.float() - table.float().mean(0)
    kept = min(width, centred.shape[1])
    _, axes = torch.linalg.eigh(centred.T @ centred)
    found = torch.zeros(len(table), width)
    found[:, :kept] = centred @ axes[:, -kept:]
    spread: Tensor = found / found.std() * _SPREAD
    return spread


def read_drafter(folder: str) -> tuple[PreTrainedModel, torch.dtype]:
    """A drafter to train, with float32 weights, and the dtype of its checkpoint.

    Raises:
        StartupError: it cannot be read.
    """
    model = read_model(folder, torch.float32, torch.device("cpu"))
    if getattr(model.config, CYCLES, 1) != 1:
        raise StartupError(
            f"the drafter {folder} uses its layers several times ({CYCLES}): no such drafter is"
            " trained here"
        )
    with quiet():
        named = AutoConfig.from_pretrained(folder, local_files_only=True).dtype
    # For training too: with dropout, a run that was cut would go on otherwise.
    return model, named or torch.float32


def write_drafter(
    model: nn.Module, dtype: torch.dtype, tokenizer: Any, card: str, folder: Path, scratch: Path
) -> None:
    """Replace the drafter in a folder, file by file; each is whole at any moment.

    Args:
        model: with its float32 weights.
        dtype: of the files.
        tokenizer: of the pair.
        card: its README.
        folder: to write to.
        scratch: a folder on the same disk, for files that are not whole yet.

    Raises:
        OSError: there is no room, or no right to write. What was there stays.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        half: Any = copy.deepcopy(model).to("cpu", dtype)
        with quiet(), disk_errors():
            half.save_pretrained(str(scratch))
            tokenizer.save_pretrained(str(scratch))
        (scratch / "README.md").write_text(card)
        for path in sorted(scratch.iterdir()):
            if path.is_dir():  # chat templates, where a tokenizer has several
                shutil.rmtree(folder / path.name, ignore_errors=True)
            else:
                path.chmod(0o644)
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _why(folder: str, error: Exception) -> str:
    if not Path(folder).is_dir():
        return "there is no such directory, and no such model in the Hugging Face cache"
    return str(error).strip().split("\n")[0]
