"""Only the caller sees prompts and texts: they are not in logs, nor in spans, nor in errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.client.connection import Connection, sampled
from tandem.common.v1 import common_pb2
from tandem.failure import Failure
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.processes.services import Trio, trio

# In the prompt and, since greedy text of the pair repeats names, in the text. As token ids too.
_MARK = "zanzibarquince"
_PROMPT = f"def {_MARK}(one):\n    return {_MARK}(one)\n\n{_MARK} = {_MARK}\nprint({_MARK}"


@contextmanager
def telling(folder: Path, pair: tuple[Path, Path], **orchestrator: str) -> Iterator[Trio]:
    """Services that log and trace all they can."""
    settings: dict[str, dict[str, str]] = {"orchestrator": dict(orchestrator)}
    for name, model in zip(("drafter", "target"), pair, strict=True):
        settings[name] = {"MODEL": str(model)}
    for name, own in settings.items():
        own |= {"LOG_LEVEL": "debug", "TRACE_FILE": str(folder / f"{name}.spans")}
    with trio(folder, **settings) as services:  # type: ignore[arg-type]
        yield services


def ask(services: Trio) -> tuple[list[int], list[str]]:
    """A text and some failures: its token ids, and the sentences of the failures."""
    sentences = []
    with Connection(services.orchestrator.address) as client:
        good = pb.Generation(
            prompt=_PROMPT,
            sampling=common_pb2.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_new_tokens=24, stop_strings=[f"{_MARK}{_MARK}"]),
            speculation=pb.Speculation(gamma=4),
        )
        events = client.generate(good, 60, metadata=sampled(True))
        ids = [token.id for event in events for token in event.round.tokens]
        for change in (
            pb.Generation(sampling=common_pb2.Sampling(temperature=-1.0)),
            pb.Generation(stopping=pb.Stopping(stop_strings=[""])),
            pb.Generation(stopping=pb.Stopping(stop_strings=[_MARK * 10_000])),
            pb.Generation(speculation=pb.Speculation(gamma=1_000_000)),
            pb.Generation(prompt=_PROMPT * 500),
            pb.Generation(prompt_token_ids=[1, 2]),
        ):
            bad = pb.Generation()
            bad.CopyFrom(good)
            bad.MergeFrom(change)
            if change.prompt_token_ids:
                bad.ClearField("prompt")
                bad.prompt_token_ids.extend([10**9])
            with pytest.raises(Failure) as failed:
                client.complete(bad, 60)
            sentences.append(str(failed.value))
        with pytest.raises(Failure) as failed:
            client.complete(good, 0.001)
        sentences.append(str(failed.value))
    return ids, sentences


def written(folder: Path) -> str:
    """All that the services have written."""
    files = [path for path in folder.iterdir() if path.suffix in (".log", ".spans")]
    assert len(files) == 6
    assert all(path.stat().st_size for path in files)
    return "".join(path.read_text() for path in files)


@pytest.mark.parametrize("asked_for", [False, True], ids=["as it comes", "TRACE_TEXT"])
def test_a_prompt_and_its_text_are_not_written(
    asked_for: bool, tmp_path: Path, embedded_pair: tuple[Path, Path]
) -> None:
    with telling(tmp_path, embedded_pair, TRACE_TEXT=json.dumps(asked_for)) as services:
        ids, sentences = ask(services)
    assert len(ids) == 24
    found = written(tmp_path)
    assert '"event": "request ended"' in found
    assert "verify.forward" in found
    pieces = [_MARK[:7], _MARK[-6:], ", ".join(map(str, ids[:6]))]
    assert [piece for piece in pieces if piece in "".join(sentences)] == [], sentences
    assert ("tandem.text.next" in found) == asked_for, "it could be found, were it written"
    if not asked_for:
        assert [piece for piece in pieces if piece in found] == []
