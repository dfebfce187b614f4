"""The calls of the HTTP front: those of OpenAI's API, and a few that its other servers have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

import tandem
from orchestrator.front.calls import OpenCalls
from orchestrator.front.client import ReadingClient
from orchestrator.front.http.access import Access
from orchestrator.front.http.answer import HttpAnswer, ReplyDetail, WantedText
from orchestrator.front.http.bodies.chat import ChatBody
from orchestrator.front.http.bodies.completion import CompletionBody
from orchestrator.front.http.bodies.generating import Generating, StreamOptions
from orchestrator.front.http.bodies.tokens import DetokenizeBody, TokenizeBody
from orchestrator.front.http.call import B, Handler, HttpCall, HttpEndpoint
from orchestrator.front.http.errors import WrongMethod
from orchestrator.front.http.page import page
from orchestrator.front.http.replies import ChatForm, CompletionForm, Form, Json
from orchestrator.front.http.tools import names_of
from orchestrator.front.serving import Serving
from orchestrator.front.texts import Texts
from orchestrator.front.validation import Validator
from orchestrator.settings import OrchestratorSettings
from orchestrator.text.codec import TextCodec
from tandem.errors import Exhausted, InvalidRequest, NotFound, Unavailable
from tandem.peers.text.record import HTTP
from tandem.rpc import messages
from tandem.rpc.security.tokens import BearerTokens
from tandem.settings import MIB

G = TypeVar("G", bound=Generating)
TextsOf = Callable[[HttpCall, G, Validator], Awaitable[list[WantedText]]]

_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies would collect events.
    "x-accel-buffering": "no",
}


class HttpFront:
    """Answers the calls.

    Args:
        settings: limits and waits.
        serving: what is served.
        calls: that are here.
        tokens: a call must bring one of these; None asks for none.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        serving: Serving,
        calls: OpenCalls,
        tokens: BearerTokens | None,
    ) -> None:
        self._settings, self._serving, self._calls = settings, serving, calls
        self._began = int(time.time())
        self._reading = 0  # bodies
        access = Access(settings, tokens)
        guarded: dict[str, tuple[str, Handler]] = {
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._model),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }
        open_to_all: dict[str, tuple[str, Handler]] = {
            "/": ("GET", self._page),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
        }
        routes = [
            Route(
                path, HttpEndpoint(handler, access if path in guarded else None), methods=[method]
            )
            for path, (method, handler) in {**guarded, **open_to_all}.items()
        ]
        methods = {path: method for path, (method, _) in {**guarded, **open_to_all}.items()}
        shown = sorted(path.replace("{name:path}", "NAME") for path in methods)

        async def lost(call: HttpCall) -> None:
            path = f"/{call.path['path']}"
            if path in methods:
                allowed = methods[path]
                raise WrongMethod(f"{path} is called with {allowed}", allowed=allowed)
            raise NotFound(f"there is no such call; the paths are {', '.join(shown)}")

        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.http_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        rest = Route("/{path:path}", HttpEndpoint(lost))
        self._inner = Starlette(
            routes=[*routes, rest], middleware=[cors] if settings.http_origins else []
        )

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """The application; a target may be in absolute form (RFC 9112, 3.2.2)."""
        if "://" in scope["path"]:
            path = "/" + scope["path"].partition("://")[2].partition("/")[2]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._inner(scope, receive, send)

    async def _page(self, call: HttpCall) -> None:
        content, headers = page()
        await call.reply_with(content, 200, headers)

    async def _health(self, call: HttpCall) -> None:
        if not self._serving.is_ready:
            raise Unavailable("the pair is not ready")
        await call.reply({"status": "ready"})

    async def _version(self, call: HttpCall) -> None:
        await call.reply({"version": tandem.__version__})

    async def _models(self, call: HttpCall) -> None:
        validator = self._validator
        described = [self._described(name, validator) for name in self._names(validator)]
        await call.reply({"object": "list", "data": described})

    async def _model(self, call: HttpCall) -> None:
        validator = self._validator
        name = call.path["name"]
        self._check_model(name, validator)
        await call.reply(self._described(name, validator))

    async def _tokenize(self, call: HttpCall) -> None:
        body = await self._read(call, TokenizeBody)
        validator = self._validator
        self._check_model(body.model, validator)
        validator.check_text(body.prompt)
        ids = await validator.encoder.encode(
            body.prompt, call.caller, special=body.add_special_tokens
        )
        longest = validator.capabilities.target.max_length
        await call.reply({"tokens": ids, "count": len(ids), "max_model_len": longest})

    async def _detokenize(self, call: HttpCall) -> None:
        body = await self._read(call, DetokenizeBody)
        validator = self._validator
        self._check_model(body.model, validator)
        target = validator.capabilities.target
        ids = messages.tokens_from("tokens", body.tokens, target.vocab_size, target.max_length)
        await call.reply({"prompt": self._codec(validator).decode(ids)})

    async def _completions(self, call: HttpCall) -> None:
        await self._generate(call, CompletionBody, CompletionForm, self._of_prompts)

    async def _chat(self, call: HttpCall) -> None:
        await self._generate(call, ChatBody, ChatForm, self._of_chat)

    async def _generate(
        self, call: HttpCall, kind: type[G], form: type[Form], texts_of: TextsOf[G]
    ) -> None:
        """Answer a call with texts.

        Args:
            call: of a client.
            kind: of its body.
            form: of the reply.
            texts_of: what texts a body asks for.
        """
        with self._calls.refusals(HTTP):
            body = await self._read(call, kind)
            self._calls.enter()
        try:
            with self._calls.refusals(HTTP):
                texts = await self._serving.texts_soon(None)
                validator = texts.validator
                self._check_model(body.model, validator)
                wanted = await texts_of(call, body, validator)
            model = self._names(validator)[0]
            spell = validator.codec.bytes_of
            made = form(call.request_id, int(time.time()), model, spell)
            await self._answer(call, body, texts, made, wanted)
        except InvalidRequest as error:
            raise body.named(error) from None
        finally:
            self._calls.leave()

    async def _of_prompts(
        self, call: HttpCall, body: CompletionBody, validator: Validator
    ) -> list[WantedText]:
        prompts = body.prompts
        wanted = self._wanted(call, body, prompts)
        if not body.echo:
            return wanted
        codec = self._codec(validator)
        before = [p if isinstance(p, str) else codec.decode(p) for p in prompts]
        begins: list[Sequence[int | None]] = [()] * len(prompts)
        if body.log_probs is not None:
            for each in prompts:
                if isinstance(each, str):
                    validator.check_text(each)
            run = validator.encoder.run
            begins = [await run(partial(codec.begins, each), call.caller, None) for each in prompts]
        return [
            replace(text, before=before[text.prompt], begins=begins[text.prompt]) for text in wanted
        ]

    async def _of_chat(
        self, call: HttpCall, body: ChatBody, validator: Validator
    ) -> list[WantedText]:
        prompt = await asyncio.to_thread(
            validator.chat_template.render,
            [message.fields(i) for i, message in enumerate(body.messages)],
            body.offered,
            generation_prompt=body.add_generation_prompt,
            more=body.chat_template_kwargs or {},
        )
        # The template writes the tokenizer's own tokens.
        return self._wanted(call, body, [prompt], special=False)

    def _wanted(
        self,
        call: HttpCall,
        body: Generating,
        prompts: Sequence[str | list[int]],
        *,
        special: bool = True,
    ) -> list[WantedText]:
        """The texts of a call: `n` of each prompt, one prompt after the other."""
        each = body.n or 1
        count, most = each * len(prompts), self._settings.http_texts
        if count > most:
            raise InvalidRequest(
                f"n: {count} texts in one call, at most {most} may be"
                " (TANDEM_ORCHESTRATOR_HTTP_TEXTS)"
            )
        found = []
        for prompt, text in enumerate(prompts):
            for choice in range(prompt * each, (prompt + 1) * each):
                own = call.request_id if count == 1 else messages.part_of(call.request_id, choice)
                found.append(WantedText(body.request(text, choice, own, special=special), prompt))
        return found

    async def _answer(
        self,
        call: HttpCall,
        body: Generating,
        texts: Texts,
        form: Form,
        wanted: Sequence[WantedText],
    ) -> None:
        """Make the texts, and reply with them."""
        settings, options = self._settings, body.stream_options or StreamOptions()

        def client() -> ReadingClient:
            return ReadingClient(call.caller, settings.idle_seconds, settings.reading_seconds)

        telling = ReplyDetail(
            body.tandem.tokens,
            body.include_stop_str_in_output,
            bool(options.include_usage),
            names_of(body.offered),
            body.most_calls,
        )
        answer = HttpAnswer(
            texts=texts,
            calls=self._calls,
            form=form,
            telling=telling,
            wanted=wanted,
            client=client,
            metadata=call.headers,
        )
        if body.stream:
            await answer.stream(call.receive, call.send, lambda: call.begin(200, _EVENTS))
        else:
            await call.reply(await answer.whole(call.receive))

    async def _read(self, call: HttpCall, kind: type[B]) -> B:
        """The body of a call, of which as many are read at once as calls may be answered.

        Raises:
            Exhausted: too many are being read.
        """
        settings = self._settings
        if self._reading >= settings.max_requests:
            raise Exhausted(
                f"{self._reading} bodies are being read; try again later", retry_seconds=1.0
            )
        self._reading += 1
        try:
            return await call.read(
                kind,
                settings.max_message_mib * MIB,
                settings.idle_seconds,
                unknown=settings.unknown_fields == "ignore",
            )
        finally:
            self._reading -= 1

    @property
    def _validator(self) -> Validator:
        """Of the pair that is served.

        Raises:
            Unavailable: there is none.
        """
        return self._serving.texts.validator

    def _names(self, validator: Validator) -> Sequence[str]:
        """Of the target; answers have the first."""
        given = tuple(dict.fromkeys(self._settings.model_names))
        return given or (validator.capabilities.target.model,)

    def _check_model(self, name: str | None, validator: Validator) -> None:
        """Refuse a model that is not served; a call need not name any.

        Raises:
            NotFound: it is another one.
        """
        served = self._names(validator)
        if name not in (None, "", *served):
            raise NotFound(f"the model {name!r} is not served here; this one is: {served[0]}")

    @staticmethod
    def _codec(validator: Validator) -> TextCodec:
        """The tokenizer.

        Raises:
            InvalidRequest: the target has none.
        """
        if not validator.codec.has_text:
            raise InvalidRequest("prompt: this target has no tokenizer; send token ids")
        return validator.codec

    def _described(self, name: str, validator: Validator) -> Json:
        capabilities = validator.capabilities
        target, drafter = capabilities.target, capabilities.drafter
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "tandem",
            "max_model_len": target.max_length,
            "tandem": {
                "drafter": None if drafter is None or capabilities.by_target else drafter.model,
                "verifiers": list(capabilities.rules),
                "verifier": validator.verifier,
                "max_gamma": capabilities.largest.gamma,
                "max_nodes": capabilities.largest.nodes,
                "trace_url": self._settings.trace_url,
            },
        }
