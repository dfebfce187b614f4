"""Mutants of phrases, and of targets that draft with a part of themselves."""

from __future__ import annotations

from tests.support.mutants.serving import Mutant

_PHRASES = "tandem/drafting/composed/phrases.py"
_OF_PHRASES = "tests/unit/drafting/composed/test_phrases.py"

OF_PHRASES = (
    Mutant(
        "phrases: a text has those of another",
        _PHRASES,
        "if not self._kept or salt is None:",
        "if salt is None:",
        (_OF_PHRASES,),
    ),
    Mutant(
        "phrases: those that are kept are those of all scopes",
        _PHRASES,
        "self._pool(sequence.salt, sequence.sampling.seed)",
        'self._pool(sequence.salt and "", sequence.sampling.seed)',
        (_OF_PHRASES,),
    ),
    Mutant(
        "phrases: a text has those of one with its seed",
        _PHRASES,
        "if seed in own.seeds:",
        "if False:",
        (_OF_PHRASES,),
    ),
    Mutant(
        "phrases: a suffix hangs at the wrong place",
        _PHRASES,
        "(len(chain) + parent for parent in suffixes.parents)",
        "(max(len(chain) + parent - 1, 0) for parent in suffixes.parents)",
        (_OF_PHRASES,),
    ),
    Mutant(
        "phrases: a draft is refined twice",
        _PHRASES,
        "draft, self.draft = self.draft, None",
        "draft = self.draft",
        (_OF_PHRASES,),
    ),
    Mutant(
        "phrases: a suffix is scored at the wrong place",
        "target_svc/round.py",
        "parents = [places[draft.parents[place - 1]] for place in computed]",
        "parents = [\n"
        "            places[max(draft.parents[at - 1] - (not draft.sizes[at - 1]), 0)]\n"
        "            for at in computed\n"
        "        ]",
        ("tests/unit/target/test_run_law.py",),
    ),
    Mutant(
        "phrases: what the target predicts refines the draft that it is computed for",
        "target_svc/round.py",
        "scored = replace(everything, count=rows) if probes else everything",
        "scored = replace(everything, count=rows) if probes else everything\n"
        "    if isinstance(draft, Draft) and not all(draft.sizes):\n"
        "        said = scored.logits[scored.first :].argmax(-1).tolist()\n"
        "        own, at, of = draft.token_ids, [*draft.places()], draft.row_of_places()\n"
        "        alone = [at.count(place) == 1 for place in at]\n"
        "        refined = [\n"
        "            said[of[at[n]]] if alone[n] and not draft.sizes[n] else own[n]\n"
        "            for n in range(len(own))\n"
        "        ]\n"
        "        draft = replace(draft, token_ids=refined)",
        ("tests/service/recipes/test_predicted.py",),
    ),
)

_OF_VIEWS = "tests/unit/target/test_views.py"
_RUN_LAW = "tests/unit/target/test_run_law.py"
_OF_SPARSE = "tests/unit/target/test_sparse_views.py"
_VIEWED = "tandem/inference/kv/viewed.py"
_SPARSE = "tandem/inference/kv/sparse.py"

OF_VIEWS = (
    Mutant(
        "views: a resumed row of another branch",
        "target_svc/round.py",
        "return sorted(range(len(computed)), key=found.__getitem__)",
        "return list(range(len(computed)))",
        (_RUN_LAW,),
    ),
    Mutant(
        "views: rows after a rejection are gone on with",
        _VIEWED,
        "self.exit_states, self.nodes = [], None",
        "self.nodes = None",
        (_RUN_LAW,),
    ),
    Mutant(
        "views: a part goes on after its own rows, whatever was kept",
        _VIEWED,
        "if text - 1 <= self.of.length:",
        "if agreed < 0:",
        (_OF_VIEWS,),
    ),
    Mutant(
        "views: the layer at the exit is computed twice",
        "tandem/inference/passes/torch_llama.py",
        "states = self._through(self._steps[begun:], states, batch, pool, found)",
        "states = self._through(self._steps[max(begun - 1, 0) :], states, batch, pool, found)",
        (_OF_VIEWS,),
    ),
    Mutant(
        "views: rows that are fresh see the lower layers of a whole batch's places",
        "tandem/inference/batch/packed.py",
        "count -= feed.resumed.count",
        "pass",
        (_OF_VIEWS,),
    ),
    Mutant(
        "views: a part without some sublayers is gone on with",
        "target_svc/loading.py",
        "for view in views if not view.skip",
        "for view in views",
        ("tests/unit/target/test_loading.py",),
    ),
    Mutant(
        "views: a part without some sublayers is pure",
        "target_svc/loading.py",
        "drafter.traits = replace(drafter.traits, pure=False)",
        "pass",
        ("tests/unit/target/test_loading.py",),
    ),
    Mutant(
        "views: a tree's rows are kept by their place in the draft",
        "target_svc/round.py",
        "cache.keep([at[row] for row in path] if at else path)",
        "cache.keep(path)",
        (_OF_VIEWS,),
    ),
    Mutant(
        "views: a node that fell away is gone on with",
        "target_svc/round.py",
        "known.resumed.count if known.nodes is None else 1 + len(known.nodes)",
        "known.resumed.count",
        (_OF_VIEWS,),
    ),
    Mutant(
        "few keys: new tokens go on at their slots",
        "tandem/inference/batch/packed.py",
        "reach = segment.reach\n",
        "reach = length\n",
        (_OF_SPARSE,),
    ),
    Mutant(
        "few keys: what a draft computed stays in the place of the text's own",
        _SPARSE,
        "if fresh > 0:",
        "if fresh < 0:",
        (_OF_SPARSE,),
    ),
    Mutant(
        "few keys: a draft's keys are written to the text's blocks",
        _SPARSE,
        "copied(self.of, self._told, self, self._told - self.skipped, fresh)",
        "copied(self, self._told - self.skipped, self.of, self._told, fresh)",
        (_OF_SPARSE,),
    ),
    Mutant(
        "few keys: all heads see the same chunks",
        _SPARSE,
        "best = scores.topk",
        "best = scores.mean(0, keepdim=True).expand_as(scores).topk",
        (_OF_SPARSE,),
    ),
    Mutant(
        "few keys: a window forgets how much it left out",
        "tandem/inference/views/window.py",
        "self.skipped += more",
        "pass",
        ("tests/unit/inference/test_windows.py",),
    ),
    Mutant(
        "few keys: they are never chosen anew",
        _SPARSE,
        "self.due = self.due or held - self.skipped > self._chosen + STRIDE",
        "self.due = False",
        (_OF_SPARSE,),
    ),
)
