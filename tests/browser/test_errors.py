"""What goes wrong is said where the answer would be, with a way on."""

import pytest
from browser.conftest import ENDLESS, ask, finished
from playwright.sync_api import expect
from support.checkpoints import write_script
from support.live import live_server

from qinfer.server.auth import parse_keys
from qinfer.server.settings import OperationSettings


@pytest.fixture
def doomed(tmp_path):
    """A server of its own, for tests that break it."""
    write_script(tmp_path / "model", ENDLESS, max_position=32768)
    with live_server(tmp_path / "model") as live:
        yield live


def test_a_refusal_is_shown_in_the_servers_words(visit, talker):
    page = visit(talker).page
    ask(page, "x" * 3000)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("context_length_exceeded")
    expect(alert).to_contain_text("2048")
    page.get_by_role("button", name="Edit and resend").click()
    page.get_by_role("textbox", name="Edit message").fill("short")
    page.get_by_role("button", name="Resend", exact=True).click()
    expect(finished(page).locator(".h1")).to_have_text("Title")
    expect(alert).to_have_count(0)


def test_a_failing_engine_ends_the_answer_with_an_error(visit, doomed):
    page = visit(doomed).page
    ask(page)
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text("xy xy")

    def fail(*_args, **_kwargs):
        raise RuntimeError("the disk caught fire")

    doomed.engine._core.step = fail
    expect(page.get_by_role("alert")).to_contain_text("the disk caught fire")
    expect(answer).to_contain_text("xy xy")  # what came before stays
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("unavailable")


def test_a_server_that_is_gone_is_said_so(visit, talker, context):
    page = visit(talker).page
    expect(page.locator("#model-name")).to_have_text("m")
    context.set_offline(True)
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    expect(finished(page).locator(".h1")).to_have_text("Title")


def test_a_key_is_asked_for_when_the_server_wants_one(visit, script_model):
    keys = parse_keys(["secret"], "the test")
    with live_server(script_model, operations=OperationSettings(keys=keys)) as live:
        enter_a_key(visit(live).page)


def enter_a_key(page):
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("API key", exact=True).fill("wrong")
    dialog.get_by_role("button", name="Use key").click()
    expect(dialog.get_by_role("alert")).to_have_text("the API key is not known here")
    dialog.get_by_label("API key", exact=True).fill("secret")
    dialog.get_by_role("button", name="Use key").click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#model-name")).to_have_text("m")
    ask(page)
    expect(finished(page).locator(".markdown")).to_have_text("ABCDEFGHIJK")
    page.reload()  # the tab keeps the key
    expect(page.locator("#model-name")).to_have_text("m")
    assert page.evaluate("localStorage.getItem('qinfer.key')") is None


def test_two_tabs_do_not_lose_each_others_conversations(visit, talker):
    first, second = visit(talker).page, visit(talker).page
    ask(first, "one")
    ask(second, "two")
    finished(first)
    finished(second)
    for page in (first, second):
        expect(page.locator("#conversations .open")).to_have_count(2)
