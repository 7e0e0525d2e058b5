"""The live view: charts that move while the engine works, and rest while nobody looks."""

import re

from browser.conftest import ask, finished
from playwright.sync_api import expect

ABOVE_ZERO = re.compile("[1-9]")


def tile(page, name):
    return page.locator(f'[data-tile="{name}"] .tile-value')


def chart(page, title):
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))


def looks(page):
    """Return a list that grows with every look of the page at the server's figures."""
    seen: list[str] = []

    def note(request):
        if request.url.endswith("/stats"):
            seen.append(request.url)

    page.on("request", note)
    return seen


def test_charts_move_while_the_engine_works(visit, endless):
    chat = visit(endless).page
    ask(chat)
    live = visit(endless, "#live").page
    expect(tile(live, "Running")).to_have_text("1")
    expect(tile(live, "Tokens per second")).to_have_text(ABOVE_ZERO)
    line = chart(live, "Tokens per second").locator("path.line.c1").first
    before = line.get_attribute("d")
    expect(line).not_to_have_attribute("d", before)
    expect(chart(live, "Time to first token").locator("rect.bar")).not_to_have_count(0)
    expect(tile(live, "KV cache used")).to_have_text(ABOVE_ZERO)
    chat.bring_to_front()
    chat.get_by_role("button", name="Stop", exact=True).click()
    live.bring_to_front()
    expect(tile(live, "Running")).to_have_text("0")
    expect(chart(live, "Requests").locator(".plot")).to_have_attribute(
        "aria-label", "Requests: running 0, waiting 0"
    )


def test_the_time_per_token_counts_answers_that_ended(visit, endless):
    page = visit(endless).page
    page.get_by_role("button", name="Parameters").click()
    page.get_by_role("spinbutton", name="Max tokens").fill("40")
    ask(page)
    finished(page)
    page.get_by_role("link", name="Live").click()
    bars = chart(page, "Time per token").locator("rect.bar")
    expect(bars.first).to_be_visible()
    chart(page, "Time per token").locator(".plot").focus()
    page.keyboard.press("ArrowRight")
    expect(chart(page, "Time per token").locator(".tip")).to_contain_text("%")


def test_memory_and_facts(visit, endless):
    page = visit(endless, "#live").page
    parts = chart(page, "Memory").locator(".parts li")
    expect(parts).to_have_count(4)
    expect(parts.nth(0)).to_contain_text("Weights3.00 MB")
    expect(parts.nth(1)).to_contain_text("KV cache2.00 MB")
    expect(chart(page, "Server")).to_contain_text("32,768 tokens")
    expect(chart(page, "Server")).to_contain_text("ready")


def test_it_asks_only_while_looked_at(visit, endless):
    page = visit(endless).page
    seen = looks(page)
    page.wait_for_timeout(800)
    assert seen == []
    page.get_by_role("link", name="Live").click()
    expect(tile(page, "Running")).to_have_text("0")
    page.evaluate(HIDE)
    page.wait_for_timeout(200)  # one look may have been under way
    count = len(seen)
    assert count
    page.wait_for_timeout(1600)
    assert len(seen) == count
    page.evaluate(HIDE.replace("hidden", "visible"))
    with page.expect_request("**/stats"):
        pass


def test_a_server_that_is_gone_is_said_so_and_found_again(visit, endless, context):
    page = visit(endless, "#live").page
    expect(tile(page, "Running")).to_have_text("0")
    context.set_offline(True)
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    context.set_offline(False)
    expect(page.get_by_role("alert")).to_be_hidden()


HIDE = """() => {
  Object.defineProperty(document, "visibilityState", { configurable: true, get: () => "hidden" });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
