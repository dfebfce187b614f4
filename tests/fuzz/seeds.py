"""Valid messages of each kind, from which mutants are made."""

from __future__ import annotations

from typing import Any

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.target.v1 import target_pb2
from tests.service.streams.test_bad_trees import rows

# Of the services that the messages are for.
MAX_GAMMA, MAX_NODES, MAX_LENGTH, MAX_ROUNDS = 8, 16, 64, 16
# Of the drafts that are given to the code alone.
PROBE_TOKENS = 2
PROMPT = (1, 2, 3)
MAX_NEW_TOKENS = 20
SAMPLING = common_pb2.Sampling(seed=7, temperature=0.9, top_k=4, top_p=0.99, min_p=0.001)
SHAPED = common_pb2.Sampling(
    seed=8,
    shaping=common_pb2.Shaping(
        logit_bias={0: 1.5, 3: -2.0},
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=-0.3,
        min_tokens=3,
        bad_words=[common_pb2.Shaping.Word(token_ids=word) for word in ((1,), (2, 3))],
        regex="(a|b)*e?",
    ),
)

_ROWS = rows({0: 9, 1: 5, 2: 65535}, {3: 65535, 4: 7}, {0: 1, 1: 2, 2: 3, 3: 4, 4: 65535})
_TWO = rows({0: 9, 1: 5, 2: 65535}, {3: 65535, 4: 7})
CHAINS = (
    common_pb2.Draft(),
    common_pb2.Draft(token_ids=[0, 1]),
    common_pb2.Draft(token_ids=[2, 3, 4], rows=_ROWS),
    common_pb2.Draft(token_ids=[2, 3, 4], rows=_ROWS, parents=[0, 1, 2], row_of=[0, 1, 2]),
    common_pb2.Draft(token_ids=[2, 1], rows=rows({0: 9, 2: 65535}, {})),
)
# Two chains; the same with a common beginning, the second of whose tokens is a twin.
IID_CHAINS = (
    common_pb2.Draft(token_ids=[2, 0, 3, 0], parents=[0, 0, 1, 2], row_of=[0, 0, 1, 2], rows=_ROWS),
    common_pb2.Draft(token_ids=[2, 2, 3, 4], parents=[0, 0, 1, 1], row_of=[0, 0, 1, 1], rows=_TWO),
)
TREES = (
    common_pb2.Draft(
        token_ids=[2, 0, 3, 4],
        parents=[0, 0, 1, 1],
        row_of=[0, 0, 1, 1],
        rows=_TWO,
        distinct_siblings=True,
    ),
    common_pb2.Draft(token_ids=[2, 0, 1, 3], parents=[0, 0, 0, 2]),
    common_pb2.Draft(token_ids=[2, 3, 3, 4], parents=[0, 1, 1, 2], row_of=[0, 1, 1, 2], rows=_ROWS),
)
# As deep as a draft may be: a parent further on, and it is too deep.
DEEPEST = common_pb2.Draft(
    token_ids=[2, 0, 1, 2, 3, 4, 0, 1, 2], parents=[0, 0, 2, 3, 4, 5, 6, 7, 8]
)
# An extra embedding after a candidate; one after another; all after nothing drafted.
PROBED = (
    common_pb2.Draft(token_ids=[0, 1], probes=common_pb2.Probes(token_ids=[3, 2], parents=[2, 3])),
    common_pb2.Draft(
        token_ids=[2, 0, 1, 3],
        parents=[0, 0, 0, 2],
        probes=common_pb2.Probes(token_ids=[1, 0, 4], parents=[0, 4, 6]),
    ),
    common_pb2.Draft(probes=common_pb2.Probes(token_ids=[1], parents=[0])),
)
SMALL_DRAFTS = (*CHAINS, *IID_CHAINS, *TREES, *PROBED)
DRAFTS = (*SMALL_DRAFTS, DEEPEST)


def open_verify(verifier: str = "block", **changes: Any) -> target_pb2.SequenceRequest:
    """Opens sequence 1 of a target."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "token_ids": PROMPT,
        "sampling": SAMPLING,
        "verifier": verifier,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    if verifier == "greedy_block":
        fields |= {"gamma": 2}
    elif changes.pop("trees", True):
        fields |= {"max_nodes": MAX_NODES}
    opening = target_pb2.OpenSequence(**(fields | changes))
    return target_pb2.SequenceRequest(sequence=1, open=opening)


def verify_step(draft: common_pb2.Draft, round_: int, position: int) -> target_pb2.SequenceRequest:
    step = target_pb2.VerifyStep(round=round_, position=position, draft=draft)
    return target_pb2.SequenceRequest(sequence=1, verify=step)


def run_step(round_: int, position: int, rounds: int, gamma: int = 0) -> target_pb2.SequenceRequest:
    step = target_pb2.RunStep(round=round_, position=position, rounds=rounds, gamma=gamma)
    return target_pb2.SequenceRequest(sequence=1, run=step)


def open_draft(**changes: Any) -> drafter_pb2.SequenceRequest:
    """Opens sequence 1 of a drafter."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "token_ids": PROMPT,
        "sampling": SAMPLING,
        "target_vocab_size": 5,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    opening = drafter_pb2.OpenSequence(**(fields | changes))
    return drafter_pb2.SequenceRequest(sequence=1, open=opening)


