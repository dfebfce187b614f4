"""What `tandem plan --model` says of memory is what a decoder's pool takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.tools.cli.main import app
from tandem.tools.planning.memory import memory_of
from tests.support.decoders import decoder_over
from tests.support.models.architectures import KINDS, Architecture, build
from tests.support.models.tiny import save_random_llama


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.name)
def test_a_token_takes_what_is_said(row: Architecture, tmp_path: Path) -> None:
    model = build(row)
    model.config.save_pretrained(tmp_path)
    pool = decoder_over(model, "memory", cache_tokens=64, engine="torch").pool
    assert memory_of(str(tmp_path), "float32").bytes_a_token == pool.bytes_per_position


def test_texts_of_a_length(tmp_path: Path) -> None:
    save_random_llama(tmp_path, 1)
    own = ["plan", "--model", str(tmp_path), "--length", "100", "--slots", "8"]
    said = CliRunner().invoke(app, [*own, "--dtype", "bfloat16", "--json"])
    (row,) = json.loads(said.output)
    # Keys and values of 2 heads of 8 numbers.
    assert row["bytes_a_token"] == 2 * 2 * 8 * 2
    assert (row["tokens"], row["bytes_a_text"], row["bytes_of_all"]) == (100, 6400, 51200)
    assert "6.2 KiB" in CliRunner().invoke(app, [*own, "--dtype", "bfloat16"]).output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "/nowhere"], "--model takes a checkpoint's directory"),
        (["--model", "", "--length", "1000"], "holds 512 tokens"),
        (["--model", "", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16"),
        (["--model", "", "run.json"], "--model goes with --length, --dtype and --slots alone"),
        (["--length", "10", "run.json"], "--length and --dtype go with --model"),
        ([], "name a SOURCE"),
    ],
)
def test_what_cannot_be_computed(options: list[str], sentence: str, tmp_path: Path) -> None:
    save_random_llama(tmp_path, 1)
    options = [str(tmp_path) if option == "" else option for option in options]
    run = CliRunner().invoke(app, ["plan", *options])
    assert run.exit_code == 2
    assert sentence in " ".join(run.output.split())
