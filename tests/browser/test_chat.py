"""The chat: answers stream in, and everything a user can do with them."""

import json
from pathlib import Path

import pytest
from browser.conftest import MARKDOWN, ask, finished
from playwright.sync_api import Error, expect


def test_the_page_loads(visit, talker):
    page = visit(talker).page
    expect(page.locator("#model-name")).to_have_text("m")
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    assert page.title() == "qinfer"
    assert not page.get_by_role("button", name="Send", exact=True).is_enabled()


def test_an_answer_is_shown_with_its_figures(visit, talker):
    watched = visit(talker)
    ask(watched.page)
    answer = finished(watched.page)
    expect(answer.locator(".h1")).to_have_text("Title")
    expect(answer.locator("pre")).to_contain_text("def f(x):")
    expect(answer.locator("td")).to_have_text(["30", "95"])
    expect(answer.locator("[data-figure=rate]")).to_contain_text("tok/s")
    expect(answer.locator("[data-figure=ttft]")).to_contain_text("first after")
    expect(answer.locator("[data-figure=tokens]")).to_have_text(f"{len(MARKDOWN) + 1} tokens")
    expect(watched.page.locator("#context-text")).to_contain_text("/ 2,048")
    assert watched.posted[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert watched.posted[0]["model"] == "m"


def test_what_a_model_writes_stays_text(visit, talker):
    watched = visit(talker)
    page = watched.page
    ask(page, '<b onclick="window.hit=4">me</b><img src=x onerror=window.hit=5>')
    answer = finished(page)
    expect(page.locator(".bubble")).to_contain_text("<img src=x onerror=window.hit=5>")
    expect(answer).to_contain_text("<script>window.hit=2</script>")
    assert page.locator("#messages img, #messages script, #conversations img").count() == 0
    links = answer.locator("a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert links == ["https://example.org/a", "https://example.org/x.png"]
    assert page.evaluate("window.hit") is None


def test_the_browser_itself_refuses_markup_from_text(visit, talker):
    watched = visit(talker)
    with pytest.raises(Error, match="TrustedHTML"):
        watched.page.evaluate("() => { document.body.innerHTML = '<b>x</b>' }")
    assert any("TrustedHTML" in text for text in watched.complaints)
    watched.complaints.clear()


def test_stop_ends_the_answer_and_frees_the_engine(visit, endless):
    page = visit(endless).page
    ask(page)
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text("xy xy xy")  # it streams: this answer has no end
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator("[data-figure=end]")).to_have_text("stopped")
    endless.wait_until_idle()
    ask(page, "again")
    expect(answer.last).to_contain_text("xy xy xy")
    page.keyboard.press("Escape")
    expect(answer.last.locator("[data-figure=end]")).to_have_text("stopped")
    endless.wait_until_idle()


def test_an_answer_that_was_cut_off_by_leaving_is_kept(visit, endless):
    page = visit(endless).page
    ask(page)
    expect(page.get_by_role("article", name="Answer")).to_contain_text("xy xy xy")
    page.reload()
    endless.wait_until_idle()
    page.locator("#conversations .open").click()
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text("xy xy xy")
    expect(answer.locator("[data-figure=end]")).to_have_text("stopped")
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()


def test_regenerate_keeps_the_earlier_answers(visit, talker):
    watched = visit(talker)
    page = watched.page
    ask(page)
    finished(page).get_by_role("button", name="Regenerate").click()
    answer = page.get_by_role("article", name="Answer")
    expect(answer.locator(".pages")).to_have_text("2 / 2")
    assert watched.posted[0]["messages"] == watched.posted[1]["messages"]
    answer.get_by_role("button", name="Previous answer").click()
    expect(answer.locator(".pages")).to_have_text("1 / 2")


def test_edit_and_resend_replaces_what_followed(visit, talker):
    watched = visit(talker)
    page = watched.page
    ask(page, "first")
    finished(page)
    ask(page, "second")
    finished(page)
    assert [m["role"] for m in watched.posted[1]["messages"]] == ["user", "assistant", "user"]
    page.get_by_role("article", name="You").first.hover()
    page.get_by_role("button", name="Edit and resend").first.click()
    page.get_by_role("textbox", name="Edit message").fill("other")
    page.keyboard.press("Enter")
    finished(page)
    expect(page.locator(".bubble")).to_have_text(["other"])
    assert watched.posted[2]["messages"] == [{"role": "user", "content": "other"}]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".bubble")).to_have_text(["first", "second"])


