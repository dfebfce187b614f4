"""The page of `tandem trace view`: it contains everything, and loads nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.show import view
from tests.support.traces import Tape, request, request_ms

EVIL = "</script><script>alert(1)</script><!--"


def page_of(tape: Tape, folder: Path) -> tuple[str, int]:
    pieces: list[str] = []
    further = view.write(Recording([str(tape.write(folder / "trace.jsonl"))]), pieces.append)
    return "".join(pieces), further


def data_in(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    data: dict[str, Any] = json.loads(found)
    return data


@pytest.fixture
def tape() -> Tape:
    tape = Tape()
    request(tape, [(4, 2), (2, 2)], trace=1)
    request(tape, [(0, 0)], trace=2, name=EVIL)
    return tape


def test_every_request_and_span_is_in_the_page(tape: Tape, tmp_path: Path) -> None:
    page, further = page_of(tape, tmp_path)
    data = data_in(page)
    assert further == 0
    first, second = data["requests"]
    assert (first["id"], second["id"]) == ("request-1", EVIL)
    assert sum(map(len, tape.spans.values())) == len(first["spans"]) + len(second["spans"])
    wall = request_ms([(4, 2), (2, 2)]) * 1e3
    assert first["us"] == pytest.approx(wall)
    assert sum(first["stages"].values()) == pytest.approx(wall)
    root, *below = first["spans"]
    assert data["names"][root[0]] == "generate"
    assert root[2:6] == [0, 0, first["us"], first["us"]]
    assert all(0 < row[2] <= 5 for row in below)
    rounds = [row[6] for row in below if len(row) > 6]
    assert rounds == [
        {"round": 1, "depth": 4, "nodes": 4, "accepted": 2},
        {"round": 2, "depth": 2, "nodes": 2, "accepted": 2},
    ]


def test_texts_are_there_where_they_were_recorded(tmp_path: Path) -> None:
    tape = Tape()
    root = tape.span("orchestrator", "generate", 0, 9, kind="SERVER")
    said: dict[str, Any] = {"tandem__text__drafted": [" a", "<b"], "tandem__text__next": "\n"}
    tape.span("orchestrator", "round", 1, 8, root, tandem__accepted=1, tandem__depth=2, **said)
    page, _ = page_of(tape, tmp_path)
    ((_, round_),) = [r["spans"] for r in data_in(page)["requests"]]
    assert round_[6]["texts"] == {"drafted": [" a", "<b"], "next": "\n"}


def test_a_bonus_behind_a_trees_shallow_leaf_is_said_so(tmp_path: Path) -> None:
    tape = Tape()
    root = tape.span("orchestrator", "generate", 0, 9, kind="SERVER")
    tree = {"accepted": 1, "depth": 2, "nodes": 3, "bonus": True}
    fields: dict[str, Any] = {f"tandem__{name}": value for name, value in tree.items()}
    tape.span("orchestrator", "round", 1, 8, root, **fields)
    page, _ = page_of(tape, tmp_path)
    ((_, round_),) = [r["spans"] for r in data_in(page)["requests"]]
    assert round_[6]["bonus"] is True


def test_nothing_recorded_ends_the_pages_script(tape: Tape, tmp_path: Path) -> None:
    page, _ = page_of(tape, tmp_path)
    assert EVIL not in page
    assert page.count("<script") == page.count("</script>") == 2


def test_the_page_asks_for_nothing_else(tape: Tape, tmp_path: Path) -> None:
    page, _ = page_of(tape, tmp_path)
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", page)
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]


def test_requests_beyond_the_limit_are_counted(
    tape: Tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "MAX_REQUESTS", 1)
    page, further = page_of(tape, tmp_path)
    assert further == 1
    assert len(data_in(page)["requests"]) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to parse the script")
def test_the_pages_script_is_javascript(tape: Tape, tmp_path: Path) -> None:
    page, _ = page_of(tape, tmp_path)
    script = page.split("<script>")[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    run = subprocess.run(
        ["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
