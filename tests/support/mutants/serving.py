"""What a mutant is, and those of shared prefixes, of chains in one replay, and of lengths."""

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


_PREFIXES = "tests/unit/inference/kv/test_prefixes.py"
_WARM = "tests/unit/drafting/test_warm_texts.py"
_SHARED = "tests/service/prefixes/test_shared_prefixes.py"
_BLOCKS = "tandem/inference/kv/blocks.py"
_EXTENTS = "tandem/inference/kv/extents.py"

OF_BLOCKS = (
    Mutant(
        "prefixes: a block that is not full is shared, and written",
        _EXTENTS,
        "range(len(own) * size, end - size + 1, size)",
        "range(len(own) * size, end, size)",
        (_PREFIXES,),
    ),
    Mutant(
        "prefixes: a hash without its parent",
        _BLOCKS,
        "blake2b(key + tokens, digest_size=_KEY_BYTES)",
        "blake2b(tokens, digest_size=_KEY_BYTES)",
        (_PREFIXES,),
    ),
    Mutant(
        "prefixes: the salt is left out",
        _BLOCKS,
        'blake2b(salt.encode(), digest_size=_KEY_BYTES, key=version, person=b"salt")',
        'blake2b(digest_size=_KEY_BYTES, key=version, person=b"salt")',
        (_PREFIXES,),
    ),
    Mutant(
        "prefixes: the hash is trusted",
        _BLOCKS,
        "if block is None or block.tokens != tokens:",
        "if block is None:",
        (_PREFIXES,),
    ),
    Mutant(
        "prefixes: a block is freed with a user",
        _BLOCKS,
        "        if block.users:\n            return False\n",
        "",
        (_PREFIXES,),
    ),
    Mutant(
        "prefixes: a block that is used again stays among those that may go",
        _BLOCKS,
        "self._kept.pop(block, None)",
        "pass",
        (_PREFIXES,),
    ),
    Mutant(
        "prefixes: a chain's beginning is forgotten before its end",
        "tandem/inference/kv/tables.py",
        "for block in reversed(own):",
        "for block in own:",
        (_PREFIXES,),
    ),
    Mutant(
        "prefixes: a drafted token is published by the target",
        "target_svc/round.py",
        "        cache.rollback(sequence.length + decision.num_accepted)\n",
        "        cache.publish([*sequence.token_ids, *draft.token_ids], cache.length)\n"
        "        cache.rollback(sequence.length + decision.num_accepted)\n",
        (_WARM,),
    ),
    Mutant(
        "prefixes: a drafted token is published by a part of a drafter",
        "tandem/drafting/decoders/model.py",
        "len(sequence.token_ids) - len(sequence.all_assumed())",
        "len(sequence.token_ids)",
        (_WARM,),
    ),
    Mutant(
        "prefixes: what a prepared draft's outcome was is not published",
        "tandem/drafting/ahead/forks.py",
        "self.real.publish(*self.settled)",
        "pass",
        (_WARM,),
    ),
    Mutant(
        "prefixes: the salt of a request is not the text's",
        "tandem/serving/sequence.py",
        "self._salt = request.cache_salt if self._shares else None",
        'self._salt = "" if self._shares else None',
        (_SHARED,),
    ),
)

_ROUTING = "orchestrator/pool/prefixes.py"
_VALIDATION = "orchestrator/front/validation.py"
_ROUTES = "tests/unit/orchestrator/pool/test_prefixes.py"
_CHATS = "tests/service/replicas/test_prefixes.py"