def test_copy(visit, talker):
    page = visit(talker).page
    ask(page)
    answer = finished(page)
    answer.get_by_role("button", name="Copy answer").click()
    expect(page.get_by_text("Copied", exact=True)).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    answer.get_by_role("button", name="Copy code").click()
    expect(answer.get_by_text("Copied")).to_be_visible()
    code = page.evaluate("navigator.clipboard.readText()")
    assert code == MARKDOWN.split("```")[1].removeprefix("python\n").rstrip("\n")


def test_parameters_are_sent_and_kept(visit, talker):
    watched = visit(talker)
    page = watched.page
    page.get_by_role("button", name="Parameters").click()
    page.get_by_role("textbox", name="System prompt").fill("Be brief.")
    for label, value in (("Temperature", "0"), ("Top-k", "3"), ("Max tokens", "5"), ("Seed", "7")):
        page.get_by_role("spinbutton", name=label).fill(value)
    page.get_by_role("spinbutton", name="Top-p").fill("7")  # out of range: marked, not sent
    expect(page.get_by_role("spinbutton", name="Top-p")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#params-count")).to_have_text("5")
    ask(page)
    expect(finished(page).locator("[data-figure=end]")).to_have_text("cut at the token limit")
    sent = watched.posted[0]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    sampling = {name: sent.get(name) for name in ("temperature", "top_k", "max_tokens", "seed")}
    assert sampling == {"temperature": 0, "top_k": 3, "max_tokens": 5, "seed": 7}
    assert "top_p" not in sent
    page.reload()
    expect(page.get_by_role("spinbutton", name="Seed")).to_have_value("7")
    page.get_by_role("button", name="Reset").click()
    expect(page.locator("#params-count")).to_be_hidden()


def test_conversations_are_kept_renamed_and_deleted(visit, talker):
    page = visit(talker).page
    ask(page, "about <i>tea</i>")
    finished(page)
    page.get_by_role("button", name="New chat", exact=True).click()
    ask(page, "about coffee")
    finished(page)
    page.reload()
    items = page.locator("#conversations .open")
    expect(items).to_have_text(["about coffee", "about <i>tea</i>"])
    items.last.click()
    expect(page.locator(".bubble")).to_have_text(["about <i>tea</i>"])
    items.last.dblclick()
    page.get_by_role("textbox", name="Title").fill("Tea")
    page.keyboard.press("Enter")
    expect(items).to_have_text(["about coffee", "Tea"])
    items.first.hover()
    page.get_by_role("button", name="Delete about coffee").click()
    expect(items).to_have_text(["Tea"])
    page.get_by_role("button", name="Undo").click()
    expect(items).to_have_text(["about coffee", "Tea"])
    page.reload()
    expect(items).to_have_text(["about coffee", "Tea"])


def test_damaged_storage_is_ignored(visit, talker):
    page = visit(talker).page
    page.evaluate(
        "localStorage.setItem('qinfer.chat.a', '{'); localStorage.setItem('qinfer.settings', '[]');"
        "localStorage.setItem('qinfer.chat.b', '{\"id\": 1, \"messages\": [null]}')"
    )
    page.reload()
    ask(page)
    finished(page)
    expect(page.locator("#conversations .open")).to_have_count(1)


@pytest.mark.parametrize(("item", "suffix"), [("JSON", ".json"), ("Markdown", ".md")])
def test_export(visit, talker, item, suffix):
    page = visit(talker).page
    ask(page, "Export me")
    finished(page)
    page.get_by_role("button", name="Export", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name=item, exact=True).click()
    assert download.value.suggested_filename == f"export-me{suffix}"
    text = Path(download.value.path()).read_text(encoding="utf-8")
    if suffix == ".md":
        assert "## User\n\nExport me\n\n## Assistant\n\n# Title" in text
    else:
        answer = json.loads(text)["conversations"][0]["messages"][1]
        assert answer["versions"][0]["content"] == MARKDOWN
        assert answer["versions"][0]["stats"]["tokens"] == len(MARKDOWN) + 1


def test_the_keyboard_is_enough(visit, talker):
    page = visit(talker).page
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    finished(page)
    expect(page.locator(".bubble")).to_have_text("hello\nthere")
    page.keyboard.press("Tab")  # out of the text field, so that single keys work
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    expect(page.locator(".pages")).to_have_text("2 / 2")
    page.keyboard.press("l")
    expect(page.get_by_role("link", name="Live")).to_have_attribute("aria-current", "page")
    page.keyboard.press("n")
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    expect(page.locator(".welcome")).to_be_visible()
    unnamed = page.locator("button").evaluate_all(
        "all => all.filter(b => !(b.getAttribute('aria-label') || b.textContent.trim())).length"
    )
    assert unnamed == 0
