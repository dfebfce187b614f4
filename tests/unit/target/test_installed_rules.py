"""Rules of other packages: found by name, checked, and loaded only if the settings name them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.errors import StartupError
from target_svc.messages import verifier_infos
from target_svc.rules import BUILT_IN, GROUP, fault_of, rules_with
from tests.support.installed_packages import install, install_examples, on_path
from tests.support.processes.refusals import refusal

MODULE = "own_rule"
RULE = """
from dataclasses import dataclass
from typing import ClassVar

from tandem.speculation.tree import DraftShape
from tandem.verification.token import TokenVerifier
from tandem.verification.verifier import RuleOption


@dataclass(frozen=True)
class OwnVerifier(TokenVerifier):
    name: ClassVar = "own"
    lossless: ClassVar = True
    options: ClassVar = (RuleOption("share", 1.0, 0.0, 1.0),)

    share: float = 1.0


own = OwnVerifier()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_path(tmp_path, MODULE, "tandem_lenient"):
        yield tmp_path


def installed(folder: Path, text: str, name: str = "own") -> None:
    install(folder, MODULE, text, {GROUP: {name: f"{MODULE}:own"}})


def test_it_is_offered_with_its_traits(folder: Path) -> None:
    install_examples(folder)
    rules = rules_with(["lossy_lenient"])
    assert set(rules) == {*BUILT_IN, "lossy_lenient"}
    (info,) = (info for info in verifier_infos(rules) if info.name == "lossy_lenient")
    assert (info.lossless, info.resumable, info.options[0].name) == (False, True, "factor")
    assert rules["lossy_lenient"].with_options({"factor": 3.0}) != rules["lossy_lenient"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_more_is_asked_than_of_a_built_in_rule(name: str) -> None:
    assert not fault_of(BUILT_IN[name], name)


def test_it_is_imported_only_if_it_is_named(folder: Path) -> None:
    installed(folder, "raise SystemExit(3)")
    assert rules_with(()) == BUILT_IN
    assert MODULE not in sys.modules


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("import dataclass", "import nothing", "cannot be imported from own_rule:own: Import"),
        ("own = OwnVerifier()", "own = OwnVerifier", "is a class: register an object, such as own"),
        ("own = OwnVerifier()", "own = 1", "is no tandem.verification.verifier.Verifier"),
        ('= "own"', '= "mine"', "lacks its name: name = 'own'"),
        ("lossless: ClassVar = True", "lossless: ClassVar = 1", "lacks lossless: True if texts"),
        ("lossless: ClassVar = True", "lossless: ClassVar = False", "has lossless = False: a "),
        ("options:", "takes: ClassVar = 2\n    options:", "has takes, which must be a DraftShape"),
        ("options:", "trees: ClassVar = None\n    options:", "takes TREE, and lacks trees"),
        ("options:", "takes: ClassVar = DraftShape.CHAIN\n    options:", "has trees, and takes"),
        (
            "options:",
            "needs_every_draft: ClassVar = True\n    options:",
            "needs_every_draft, and lacks carry_from, pack, unpack, levels_of: how its state",
        ),
        ("share: float", "pack = min\n    share: float", "keeps a state, and lacks needs_"),
        ("0.0, 1.0)", "0.0, 0.5)", "the option share, whose default must be within its bounds"),
        ("0.0, 1.0),)", "0.0, 1.0),)[0].most", "has options, which must be a tuple of Rule"),
        ('RuleOption("share", 1.0', '("share", 1.0', "has options, which must be a tuple of Rule"),
        ("0.0, 1.0)", "0.0, None)", "whose bounds and default must be finite numbers"),
        ("share: float", "_carry = min\n    share: float", "keeps a state, and lacks needs_every"),
        ("share: float = 1.0", "other: float = 1.0", "the option share, and lacks a field"),
        ("(frozen=True)", "", "must be hashable; with options, a dataclass(frozen=True)"),
        ("@dataclass(frozen=True)", "", "must be hashable; with options, a dataclass(frozen=True)"),
    ],
)
def test_what_is_missing_is_said(folder: Path, old: str, new: str, sentence: str) -> None:
    assert old in RULE
    installed(folder, RULE.replace(old, new))
    with pytest.raises(StartupError) as refused:
        rules_with(["own"])
    assert f"{GROUP}: 'own' of the package own_rule 0.1 " in str(refused.value)
    assert sentence in str(refused.value)


def test_names_that_are_taken_or_unknown_are_refused(folder: Path) -> None:
    installed(folder, "raise SystemExit(3)", "block")
    for name, sentence in (("block", "is a built-in rule"), ("nil", "no installed package")):
        with pytest.raises(StartupError, match=f"TANDEM_TARGET_VERIFIERS: .*{sentence}"):
            rules_with([name])
    assert MODULE not in sys.modules


def test_a_service_exits_with_2_and_one_line(folder: Path) -> None:
    installed(folder, RULE.replace('= "own"', '= "mine"'))
    given = {"PYTHONPATH": str(folder), "TANDEM_TARGET_VERIFIERS": "own"}
    assert refusal("target_svc", given) == (
        f"target: {GROUP}: 'own' of the package own_rule 0.1 lacks its name: name = 'own'"
    )
