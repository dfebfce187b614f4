"""docs/errors.md against the contract and the code."""

from __future__ import annotations

import re

import grpc
import pytest

from tandem import errors
from tandem.rpc.status import code_of, from_peer
from tests.support.repository import ROOT

DOCUMENT = (ROOT / "docs" / "errors.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in DOCUMENT.splitlines()
    if line.startswith("| `")
]
LISTED = {row[0].strip("`") for row in ROWS}
# gRPC's own, before any of our code.
GRPCS = {"UNIMPLEMENTED"}


def kinds(kind: type[errors.TandemError]) -> list[type[errors.TandemError]]:
    return [kind, *(one for below in kind.__subclasses__() for one in kinds(below))]


def test_the_contract_and_the_page_list_the_same() -> None:
    contract = (ROOT / "protos/tandem/orchestrator/v1/orchestrator.proto").read_text()
    section = contract.partition("// Errors:")[2].partition("rpc Generate")[0]
    assert set(re.findall(r"^ *//   ([A-Z_]{5,}) ", section, re.MULTILINE)) | GRPCS == LISTED


def test_every_error_of_ours_is_told() -> None:
    between = DOCUMENT.partition("Between the services")[2]
    told = LISTED | set(re.findall(r"`([A-Z_]+)`", between))
    # One that ends a service's start has no status, and is a bug in a call.
    assert {code_of(kind("")).name for kind in kinds(errors.TandemError)} <= told


@pytest.mark.parametrize("quote", [row[2].strip('"') for row in ROWS if row[2]])
def test_what_is_quoted_is_said(quote: str) -> None:
    folders = ("orchestrator", "tandem/rpc")
    sources = [path.read_text() for one in folders for path in (ROOT / one).rglob("*.py")]
    # A sentence may go on in the next line, and has numbers in it.
    assert any(quote in re.sub(r'"\s*f?"', "", source) for source in sources), quote


def test_each_row_says_what_to_do() -> None:
    assert all(len(row) == 5 and row[1] and row[3] and row[4] for row in ROWS)


def test_a_call_that_was_cut_off_has_not_failed_by_itself() -> None:
    """gRPC ends one whose connection goes before its status comes with an INTERNAL of its own."""
    internal = grpc.StatusCode.INTERNAL
    cut = from_peer("target", "there", internal, "Internal error from Core")
    assert isinstance(cut, errors.Unavailable)
    assert isinstance(from_peer("target", "there", internal, "its own"), errors.PeerFailure)


def test_a_peer_without_room_says_when_to_come_again() -> None:
    error = from_peer("target", "there", grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert isinstance(error, errors.Exhausted)
    assert error.retry_seconds == 1.0
