"""`tandem.Local`: the three services on this machine, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from tandem.client.blocking import Client
from tandem.failure import Failure
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings


class Local:
    """Drafter, target and orchestrator as processes of this machine, on free loopback ports.

    As a context manager it starts them, gives a `Client`, and stops them at the end; `start` and
    `stop` do the same in a notebook. The processes end with this one in any case.

    Args:
        target: a checkpoint's folder or hub id; None is the embedded target.
        drafter: the same of the drafter, or of a head for the target; None is the embedded one,
            for a target of your own lookup in the text; "none" drafts nothing; "@target" drafts
            with a part of the target.
        recipe: a drafting method, or a recipe's file; None is `model`, or what suits the drafter.
        inside: the target drafts in its own process. Faster on one machine.
        settings: further ones by service, without their prefix, such as
            {"target": {"MAX_SEQUENCES": "4"}}.

    Attributes:
        address: of the orchestrator, once it has started.
    """

    def __init__(
        self,
        target: str | None = None,
        drafter: str | None = None,
        *,
        recipe: str | None = None,
        inside: bool = False,
        settings: Mapping[str, Mapping[str, str]] = {},
    ) -> None:
        self._pair = Pair(target, drafter, recipe=recipe, inside=inside)
        self._more = settings
        self._stack: Stack | None = None
        self._client: Client | None = None
        self.address = ""

    def start(self) -> Client:
        """Start the services, and wait until they are ready.

        Raises:
            Failure: a service cannot start, or the pair does not fit; or they have started.
        """
        if self._stack is not None:
            raise Failure("the services have started: stop them first")
        own = self._pair.settings()
        services = {name: {**own.get(name, {}), **more} for name, more in self._more.items()}
        stack = Stack(StackSettings({**own, **services}, inside=self._pair.inside))
        try:
            stack.start()
        except BaseException:
            stack.kill()
            raise
        self._stack = stack
        self.address = stack.addresses["orchestrator"]
        self._client = Client.of([stack.endpoint("orchestrator")])
        return self._client

    def stop(self) -> None:
        """Let running texts finish, and end the services. Harmless when they have."""
        stack, self._stack = self._stack, None
        if self._client is not None:
            self._client.close()
        if stack is not None:
            try:
                stack.drain()
            finally:
                stack.kill()

    def __enter__(self) -> Client:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
