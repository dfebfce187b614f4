"""Mutants of what drafters learn: by distillation, and while they serve."""

from __future__ import annotations

from tests.support.mutants.serving import Mutant

_DISTILLED = "tests/unit/distillation/test_run.py"
_TRAINED_ON = "tests/unit/distillation/test_training_texts.py"
_DIVERGENCES = "tests/unit/distillation/test_divergences.py"

OF_DISTILLATION = (
    Mutant(
        "distillation: a run goes on with fresh optimisers",
        "tandem/distillation/trainer.py",
        "optimiser.load_state_dict(saved)",
        "saved.clear()",
        (_DISTILLED,),
    ),
    Mutant(
        "distillation: a step that is not finite is taken",
        "tandem/distillation/trainer.py",
        "if not (math.isfinite(total) and bool(norm.isfinite())):",
        "if False:",
        (_DISTILLED,),
    ),
    Mutant(
        "distillation: places after the end of a text count",
        "tandem/distillation/training_texts.py",
        "return counts & (ended.cumsum(1)[:, :-1] == 0)",
        "return counts & (ended.cumsum(1)[:, :-1] >= 0)",
        (_TRAINED_ON,),
    ),
    Mutant(
        "distillation: what the target said belongs to the place after",
        "tandem/distillation/teachers.py",
        "told.log_probs[:, place - 1], told.ids[:, place - 1] = values, ids",
        "told.log_probs[:, place - 2], told.ids[:, place - 2] = values, ids",
        (_TRAINED_ON,),
    ),
    Mutant(
        "distillation: the tokens that a row leaves out have no mass",
        "tandem/distillation/divergences.py",
        "return torch.cat([log_probs, rest.clamp(min=_LEAST_REST).log()], -1)",
        "return log_probs.log_softmax(-1)",
        (_DIVERGENCES,),
    ),
    Mutant(
        "distillation: the worst drafter is kept",
        "tandem/distillation/run.py",
        "if not sum(means.values()) > sum(before):",
        "if sum(means.values()) > sum(before):",
        (_DISTILLED,),
    ),
)

_KEPT = "tandem/online/kept_text.py"
_TRAINED = "tests/unit/online/test_training.py"
_HEARD = "tests/unit/online/test_kept_text.py"
_LEARNING = "tests/unit/online/test_learning.py"
_SERVED = "tests/service/online/test_online.py"

OF_ONLINE = (
    Mutant(
        "online: a row is kept at the place after its own",
        _KEPT,
        "first = len(self.token_ids) - 1",
        "first = len(self.token_ids)",
        (_HEARD,),
    ),
    Mutant(
        "online: rows of a round that is not the draft's are kept",
        _KEPT,
        "if len(rows) == len(emitted) <= depth + 1:",
        "if rows:",
        (_HEARD,),
    ),
    Mutant(
        "online: a row is taken to have all of the probability",
        "tandem/online/learner.py",
        "shares *= torch.where(known, mass, 1)[:, None] / shares.sum(1, keepdim=True)",
        "shares *= 1 / shares.sum(1, keepdim=True)",
        (_TRAINED,),
    ),
    Mutant(
        "online: a drafter that is surer than its target seems to know more",
        "tandem/online/learner.py",
        "said = self.said.log_probs.log_softmax(-1)",
        "said = self.said.log_probs",
        (_TRAINED,),
    ),
    Mutant(
        "online: texts that are held out are learnt from",
        "tandem/online/training.py",
        "[0 if each.held_out else 1 + each.rejected.sum() for each in texts]",
        "[1 + each.rejected.sum() for each in texts]",
        (_TRAINED,),
    ),
    Mutant(
        "online: texts after one system prompt are all on one side",
        "tandem/online/holdout.py",
        "found, crowded = hashed.digest(), count > most",
        "pass",
        ("tests/unit/online/test_holdout.py",),
    ),
    Mutant(
        "online: rows of another model are believed",
        "tandem/online/training.py",
        "if not self.unsaid < 0:",
        "if False:",
        (_TRAINED,),
    ),
    Mutant(
        "online: a text that must not be kept is",
        "drafter_svc/sequence.py",
        'kept = not request.cache_salt and (request.learn or not request.HasField("learn"))',
        "kept = True",
        (_SERVED,),
    ),
    Mutant(
        "online: heads of other layers are told to set ONLINE alike",
        "tandem/peers/replicas/compatibility.py",
        "reply.learns != first.learns and wanted.at_open.said == known.at_open.said:",
        "True:",
        ("tests/unit/peers/replicas/test_feedback_of_drafters.py",),
    ),
    Mutant(
        "online: a text that began before a reset is kept",
        "tandem/online/learning.py",
        "current = heard.epoch == self._epoch and not self.status.frozen",
        "current = not self.status.frozen",
        (_LEARNING,),
    ),
    Mutant(
        "online: what a trainer that was ended says is heard",
        "tandem/online/learning.py",
        "self._hear(said) if trainer is self._trainer else None",
        "self._hear(said)",
        (_LEARNING,),
    ),
    Mutant(
        "online: new weights compute into the pool of the old ones",
        "tandem/inference/decoder.py",
        "        _give_room(backend, self.positions, version)\n        reasons",
        "        backend.pool = before.pool\n        reasons",
        (_SERVED,),
    ),
    Mutant(
        "online: open sequences get the new weights",
        "tandem/inference/passes/backends.py",
        "own = [i for i, feed in enumerate(feeds) if feed.cache.pool is backend.pool]",
        "own = [*range(len(feeds))] if backend is self.current else []",
        (_SERVED,),
    ),
    Mutant(
        "online: the state names weights before they are there",
        "tandem/online/state.py",
        '        offer.replace(self.path / "weights" / name)\n',
        "",
        ("tests/unit/online/test_state.py",),
    ),
)

