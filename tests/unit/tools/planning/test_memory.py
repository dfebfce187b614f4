"""What `tandem plan --model` says of memory is what a decoder's pool takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.checkpoint_memory import memory_of, shares_of
from tandem.tools.cli.main import app
from tests.support.decoders import decoder_over
from tests.support.models.architectures import KINDS, Architecture, build
from tests.support.models.tiny import random_llama, save_random_llama


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
    assert row["bytes_in_huge_pages"] == 4 * (2 << 20)
    assert "6.2 KiB" in CliRunner().invoke(app, [*own, "--dtype", "bfloat16"]).output


def test_a_text_alone_takes_whole_pages(tmp_path: Path) -> None:
    """An extent for keys and one for values, of each of two heads."""
    save_random_llama(tmp_path, 1)
    memory, page = memory_of(str(tmp_path), "float32"), 2 << 20
    assert memory.extents == 4
    a_page = page // (8 * 4)  # tokens of a page
    assert [memory.in_pages(tokens) // page for tokens in (1, a_page, a_page + 1)] == [4, 4, 8]


def checkpoint(folder: Path, weights: int, layers: int) -> str:
    random_llama(1, layers=layers).config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    os.truncate(folder / "model.safetensors", weights)
    return str(folder)


def test_models_of_one_device_can_hold_about_as_many_tokens(tmp_path: Path) -> None:
    large = checkpoint(tmp_path / "large", 15 << 30, 400)
    small = checkpoint(tmp_path / "small", 1 << 30, 80)
    for total in (22 << 30, 40 << 30, 80 << 30):
        shares = shares_of([large, small], total)
        assert sum(shares) == pytest.approx(1)
        held = [
            (total * share - (weights << 30) - (2 << 30)) / memory_of(model).bytes_a_token
            for share, model, weights in zip(shares, (large, small), (15, 1), strict=True)
        ]
        assert held[0] == pytest.approx(held[1])
        assert held[0] > 4096
    # Of a device that is not known each has its weights, and room for a text.
    large_part, small_part = shares_of([large, small])
    assert 22 * large_part > 17
    assert 22 * small_part > 3
    assert shares_of([large]) == [1]
    # A head's folder has no configuration of a model.
    (tmp_path / "small" / "config.json").unlink()
    assert 0.03 < shares_of([large, small], 80 << 30)[1] < shares[1]
    # Another dtype of its weights is none of its cache.
    config = tmp_path / "large" / "config.json"
    plain = shares_of([large, small], 80 << 30)
    config.write_text(config.read_text().replace('"float32"', '"float8_e4m3fn"'))
    assert shares_of([large, small], 80 << 30) == plain
    # A download that was broken off.
    (tmp_path / "small" / "model.safetensors").unlink()
    (tmp_path / "small" / "model.safetensors").symlink_to(tmp_path / "nowhere")
    assert shares_of([large, small]) == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize("unknown", ["no/such-model", "/no/such/folder", "a//b", ""])
def test_a_model_that_is_not_here_has_a_fifth(unknown: str, tmp_path: Path) -> None:
    large = checkpoint(tmp_path, 15 << 30, 4)
    assert shares_of([large, unknown]) == pytest.approx([0.8, 0.2])
    assert shares_of([unknown, large, large]) == pytest.approx([0.8, 0.1, 0.1])
    assert shares_of([unknown]) == [1]


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
