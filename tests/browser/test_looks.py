"""Light and dark, wide and narrow."""

import pytest
from browser.conftest import ask, finished
from playwright.sync_api import ViewportSize, expect

LIGHT, DARK = "rgb(246, 246, 243)", "rgb(17, 20, 22)"
PHONE = ViewportSize(width=360, height=640)


def ground(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_theme_follows_the_system_until_one_is_chosen(visit, talker):
    page = visit(talker).page
    page.emulate_media(color_scheme="light")
    assert ground(page) == LIGHT
    page.emulate_media(color_scheme="dark")
    assert ground(page) == DARK
    page.get_by_role("button", name="Theme: system").click()
    assert ground(page) == LIGHT
    page.reload()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert ground(page) == LIGHT


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(visit, talker, scheme):
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for what else must be seen."""
    page = visit(talker).page
    page.emulate_media(color_scheme=scheme)
    ratios = page.evaluate(CONTRASTS)
    text = {name: ratio for name, ratio in ratios.items() if not name.startswith("--c")}
    assert min(text.values()) >= 4.5, text
    assert min(ratios.values()) >= 3, ratios


@pytest.mark.parametrize("fragment", ["", "#live"])
def test_nothing_is_wider_than_a_phone(visit, talker, fragment):
    page = visit(talker, fragment).page
    page.set_viewport_size(PHONE)
    assert overflow(page) == []
    if fragment:
        return
    ask(page, "a long word: " + "x" * 200)
    answer = finished(page)
    assert overflow(page) == []
    code = answer.locator("pre")
    assert code.evaluate("e => e.scrollWidth > e.clientWidth")  # it scrolls by itself
    for name, panel in (("Conversations", "#history"), ("Parameters", "#params")):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator(panel)).to_be_visible()
        assert overflow(page) == []
        page.keyboard.press("Escape")
        expect(page.locator(panel)).to_be_hidden()
        expect(page.get_by_role("button", name=name, exact=True)).to_be_focused()


def overflow(page):
    """Return what reaches beyond the right edge and is not cut off or scrolled by a parent."""
    return page.evaluate(
        """() => {
          const width = document.documentElement.clientWidth;
          const found = document.documentElement.scrollWidth > width ? ["page"] : [];
          for (const box of document.querySelectorAll("#scroll, #live")) {
            if (box.scrollWidth > box.clientWidth) found.push(box.id);
          }
          return found;
        }"""
    )


CONTRASTS = """() => {
  const probe = document.createElement("i");
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  };
  const light = ([r, g, b]) => {
    const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ratio = (a, b) => {
    const [low, high] = [light(colour(a)), light(colour(b))].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const pairs = [];
  for (const ground of ["--ground", "--surface", "--sunken", "--raised"]) {
    pairs.push(["--text", ground], ["--muted", ground], ["--accent", ground]);
  }
  pairs.push(["--text", "--accent-soft"], ["--accent", "--accent-soft"]);
  pairs.push(["--accent-text", "--accent"], ["--danger", "--danger-soft"]);
  pairs.push(["--c1", "--surface"], ["--c2", "--surface"]);
  pairs.push(["--c3", "--surface"], ["--c4", "--surface"]);
  return Object.fromEntries(pairs.map(([a, b]) => [`${a} on ${b}`, ratio(a, b)]));
}"""