_HEADS = "tests/unit/online/heads/test_learning_heads.py"
_LEARNT = "tests/unit/online/heads/test_learnt_weights.py"
_CAPTURED = "tests/unit/inference/passes/test_cuda_graphs.py"
_SIZES = "tests/unit/inference/kv/test_size.py"
_SERVED_HEADS = "tests/service/online/test_heads.py"

OF_ONLINE_HEADS = (
    Mutant(
        "online heads: a depth learns the row of the place before its own",
        "tandem/online/heads/roots.py",
        "behind = places[:most, None] + np.arange(1, depths + 1)",
        "behind = places[:most, None] + np.arange(depths)",
        (_HEADS,),
    ),
    Mutant(
        "online heads: a row after a gap is that of another place",
        "tandem/online/heads/roots.py",
        "row_of = np.full(len(text.token_ids) + depths, -1)",
        "row_of = np.full(len(text.token_ids) + depths, 0)",
        (_HEADS,),
    ),
    Mutant(
        "online heads: rows of a model that knows more than the head are believed",
        "tandem/online/heads/learner.py",
        "by_row[:, by_row.sum(0).argmax()]",
        "by_row[:, 0]",
        (_HEADS,),
    ),
    Mutant(
        "online heads: a chain goes on after a rejected token",
        "tandem/online/heads/learner.py",
        "accepted = overlaps.cumprod(1).sum(1)",
        "accepted = overlaps.sum(1)",
        (_HEADS,),
    ),
    Mutant(
        "online heads: what is learnt at home counts for nothing",
        "tandem/online/heads/learner.py",
        "return float(np.log(first / own))",
        "return 0.0",
        (_HEADS,),
    ),
    Mutant(
        "online heads: states of other places are kept",
        _KEPT,
        "there = list(told.positions) == [*range(first, first + count)]",
        "there = True",
        (_HEARD,),
    ),
    Mutant(
        "online heads: states of a text have no bound",
        _KEPT,
        "return min(most, _MOST_STATE_BYTES // self.bytes) if self.bytes else most",
        "return most",
        (_HEARD,),
    ),
    Mutant(
        "online heads: open sequences get the new weights",
        "tandem/inference/heads/head.py",
        "return self._weights if own is None else own",
        "return self._weights",
        (_LEARNT,),
    ),
    Mutant(
        "online heads: what was learnt is forgotten after a restart",
        "tandem/inference/heads/load.py",
        "if source.learnt != NOTHING_LEARNT:",
        "if False:",
        (_SERVED_HEADS,),
    ),
    Mutant(
        "online heads: a decoder layer sees the places after its own",
        "tandem/inference/heads/pieces.py",
        "known = torch.ones(time, time, dtype=torch.bool).tril()",
        "known = torch.ones(time, time, dtype=torch.bool)",
        (_HEADS,),
    ),
    Mutant(
        "online heads: a guess sees those after other places",
        "tandem/inference/heads/pieces.py",
        "guessed = torch.eye(time, dtype=torch.bool)",
        "guessed = torch.ones(time, time, dtype=torch.bool)",
        (_HEADS,),
    ),
    Mutant(
        "online heads: guesses stand at the place of their root",
        "tandem/inference/heads/pieces.py",
        "depth + torch.arange(time)[None]",
        "torch.arange(time)[None]",
        (_HEADS,),
    ),
    Mutant(
        "online heads: a deeper depth reads the state, and no guess",
        "tandem/inference/heads/eagle.py",
        "            before = ends if self._norm_output else found",
        "            before = before",
        (_HEADS,),
    ),
    Mutant(
        "online heads: a decoder layer sees states across a gap",
        "tandem/online/heads/roots.py",
        "(np.diff(places[:most], prepend=places[0]) > 1).cumsum()",
        "np.zeros(len(places[:most]), np.int64)",
        (_HEADS,),
    ),
    Mutant(
        "online heads: a guessed state learns that of its root",
        "tandem/online/heads/learner.py",
        "states = roots.states[rows, -1]",
        "states = roots.states[roots.at[: len(rows)], -1]",
        (_HEADS,),
    ),
    Mutant(
        "online heads: places that do not follow each other are kept",
        _KEPT,
        "gaps = np.diff(places, prepend=places[0] - 1) != 1",
        "gaps = np.diff(places, prepend=places[0] - 1) < 1",
        (_HEARD,),
    ),
    Mutant(
        "online heads: an EAGLE head's open sequences get the new weights",
        "tandem/inference/heads/eagle.py",
        "weights: EagleWeights = self._weights_of(feeds[0]).parts",
        "weights: EagleWeights = self._weights.parts",
        (_LEARNT,),
    ),
    Mutant(
        "online: new weights are computed by the captured passes of the old ones",
        "tandem/inference/decoder.py",
        "reasons = self._capture(backend)\n",
        'reasons, backend.graphs, backend.chains = ("", ""), before.graphs, before.chains\n',
        (_CAPTURED,),
    ),
    Mutant(
        "online: new weights are served with fewer captured passes",
        "tandem/inference/decoder.py",
        "any(own < known for own, known in captured)",
        "not any(own for own, _ in captured)",
        (_CAPTURED,),
    ),
    Mutant(
        "online: new weights are served without captured chains",
        "tandem/inference/decoder.py",
        "return len(list(backend.graphs or ())), len(list(backend.chains or ()))",
        "return len(list(backend.graphs or ())), 0",
        ("tests/unit/inference/passes/test_chains.py",),
    ),
    Mutant(
        "online: a device's memory is the KV cache's of the first weights",
        "tandem/inference/decoder.py",
        "room._replace(pools=_POOLS[self.device.type], weights=later)",
        "room",
        (_SIZES,),
    ),
    Mutant(
        "online: later weights take no memory of a device",
        "tandem/inference/kv/size.py",
        "kept = room.passes + room.weights + room.kept * bytes_each",
        "kept = room.passes + room.kept * bytes_each",
        (_SIZES,),
    ),
    Mutant(
        "online: weights are read and have no room then",
        "tandem/inference/decoder.py",
        "needed = weights + self.pass_memory + pools",
        "needed = self.pass_memory + pools",
        (_SIZES,),
    ),
    Mutant(
        "online: weights without room are learnt again at once",
        "tandem/online/learning.py",
        "self._pauses[about] = min(2 * self._pauses[about], _MOST_PAUSE)",
        "pass",
        (_LEARNING,),
    ),
    Mutant(
        "online: texts stay where the checkpoint's weights have no room",
        "tandem/online/learning.py",
        "        self._folder.forget_texts()\n",
        "",
        (_LEARNING,),
    ),
    Mutant(
        "online: a drafter that learns is loaded as one that does not",
        "tandem/serving/drafting.py",
        "renews=learnt is not None",
        "renews=False",
        (_SERVED,),
    ),
    Mutant(
        "online heads: what trains a layer holds the files' weights beside later ones",
        "tandem/inference/heads/eagle.py",
        "        layer = weights.layer\n",
        "        layer = self._layer = weights.layer\n",
        (_LEARNT,),
    ),
    Mutant(
        "online heads: a deep token counts as the first one",
        "tandem/distillation/divergences.py",
        "_DEEPER**depth * each",
        "each",
        (_DIVERGENCES,),
    ),
)
