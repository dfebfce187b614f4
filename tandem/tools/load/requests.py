"""What to request: prompts in turn, or a file of requests in ghz's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf import json_format

from tandem.common.v1 import common_pb2
from tandem.failure import Misconfigured
from tandem.orchestrator.v1 import orchestrator_pb2 as pb

# All requests of a run are made beforehand, and all timelines kept, some 10 KB each.
MOST_TEXTS = 50_000
# Default of most texts of an open loop in flight: the slots of eight services, and far below what
# a client's memory and ports allow.
MAX_IN_FLIGHT = 2048
# The limit of that setting and of the number of clients: one event loop reads all streams, and
# with more of them it would measure itself.
MOST_IN_FLIGHT = 16_384


PROMPTS = ("def ", "import os\n", "class ", "    def __init__(self")


# The only template of ghz that such a file may contain: the number of the request.
_NUMBER = "{{.RequestNumber}}"
# A file of a hundred thousand prompts; more is no mix of prompts.
_MOST_BYTES = 256 << 20


class RequestFile:
    """Requests of a file, taken in turn.

    Args:
        path: of a JSON array of GenerateRequest or CompleteRequest messages.

    Raises:
        Misconfigured: the file cannot be read, or is no such array.
    """

    def __init__(self, path: Path) -> None:
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise Misconfigured(f"{path} is larger than {_MOST_BYTES >> 20} MiB")
            # ghz reads a file as an array only if this is its first byte.
            text = path.read_text("utf-8")
            if not text.startswith("["):
                raise ValueError("its first character is not [")
            self._rows = [json.dumps(row) for row in json.loads(text)]
            self._path = path
            if not self._rows:
                raise ValueError("it is empty")
            for number in range(len(self._rows)):
                self.generation(number)
        except OSError as error:
            raise Misconfigured(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise Misconfigured(f"{path} is no list of requests: {error}") from None

    def generation(self, number: int) -> pb.Generation:
        """A request by its number, which replaces ghz's template of that name.

        Raises:
            ValueError: the row is no request.
        """
        row = json.loads(self._rows[number % len(self._rows)].replace(_NUMBER, str(number)))
        try:
            message = json_format.ParseDict(row, pb.GenerateRequest())
        except json_format.ParseError as error:
            raise ValueError(f"request {number}: {error}") from None
        if not message.HasField("generation"):
            raise ValueError(f"request {number} has no generation")
        return message.generation


def requests(
    data: Path | None,
    prompts: Sequence[str] | None,
    max_new_tokens: int | None,
    temperature: float | None,
    seed: int,
    speculation: pb.Speculation,
) -> Callable[[int], pb.Generation]:
    """A function that makes a request from its number.

    Args:
        data: file of requests to take in turn, instead of the next three arguments.
        prompts: to take in turn; `PROMPTS` by default.
        max_new_tokens: length of every text, past the model's end of text too; 128 by default.
        temperature: of every text; 1 by default.
        seed: of the first text; each further one adds 1.
        speculation: what it has overrides the request's.

    Raises:
        Misconfigured: arguments contradict each other, or a number is out of range.
    """
    file = None
    if data is not None:
        given = {"prompt": prompts, "max-new-tokens": max_new_tokens, "temperature": temperature}
        if both := [name for name, value in given.items() if value is not None]:
            raise Misconfigured(f"--data says it already: leave out --{both[0]}")
        file = RequestFile(data)

    def listed(number: int) -> pb.Generation:
        chosen = prompts or PROMPTS
        return pb.Generation(
            prompt=chosen[number % len(chosen)],
            sampling=common_pb2.Sampling(
                temperature=1.0 if temperature is None else temperature, seed=seed + number
            ),
            stopping=pb.Stopping(max_new_tokens=max_new_tokens or 128, ignore_eos=True),
        )

    def request(number: int) -> pb.Generation:
        generation = file.generation(seed + number) if file else listed(number)
        generation.speculation.MergeFrom(speculation)
        return generation

    try:
        request(0)
    except ValueError as error:
        raise Misconfigured(f"a number is out of range: {error}") from None
    return request
