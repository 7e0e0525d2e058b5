"""The page's files: their names, how they are cached, and what the browser may do with them."""

import re
from importlib.resources import files

import pytest

from qinfer.server.page import load_page

NAMES = sorted(load_page().assets)


def asset(name):
    return f"/web/{load_page().version}/{name}"


def test_the_page_names_only_files_that_exist(call):
    answer = call("GET", "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    links = re.findall(r'(?:src|href)="(web/[^"]+)"', answer.text)
    assert len(links) >= 8
    for link in links:
        assert call("GET", f"/{link}").status_code == 200
    assert "@version@" not in answer.text


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".js")])
def test_modules_import_only_files_that_exist(name):
    text = load_page().assets[name].decode()
    imported = re.findall(r'from "([^"]+)"', text)
    assert {target.removeprefix("./") for target in imported} <= set(NAMES)
    assert all(target.startswith("./") for target in imported)


def test_every_file_of_the_folder_is_served():
    folder = files("qinfer.server").joinpath("web")
    assert {item.name for item in folder.iterdir()} == {*NAMES, "index.html"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("main.js", "text/javascript; charset=utf-8"),
        ("theme.css", "text/css; charset=utf-8"),
        ("favicon.svg", "image/svg+xml"),
    ],
)
def test_an_asset_is_kept_for_good(call, name, kind):
    answer = call("GET", asset(name))
    assert answer.headers["content-type"] == kind
    assert "immutable" in answer.headers["cache-control"]
    assert answer.content == load_page().assets[name]
    head = call("HEAD", asset(name))
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("path", ["/", asset("main.js")])
def test_the_browser_is_kept_to_this_server(call, path):
    headers = call("GET", path).headers
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_nothing_in_the_page_is_inline():
    html = load_page().index.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)
    assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", html))


@pytest.mark.parametrize("path", ["/", asset("main.js")])
def test_a_browser_that_has_it_is_told_so(call, path):
    etag = call("GET", path).headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        answer = call("GET", path, headers={"If-None-Match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == etag
    assert call("GET", path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/web/0123456789abcdef/main.js",  # another release
        asset("none.js"),
        asset("index.html"),
        asset("..%2Fpage.py"),
        asset("%2e%2e/%2e%2e/page.py"),
        asset("..%5Cpage.py"),
        "/web/main.js",
        "/web/",
    ],
)
def test_nothing_else_is_served(call, path):
    answer = call("GET", path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_the_page_is_only_read(call):
    assert call("POST", "/").status_code == 405