OF_ROUTING = (
    Mutant(
        "routing: a block's hash is without its parent",
        _ROUTING,
        "parent = _hash(parent + tokens",
        "parent = _hash(b'' + tokens",
        (_ROUTES,),
    ),
    Mutant(
        "routing: the salt is left out",
        _ROUTING,
        'self._root = _hash(salt.encode(), b"salt")',
        'self._root = _hash(b"", b"salt")',
        (_ROUTES,),
    ),
    Mutant(
        "routing: the load has no bound",
        _ROUTING,
        "if each.taken < math.ceil(share * each.all_slots)",
        "if each.taken < each.all_slots",
        (_ROUTES,),
    ),
    Mutant(
        "routing: the beginning of a text is forgotten before its end",
        _ROUTING,
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
    Mutant(
        "sizes: passes of a faster back end are never heard of",
        "tandem/peers/replicas/replica.py",
        "while self.serving and self.reply.info.improving:",
        "while False:",
        ("tests/service/replicas/test_models.py",),
    ),
    Mutant(
        "sizes: each text forgets what rounds took",
        "orchestrator/sizes/policies.py",
        "elif not _alike(self._pass_times, (verify, draft)):",
        "elif True:",
        ("tests/unit/orchestrator/sizes/test_policies.py",),
    ),
    Mutant(
        "sizes: what passes take is that of the first back end",
        "orchestrator/sizes/policies.py",
        "elif not _alike(self._pass_times, (verify, draft)):",
        "elif False:",
        ("tests/unit/orchestrator/sizes/test_policies.py",),
    ),
)

_CHAINS = "tandem/inference/passes/chains.py"
_DRAWS = "tandem/engine/numbers/draws.py"
_HOME = "tandem/engine/numbers/home.py"
_ENGINE = "tandem/engine/engine.py"
_CAPTURED = "tests/unit/inference/passes/test_chains.py"
_ON_DEVICE = "tests/unit/target/test_chains_on_device.py"
_REPORTS = "tests/unit/engine/test_reports.py"
_LONG = "tests/service/requests/test_long_texts.py"

OF_CHAINS = (
    Mutant(
        "chains: a number is used again",
        _DRAWS,
        "numbers[ask.node + 1 : ask.node + 1 + steps]",
        "numbers[ask.node : ask.node + steps]",
        (_CAPTURED,),
    ),
    Mutant(
        "chains: a second replay begins with the first one's numbers",
        _DRAWS,
        "scorer.draw_on(feeds, each[len(found[0]) :])",
        "scorer.draw_on(feeds, each)",
        (_CAPTURED,),
    ),
    Mutant(
        "chains: all tokens go to one place",
        "tandem/inference/batch/tiles.py",
        "np.array(lengths, np.int64) + np.arange(steps)[:, None]",
        "np.array(lengths, np.int64) + np.zeros((steps, 1), np.int64)",
        (_CAPTURED,),
    ),
    Mutant(
        "chains: each token is drawn after the first",
        _CHAINS,
        "tokens = drawn[:, 0]",
        "tokens = self._tokens",
        (_CAPTURED,),
    ),
    Mutant(
        "chains: a replay writes to memory that nobody keeps",
        _CHAINS,
        "capture(partial(run, steps), partial(run, 1))",
        "capture(partial(run, steps), partial(run, 1))\n        del self._tiles",
        (_CAPTURED,),
    ),
    Mutant(
        "chains: the tokens of another row come home",
        _HOME,
        "own = [table[row] for row in rows]",
        "own = [table[row - 1] for row in rows]",
        (_ON_DEVICE,),
    ),
    Mutant(
        "chains: a token after a row that is not finite comes home",
        _HOME,
        "takewhile(lambda entry: entry[1] > 0, own)",
        "takewhile(lambda entry: entry[1] >= 0, own)",
        (_ON_DEVICE,),
    ),
    Mutant(
        "reports: they are told before the next launch",
        _ENGINE,
        "if stepper.ahead and not over:",
        "if not stepper.ahead and not over:",
        (_REPORTS,),
    ),
    Mutant(
        "reports: they are held for ever",
        _ENGINE,
        "if self._held == _MOST_HELD:",
        "if self._held < 0:",
        (_REPORTS,),
    ),
    Mutant(
        "lengths: a drafter is asked for one token more than it can hold",
        "orchestrator/text/session.py",
        "min(left, room + 1)",
        "min(left, room + 2)",
        (_LONG,),
    ),
    Mutant(
        "lengths: a drafter is opened for the whole text",
        "orchestrator/front/text_parts.py",
        "max_new_tokens=min(prompt.max_new_tokens, left)",
        "max_new_tokens=prompt.max_new_tokens",
        (_LONG,),
    ),
)

_GROWING, _GROWING_TESTS = "tandem/engine/growing.py", "tests/unit/engine/test_growing.py"
_ADMITTED = "tests/unit/engine/test_admission.py"
_GIVEN_BACK = "tests/service/replicas/test_given_back.py"
_FAILOVER = "orchestrator/text/target_failover.py"

# Sequences that grow, and those that are given back for them.
OF_GROWING = (
    Mutant(
        "growing: a block that others may find stays where its text was",
        _EXTENTS,
        "block.place += start - before",
        "pass",
        (_PREFIXES,),
    ),
    Mutant(
        "growing: a text that is moved leaves its last position behind",
        _EXTENTS,
        "if (used := cache.used) and",
        "if (used := cache.used - 1) and",
        (_PREFIXES,),
    ),
    Mutant(
        "growing: an extent takes what is held after it",
        _EXTENTS,
        "or self._free[i][1] < more:",
        "or self._free[i][1] < 1:",
        (_PREFIXES,),
    ),
    Mutant(
        "growing: a table takes blocks that are held",
        "tandem/inference/kv/tables.py",
        "if count > len(self._free) + self.blocks.num_kept:",
        "if count > self.positions:",
        (_PREFIXES,),
    ),
    Mutant(
        "growing: the oldest is given back",
        _GROWING,
        "for one in reversed(self._growing):",
        "for one in self._growing:",
        (_GROWING_TESTS,),
    ),
    Mutant(
        "growing: what was given back is reclaimed again",
        _GROWING,
        "        if sequence not in self._gone:\n            return True",
        "        if sequence in self._gone or sequence not in self._gone:\n            return True",
        (_GROWING_TESTS,),
    ),
    Mutant(
        "growing: a draft that nobody waits for takes a text's room",
        _GROWING,
        "return None if more <= 0 or (more <= left and _holds(cache, tokens)) else cache.pool",
        "return None if _holds(cache, tokens) else cache.pool",
        (_GROWING_TESTS,),
    ),
    Mutant(
        "growing: a text that is given back draws a token",
        "target_svc/round.py",
        "if sequence.carry is not None or resumes:",
        "if sequence.carry is not None:",
        (_GROWING_TESTS,),
    ),
    Mutant(
        "admission: more is promised than the setting says",
        "tandem/engine/admission.py",
        "if self.promised + room.capacity > self.promises:",
        "if self.promised > self.promises:",
        (_ADMITTED,),
    ),
    Mutant(
        "orchestrator: the round that was given back is left out",
        _FAILOVER,
        "resumes = isinstance(lost, SequenceGivenBack)",
        "resumes = False",
        (_GIVEN_BACK,),
    ),
    Mutant(
        "orchestrator: a text is given back for ever",
        _FAILOVER,
        "in_full=self._given_back >= _MOST_GIVEN_BACK,",
        "in_full=False,",
        (_GIVEN_BACK,),
    ),
    Mutant(
        "orchestrator: a text that is given back counts as moved",
        "orchestrator/pool/peers_of_text.py",
        "if isinstance(lost, SequenceGivenBack) or refused:",
        "if refused:",
        (_GIVEN_BACK,),
    ),
    Mutant(
        "orchestrator: a target of an earlier release is asked to resume",
        _FAILOVER,
        "resumes and self._target.resumes",
        "resumes",
        (_GIVEN_BACK,),
    ),
)
