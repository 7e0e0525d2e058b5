"""Debian's Chromium, driven by Playwright, against a real server; skipped where there is none."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright
from support.checkpoints import write_script
from support.live import Live, live_server

from qinfer.server.settings import OperationSettings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
TIMEOUT_MS = 15_000
DESKTOP = ViewportSize(width=1280, height=800)
ENDLESS = {ord("x"): {ord("y"): 17.0}, ord("y"): {ord(" "): 17.0}, ord(" "): {ord("x"): 17.0}}
MARKDOWN = """# Title

**Bold** and `code`.

```python
def f(x):
    return "a line too long for a phone: it scrolls by itself" * x
```

| tea | coffee |
|---|---:|
| 30 | 95 |

<img src=x onerror="window.hit=1"><script>window.hit=2</script>

[bad](javascript:window.hit=3) [good](https://example.org/a) ![far](https://example.org/x.png)
"""


@dataclass
class Watched:
    """A page, and what it must not do: console errors, and requests to anyone but the server."""

    page: Page
    host: str
    complaints: list[str] = field(default_factory=list)
    posted: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)

    def _console(self, message) -> None:
        # Chromium reports every bad status as an error; tests of errors cause them.
        if message.type in {"error", "warning"} and "Failed to load" not in message.text:
            self.complaints.append(message.text)

    def _request(self, request) -> None:
        url = urlsplit(request.url)
        if url.netloc != self.host and url.scheme != "blob":
            self.complaints.append(f"request to {request.url}")
        if request.method == "POST":
            self.posted.append(request.post_data_json)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of the module's own: its event loop must not outlive the module."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH (apt-get install chromium)")
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> Iterator[Live]:
    """A server whose model answers everything with `MARKDOWN`."""
    path = tmp_path_factory.mktemp("talker") / "model"
    # The chat template ends in a line break, so the script begins after its first one.
    write_script(path, f"\n{MARKDOWN}", vocab_size=800, max_position=2048)
    with live_server(path) as live:
        yield live


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Iterator[Live]:
    """A server whose model never stops by itself: `xy xy xy …`."""
    path = tmp_path_factory.mktemp("endless") / "model"
    write_script(path, ENDLESS, max_position=32768)
    sizes = {"weights_bytes": 3_000_000, "kv_cache_bytes": 2_000_000, "activation_bytes": 1_000_000}
    operations = OperationSettings(memory=sizes, limits={"kv_capacity_tokens": 32768})
    with live_server(path, operations=operations) as live:
        yield live


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A fresh profile."""
    context = browser.new_context(
        viewport=DESKTOP, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(TIMEOUT_MS)
    yield context
    context.close()


@pytest.fixture
def visit(context: BrowserContext) -> Iterator:
    """Open the page of a server; what it must never do is checked at the end."""
    opened: list[Watched] = []

    def open_page(live: Live, fragment: str = "") -> Watched:
        watched = Watched(context.new_page(), urlsplit(live.url).netloc)
        opened.append(watched)
        watched.page.goto(f"{live.url}/{fragment}")
        return watched

    yield open_page
    assert [watched.complaints for watched in opened] == [[] for _ in opened]


def ask(page: Page, text: str = "hello") -> None:
    """Send a message."""
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def finished(page: Page):
    """Wait until the last answer has ended, and return it."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_attached()
    answer = page.get_by_role("article", name="Answer").last
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
    return answer
