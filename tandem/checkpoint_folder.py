"""What a path that should be a checkpoint is instead; without torch."""

from __future__ import annotations

from pathlib import Path


def gguf_advice(model: str) -> str:
    """What to do with a GGUF file, or with a folder that has one; empty for any other path."""
    path = Path(model)
    files = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.glob("*.gguf"))
    if not files:
        return ""
    folder, name = str(files[0].parent), files[0].name
    return (
        "it is a GGUF file, and safetensors are served; install gguf, and in Python read it by"
        f" AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={name!r},"
        " quantization_config=GgufConfig(dequantize=True)) and its tokenizer by"
        " AutoTokenizer.from_pretrained, save both by save_pretrained, and set MODEL to that folder"
    )
