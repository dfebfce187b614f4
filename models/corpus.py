"""The training text: sources of Python's standard library, tokenised once into flat files."""

import hashlib
import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 2048
HELD_OUT_PER_MILLE = 15
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})

Tokens = npt.NDArray[np.uint16]


def sources() -> list[tuple[str, str]]:
    """All (relative path, text) of the standard library's Python files, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found.append((relative.as_posix(), text))
    return found


def held_out(name: str) -> bool:
    """Whether a file belongs to the held-out set; depends on its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def wrap(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads and saves it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose only special token separates documents."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return wrap(bpe)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tokens:
    """One flat stream [tokens]: every document preceded by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END)
    pieces: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
        pieces.append(end)
        pieces.extend(encoding.ids)
    pieces.append(end)
    return np.asarray(pieces, dtype=np.uint16)


def build(cache: Path) -> None:
    """Train the tokenizer and write `train.bin`, `held_out.bin` and `corpus.json` into `cache`."""
    files = sources()
    training = [text for name, text in files if not held_out(name)]
    validation = [text for name, text in files if held_out(name)]
    tokenizer = train_tokenizer(training)
    # A fixed shuffle: neighbours in a window should not always be neighbours in a package.
    order = np.random.default_rng(0).permutation(len(training))
    streams = {
        "train": encode(tokenizer, [training[i] for i in order]),
        "held_out": encode(tokenizer, validation),
    }
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(cache / "tokenizer"))
    for name, stream in streams.items():
        stream.tofile(cache / f"{name}.bin")
    facts = {
        "python": sysconfig.get_python_version(),
        "files": {"train": len(training), "held_out": len(validation)},
        "bytes": {
            "train": sum(len(text.encode()) for text in training),
            "held_out": sum(len(text.encode()) for text in validation),
        },
        "tokens": {name: int(stream.size) for name, stream in streams.items()},
    }
    temporary = cache / "corpus.json.tmp"
    temporary.write_text(json.dumps(facts, indent=2) + "\n")
    os.replace(temporary, cache / "corpus.json")
    print(json.dumps(facts), flush=True)


def load(cache: Path, name: str) -> Tokens:
    """The tokenised stream `name`, mapped read-only [tokens]."""
    stream: Tokens = np.memmap(cache / f"{name}.bin", dtype=np.uint16, mode="r")
    return stream


def load_tokenizer(cache: Path) -> PreTrainedTokenizerFast:
    """The tokenizer written by `build`."""
    return wrap(Tokenizer.from_file(str(cache / "tokenizer" / "tokenizer.json")))
