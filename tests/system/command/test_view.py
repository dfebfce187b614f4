"""The page of `tandem trace view` in a real browser, where one is installed."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.show import view
from tests.support.processes.chromium import Page, chromium
from tests.support.traces import COSTS, Tape, recorded, request, request_ms

PROGRAM = shutil.which("chromium") or ""
pytestmark = [
    pytest.mark.campaign(
        "the page of `tandem trace view` in a real browser",
        "unit/tools/traces: what it is made of",
    ),
    pytest.mark.skipif(
        not PROGRAM, reason="chromium is not installed (Debian: apt-get install chromium)"
    ),
]

ROUNDS = [(4, 2), (2, 2), (0, 0)]
LONG_ROUNDS = [(4, 1), (4, 4), (4, 0)]
EVIL = "</script><img src=x onerror=alert(1)>"
PICKED = "#list [aria-selected=true] code"
# Of text on its ground, by WCAG 2.2's AA; of the bars, as of other graphics.
TEXT_CONTRAST, BAR_CONTRAST = 4.5, 3.0
# Of an element's colour and the ground that it stands on.
CONTRAST = """(kind => element => {
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const clear = "rgba(0, 0, 0, 0)", style = getComputedStyle;
  let under = element.parentElement;
  while (style(under).backgroundColor === clear) under = under.parentElement;
  const [a, b] = [style(element)[kind], style(under).backgroundColor].map(light);
  return Math.max(a, b) / Math.min(a, b);
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        yield page


def written(recording: Path) -> str:
    """The address of a recording's page."""
    file = recording.with_suffix(".html")
    with file.open("w", encoding="utf-8") as target:
        view.write(Recording([str(recording)]), target.write)
    return file.as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three whole requests and one that failed; request-2 takes longest, then request-1."""
    tape = Tape()
    request(tape, ROUNDS, trace=1)
    request(tape, LONG_ROUNDS, trace=2, start=1000)
    request(tape, [(1, 1)], trace=3, start=2000, name=EVIL)
    said: dict[str, Any] = {"tandem__request_id": "request-4"}
    root = tape.span("orchestrator", "generate", 3000, 3009, trace=4, failed=True, **said)
    texts: dict[str, Any] = {
        "tandem__text__drafted": [" one", "</b>", "\n"],
        "tandem__text__next": " two",
    }
    # A tree: of two first tokens, the second one was kept, and nothing hangs after it.
    counts: dict[str, Any] = {"tandem__round": 1, "tandem__depth": 2, "tandem__nodes": 3}
    counts["tandem__accepted"] = 1
    tape.span("orchestrator", "round", 3001, 3008, root, trace=4, **counts, **texts)
    return written(tape.write(tmp_path_factory.mktemp("page") / "trace.jsonl"))


@pytest.fixture
def opened(page: Page, address: str) -> Iterator[Page]:
    """The page; whatever was done to it, it was alone and had nothing to complain of."""
    page.media()
    page.open(address)
    yield page
    assert page.requests == [address]
    assert page.complaints == []


def rounds_of(page: Page) -> list[list[str]]:
    """Kinds of each shown round's tokens."""
    found: list[list[str]] = page.js(
        "[...document.querySelectorAll('.round .tokens')]"
        ".map(round => [...round.querySelectorAll('.token')].map(t => t.classList[1]))"
    )
    return found


def kinds(gamma: int, accepted: int) -> list[str]:
    last = "bonus" if accepted == gamma else "correction"
    return ["accepted"] * accepted + ["rejected"] * (gamma - accepted) + [last]


def test_the_slowest_requests_rounds_are_shown(opened: Page) -> None:
    assert opened.texts("#list code") == ["request-2", "request-1", EVIL, "request-4"]
    assert opened.texts(PICKED) == opened.texts("main > h2")[:1] == ["request-2"]
    assert rounds_of(opened) == [kinds(*round_) for round_ in LONG_ROUNDS]
    drawn = opened.js("[...document.querySelectorAll('.round i')].map(i => i.offsetWidth)")
    assert len(drawn) == 3 * len(LONG_ROUNDS)  # itself, its draft, its verification
    assert min(drawn) > 0


def test_rounds_lie_on_the_waterfall_when_they_happened(opened: Page) -> None:
    lefts = opened.js("[...document.querySelectorAll('.round')].map(r => r.querySelector('i'))"
                      ".map(bar => parseFloat(bar.style.left))")  # fmt: skip
    wall, at = request_ms(LONG_ROUNDS), 12.5
    for left, (gamma, _) in zip(lefts, LONG_ROUNDS, strict=True):
        assert left == pytest.approx(100 * at / wall, abs=0.01)
        at += COSTS.round_ms(gamma)


def test_tokens_are_told_apart_without_colour(opened: Page) -> None:
    looks = opened.js(
        "[...document.querySelectorAll('.token')].map(t => [t.classList[1], t.textContent[0],"
        " getComputedStyle(t).borderStyle, t.getAttribute('aria-label')])"
    )
    assert {kind for kind, *_ in looks} == {"accepted", "rejected", "correction", "bonus"}
    for place in (1, 2, 3):
        assert len({(look[0], look[place]) for look in looks}) == 4
        assert len({look[place] for look in looks}) == 4


def test_texts_stand_in_the_tokens_as_they_are(opened: Page) -> None:
    opened.press("/")
    opened.call("Input.insertText", text="request-4")
    opened.drawn()
    assert opened.texts(".token") == ["✓ ·one", "✗ </b>", "✗ \\n", "↺ ·two"]


def test_search_by_request_and_trace_id(opened: Page) -> None:
    opened.press("/")
    for typed, found in (("UEST-1", "request-1"), (f"{2:032x}", "request-2"), ("<img", EVIL)):
        opened.js("search.select()")
        opened.call("Input.insertText", text=typed)
        opened.drawn()
        assert opened.texts("#list code") == opened.texts("main > h2")[:1] == [found]
        assert opened.texts("#count") == ["1 of 4 requests"]
    opened.call("Input.insertText", text="?")
    opened.drawn()
    assert opened.texts("#list code") == []
    assert opened.texts("main") == ["No request matches."]
    opened.press("Escape")
    assert len(opened.texts("#list code")) == 4
    assert opened.js("document.activeElement === document.body")


def test_filter_and_order(opened: Page) -> None:
    def choose(select: str, value: str) -> list[str]:
        opened.js(f"{select}.value = '{value}'; {select}.dispatchEvent(new Event('change'))")
        return opened.texts("#list code")

    assert choose("state", "failed") == ["request-4"]
    assert choose("state", "cancelled") == []
    assert choose("state", "ok") == ["request-2", "request-1", EVIL]
    assert choose("order", "at") == ["request-1", "request-2", EVIL]


def test_keys_walk_requests_and_rounds(opened: Page) -> None:
    opened.press("ArrowDown")
    assert opened.texts(PICKED) == ["request-1"]
    assert rounds_of(opened) == [kinds(*round_) for round_ in ROUNDS]
    opened.press("ArrowUp", "ArrowUp")
    assert opened.texts(PICKED) == ["request-2"]
    folded = len(opened.texts(".row"))
    opened.press("j", "j", "j", "k")
    assert opened.js("document.querySelector('.row.at').dataset.round") == "1"
    opened.press("Enter")
    inside = len(opened.texts(".row")) - folded
    assert inside == 5 + 4 + 2 + 3 * LONG_ROUNDS[1][0]
    expanded = "[...document.querySelectorAll('.round')].map(r => r.ariaExpanded)"
    assert opened.js(expanded) == ["false", "true", "false"]
    opened.press("Enter")
    assert len(opened.texts(".row")) == folded
    opened.press("a")
    assert opened.js(expanded) == ["true"] * 3
    opened.press("s")
    assert not opened.js("document.querySelector('details').open")


def test_stages_of_the_request_and_of_all(opened: Page) -> None:
    """Those that failed are in no share."""
    lines = opened.js(
        "[...document.querySelectorAll('.bar:not(.dim)')].map(line =>"
        " [...line.children].map(e => e.textContent || parseFloat(e.firstChild.style.width)))"
    )
    stages = {name: cells for name, *cells in lines}
    wall = request_ms(LONG_ROUNDS)
    walls = wall + request_ms(ROUNDS) + request_ms([(1, 1)])
    verified = [COSTS.verify_pass * count for count in (len(LONG_ROUNDS), 7)]
    own_ms, own, _, mean_ms, everybodys, _ = stages["target verify.forward"]
    assert float(own_ms) == pytest.approx(verified[0])
    assert float(mean_ms) == pytest.approx(verified[1] / 3, abs=0.001)
    assert percent(own) == pytest.approx(100 * verified[0] / wall, abs=0.06)
    assert percent(everybodys) == pytest.approx(100 * verified[1] / walls, abs=0.06)
    for at in (1, 4):
        shares = {name: percent(cells[at]) for name, cells in stages.items()}
        assert sum(shares.values()) == pytest.approx(100, abs=0.05 * len(shares))
        widths = {name: cells[at + 1] for name, cells in stages.items()}
        assert max(widths, key=lambda name: widths[name]) == max(shares, key=lambda n: shares[n])
    assert max(cells[at] for cells in stages.values() for at in (2, 5)) == 100


def percent(shown: str) -> float:
    return float(shown.removesuffix(" %"))


def test_dark_and_light(opened: Page) -> None:
    opened.press("j")
    grounds = {}
    for mode in ("light", "dark"):
        opened.media(prefers_color_scheme=mode)
        grounds[mode] = opened.js("getComputedStyle(document.body).backgroundColor")
        for selector, kind, at_least in (
            (".token, .dim, code, h2, kbd, .row span", "color", TEXT_CONTRAST),
            ("i.w, .bar b", "backgroundColor", BAR_CONTRAST),
        ):
            elements = f"[...document.querySelectorAll('{selector}')]"
            least = opened.js(f"Math.min(...{elements}.map({CONTRAST}('{kind}')))")
            assert least >= at_least, (mode, selector)
    assert grounds["light"] == "rgb(255, 255, 255)"
    assert max(int(part) for part in re.findall(r"\d+", grounds["dark"])) < 64


def test_a_page_that_calls_out_or_complains_is_noticed(page: Page, tmp_path: Path) -> None:
    """So that the silence of the others' says something."""
    file = tmp_path / "bad.html"
    file.write_text(
        "<script>console.error('!'); fetch('http://127.0.0.1:1/').catch(() => 0);nothing()</script>"
    )
    page.open(file.as_uri())
    assert page.requests == [file.as_uri(), "http://127.0.0.1:1/"]
    assert any("ReferenceError" in complaint for complaint in page.complaints)
    assert any("'!'" in complaint for complaint in page.complaints)


def test_a_thousand_requests_open(page: Page, tmp_path: Path) -> None:
    address = written(recorded(tmp_path / "trace.jsonl", 1000, [(4, 2)] * 4))
    page.open(address)
    seconds = page.js("performance.now()") / 1e3
    sys.stdout.write(f"1,000 requests: {seconds:.2f} s until they were drawn\n")
    assert len(page.texts("#list code")) == 1000
    assert len(rounds_of(page)) == 4
    assert page.requests == [address]
    assert page.complaints == []
