"""A way to decode, and a request that uses it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb


@dataclass(frozen=True)
class Method:
    """A verifier and a draft length; 0 decodes plainly."""

    verifier: str
    gamma: int

    def __str__(self) -> str:
        return self.verifier if self.gamma else "plain"

    def request(self, prompt: str, temperature: float, seed: int, new_tokens: int) -> pb.Generation:
        """A request for a text of a fixed length."""
        return pb.Generation(
            prompt=prompt,
            sampling=common_pb2.Sampling(temperature=temperature, seed=seed),
            stopping=pb.Stopping(max_new_tokens=new_tokens, ignore_eos=True),
            speculation=pb.Speculation(verifier=self.verifier, gamma=self.gamma),
        )


PLAIN = Method("token", 0)
TOKEN = Method("token", 4)
BLOCK = Method("block", 4)
