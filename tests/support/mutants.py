"""What a mutant is, and those of prefixes: where texts go, and whose texts share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: what is wrong.
        file: where, from the root.
        old: the text that is replaced; it occurs once.
        new: in its place.
        tests: files of which at least one test must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_PREFIXES = "orchestrator/pool/prefixes.py"
_VALIDATION = "orchestrator/front/validation.py"
_ROUTES = "tests/unit/orchestrator/pool/test_prefixes.py"
_CHATS = "tests/service/replicas/test_prefixes.py"

OF_PREFIXES = (
    Mutant(
        "routing: a block's hash is without its parent",
        _PREFIXES,
        "parent = _hash(parent + tokens",
        "parent = _hash(b'' + tokens",
        (_ROUTES,),
    ),
    Mutant(
        "routing: the salt is left out",
        _PREFIXES,
        'self._root = _hash(salt.encode(), b"salt")',
        'self._root = _hash(b"", b"salt")',
        (_ROUTES,),
    ),
    Mutant(
        "routing: the load has no bound",
        _PREFIXES,
        "if each.taken < math.ceil(share * each.all_slots)",
        "if each.taken < each.all_slots",
        (_ROUTES,),
    ),
    Mutant(
        "routing: the beginning of a text is forgotten before its end",
        _PREFIXES,
        "for each in (*reversed(prefix.blocks), *hint)",
        "for each in (*prefix.blocks, *hint)",
        (_ROUTES,),
    ),
    Mutant(
        "routing: the answer is not remembered",
        "orchestrator/pool/peers_of_text.py",
        "self._prefix.grow(token_ids)",
        "self._prefix.grow(())",
        (_CHATS,),
    ),
    Mutant(
        "salt: callers share their prefixes",
        _VALIDATION,
        'scope = client if self.scoped_by_caller else ""',
        'scope = ""',
        (_CHATS,),
    ),
    Mutant(
        "salt: a caller's name runs into its salt",
        _VALIDATION,
        "blake2b(part.encode()).digest() for part",
        "part.encode() for part",
        (_CHATS,),
    ),
)
