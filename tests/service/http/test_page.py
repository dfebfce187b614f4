"""The page at `/`: what it may do, what it reads of replies, and how it is in a browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.service.http.conftest import IN_ONE_LOOP, Fronts
from tests.support.processes.chromium import Page, chromium
from tests.support.waiting import until, wait_until

pytestmark = IN_ONE_LOOP

PROGRAM = shutil.which("chromium") or ""
TOKENS = 24


async def test_only_its_own_script_runs_and_calls_only_this_service(fronts: Fronts) -> None:
    reply = await fronts.http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    # It loads nothing, and has no handlers in attributes, which the policy would stop.
    assert not re.search(r"src=|href=(?!.data:)|\son[a-z]+=|https?://", reply.text)


async def test_what_it_shows_is_in_the_stream(fronts: Fronts) -> None:
    asked = {
        "prompt": "def main(",
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tandem": {"tokens": True, "gamma": 4},
    }
    reply = await fronts.http.post("/v1/completions", json=asked)
    parts = [part.removeprefix("data: ") for part in reply.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    chunks = [json.loads(part) for part in parts]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice["tandem"].get("tokens", ())]
    assert len(tokens) == 20
    assert "".join(token["text"] for token in tokens) == "".join(c["text"] for c in choices)
    stages = choices[-1]["tandem"]["stages_ms"]
    assert stages["verify_wait"] > 0
    assert chunks[-1]["usage"]["tandem"]["rounds"] == len(choices) - 1


def start(page: Page, drafts: str, tokens: int = TOKENS) -> None:
    """Ask for a text, by the keyboard."""
    page.js(f"at('limit').value = {tokens}; at('drafts').value = '{drafts}'; at('prompt').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, modifiers=2
        )


def lines(page: Page) -> list[list[str]]:
    """The table's, newest first."""
    found: list[list[str]] = page.js(
        "[...at('runs').rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return [cells for cells in found if len(cells) > 1]


@pytest.mark.campaign(
    "the front's page in a real browser",
    "what it is made of, and its requests (this file)",
)
@pytest.mark.skipif(
    not PROGRAM, reason="chromium is not installed (Debian: apt-get install chromium)"
)
async def test_texts_in_a_browser(fronts: Fronts, tmp_path: Path) -> None:
    base = f"http://{fronts.address}/"
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def browse() -> None:
        with chromium(PROGRAM, tmp_path) as page:
            page.open(base)
            wait_until(lambda: page.texts("#pair")[0].startswith("target target · drafter"))
            assert page.js("getComputedStyle(at('key-label')).display") == "none"
            start(page, "4")
            wait_until(lambda: len(lines(page)) == 1)
            tokens = page.js("[...document.querySelectorAll('#text span')].map(e => e.className)")
            assert tokens[0] == "prompt"
            assert len(tokens) == 1 + TOKENS
            assert set(tokens[1:]) <= {"accepted", "correction", "bonus"}
            assert "verdicts" in page.texts("#stages")[0]
            start(page, "0")
            wait_until(lambda: len(lines(page)) == 2)
            plain, drafted = lines(page)
            assert plain[0] == "none: plain decoding"
            assert (plain[4], plain[5]) == ("1.00", "–")
            assert (drafted[1], drafted[5][-1]) == (str(TOKENS), "%")
            assert plain[6] != drafted[6]
            assert page.texts("#reading code")[1].endswith(f" --request {plain[6]}")
            page.js("traces = 'http://jaeger:16686/?id={request}'")
            start(page, "0")
            wait_until(lambda: len(lines(page)) == 3)
            link = page.js("at('runs').rows[0].querySelector('a').href")
            assert link.startswith(f"http://jaeger:16686/?id={lines(page)[0][6]}")
            for width in (320, 1400):
                page.call(
                    "Emulation.setDeviceMetricsOverride",
                    **{"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False},
                )
                page.drawn()
                assert page.js("document.documentElement.scrollWidth") <= width
            start(page, "auto", 1900)
            wait_until(lambda: page.js("document.querySelectorAll('#text span').length") > 3)
            page.press("Escape")
            wait_until(lambda: page.texts("#alarm") == ["Stopped."])
            loop.call_soon_threadsafe(stopped.set)
            assert all(url.startswith(base) for url in page.requests)
            assert page.complaints == []

    browsing = asyncio.create_task(asyncio.to_thread(browse))
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait((browsing, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()

    async def idle() -> bool:
        return await fronts.services.open_sequences() == 0

    await until(idle)
    await browsing