def draft_step(round_: int, position: int, **changes: Any) -> drafter_pb2.SequenceRequest:
    fields: dict[str, Any] = {"new_token_ids": [4], "gamma": 3}
    step = drafter_pb2.DraftStep(round=round_, position=position, **(fields | changes))
    return drafter_pb2.SequenceRequest(sequence=1, draft=step)


_CARRY = common_pb2.VerifierCarry(levels=[common_pb2.VerifierCarry.Level(log_ratio=-0.3, count=1)])
_SUITED = {"block": DRAFTS, "token": DRAFTS, "spectr": IID_CHAINS, "gbv": IID_CHAINS}
VERIFY_DIALOGUES = (
    *(
        (open_verify(rule), verify_step(draft, 1, 4))
        for rule, drafts in _SUITED.items()
        for draft in drafts
    ),
    (open_verify("greedy_block"), verify_step(CHAINS[4], 1, 4)),
    (open_verify("greedy_block", carry=_CARRY), verify_step(CHAINS[1], 1, 3)),
    (open_verify(first_round=5, trees=False), verify_step(CHAINS[2], 6, 4)),
    (open_verify(end_token_ids=[3]), run_step(1, 4, 3), run_step(0, 0, 2)),
    (open_verify(), run_step(1, 4, 3, gamma=3), run_step(0, 0, 2), run_step(0, 0, 1, gamma=1)),
    (open_verify(sampling=SHAPED), verify_step(CHAINS[2], 1, 4)),
    (
        open_verify(sampling=SHAPED, token_ids=[3, 2, 0], emitted_tokens=1),
        run_step(1, 4, 3, gamma=3),
    ),
    # As long as what is left of the text.
    (open_verify(max_new_tokens=4), verify_step(CHAINS[2], 1, 4)),
)
DRAFT_DIALOGUES = (
    (open_draft(), draft_step(1, 3)),
    (open_draft(), draft_step(1, 3, gamma=MAX_GAMMA, max_nodes=MAX_NODES)),
    (
        open_draft(sampling=SHAPED, token_ids=[3, 2, 0], emitted_tokens=1),
        draft_step(1, 3, new_token_ids=[1]),
    ),
    (open_draft(first_round=2, target_vocab_size=7), draft_step(3, 3, new_token_ids=[6, 4])),
)
GENERATIONS = (
    pb.Generation(
        prompt_token_ids=PROMPT,
        sampling=SAMPLING,
        stopping=pb.Stopping(max_new_tokens=6, stop_token_ids=[4]),
        speculation=pb.Speculation(verifier="block", gamma=3),
        request_id="r",
    ),
    pb.Generation(prompt_token_ids=PROMPT, speculation=pb.Speculation(gamma=0)),
    pb.Generation(
        prompt_token_ids=PROMPT,
        sampling=SAMPLING,
        first_round=3,
        received_token_ids=[1, 2],
        stopping=pb.Stopping(max_new_tokens=6, ignore_eos=True),
        speculation=pb.Speculation(verifier="token", gamma=2),
    ),
    pb.Generation(
        prompt_token_ids=PROMPT,
        sampling=SHAPED,
        stopping=pb.Stopping(max_new_tokens=6),
        bad_strings=["ab"],
    ),
    pb.Generation(prompt="def ", stopping=pb.Stopping(max_new_tokens=4, stop_strings=["x"])),
)
DRAFTED = tuple(
    drafter_pb2.SequenceResponse(
        drafted=drafter_pb2.DraftedStep(
            round=1,
            position=4,
            draft=draft,
            times=common_pb2.StageTimes(queue_ns=1000, forward_ns=100000, batch_size=1),
            open_sequences=1,
        )
    )
    for draft in SMALL_DRAFTS
)
PREPARED = tuple(
    drafter_pb2.SequenceResponse(
        prepared=drafter_pb2.PreparedDrafts(
            round=1,
            drafts=[
                drafter_pb2.PreparedDrafts.PreparedDraft(new_token_ids=tokens, draft=draft)
                for tokens in ([2], [1, 2])
            ],
        )
    )
    for draft in SMALL_DRAFTS
)
VERDICTS = (
    target_pb2.SequenceResponse(
        verdict=target_pb2.Verdict(
            round=1,
            position=6,
            num_accepted=1,
            place=1,
            next_token_id=3,
            overlaps=[0.5, 0.25, 1.0],
            times=common_pb2.StageTimes(queue_ns=1000, forward_ns=100000, batch_size=1),
            carry=_CARRY,
            open_sequences=1,
        )
    ),
)
# Of rounds whose drafts the target made.
RAN = tuple(
    target_pb2.SequenceResponse(
        verdict=target_pb2.Verdict(
            round=1,
            position=5 + accepted,
            num_accepted=accepted,
            place=place,
            next_token_id=3,
            overlaps=[0.5] * len(draft.token_ids),
            times=common_pb2.StageTimes(queue_ns=1000, forward_ns=100000, batch_size=1),
            draft_times=common_pb2.StageTimes(forward_ns=30000, numbers_ns=500, batch_size=1),
            drafted=draft,
            last=True,
        )
    )
    for draft, accepted, place in (
        (common_pb2.Draft(token_ids=[2, 3, 4]), 2, 2),
        (common_pb2.Draft(token_ids=[2, 0, 3, 4], parents=[0, 0, 1, 2]), 2, 4),
        (common_pb2.Draft(token_ids=[2, 0], parents=[0, 0]), 0, 0),
        (common_pb2.Draft(), 0, 0),
    )
)
# Methods that take prompts or drafts.
LARGE = ("Draft", "Verify", "Generate", "Complete")
