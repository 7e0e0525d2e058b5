"""The web page at `/`: packaged files, with headers that keep the browser to this server.

The page asks for no key, its data do. It loads nothing from elsewhere, runs no inline script, and
may not turn text into markup: the browser enforces all three (Content-Security-Policy, with
Trusted Types where the browser knows them).
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

ASSET_PREFIX: Final = "/web/"
INDEX: Final = "index.html"
VERSION_MARK: Final = "@version@"  # in index.html, where the files' version goes

_CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_SAFETY: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
_REVALIDATE: Final = "no-cache"
_FOREVER: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Page:
    """The page's files, held in memory: a few tens of kilobytes.

    Args:
        version: digest of all files; part of every asset's address, so that assets can be cached
            for good and one page never mixes files of two releases.
        assets: name -> content, all files but the page itself.
        index: the page itself.
    """

    version: str
    assets: dict[str, bytes]
    index: bytes


def load_page() -> Page:
    """Read the packaged files."""
    folder = files("qinfer.server").joinpath("web")
    contents = {
        item.name: item.read_bytes()
        for item in sorted(folder.iterdir(), key=lambda item: item.name)
        if PurePath(item.name).suffix in _CONTENT_TYPES
    }
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    version = digest.hexdigest()[:16]
    index = contents.pop(INDEX).replace(VERSION_MARK.encode(), version.encode())
    return Page(version, contents, index)


def add_page(app: FastAPI) -> None:
    """Add the routes of the web page: `/` and `/web/VERSION/NAME`."""
    page = load_page()

    async def index(request: Request) -> Response:
        return _send(request, page, INDEX, page.index, caching=_REVALIDATE)

    async def asset(version: str, name: str, request: Request) -> Response:
        content = page.assets.get(name)  # a look-up by name: no path ever reaches the file system
        if version != page.version or content is None:
            raise HTTPException(404, "no such file of the page; reload it")
        return _send(request, page, name, content, caching=_FOREVER)

    for path, endpoint in (("/", index), (ASSET_PREFIX + "{version}/{name}", asset)):
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)


def _send(request: Request, page: Page, name: str, content: bytes, *, caching: str) -> Response:
    """Return a file, or 304 if the browser has it already."""
    etag = f'"{page.version}"'
    headers = _SAFETY | {"ETag": etag, "Cache-Control": caching}
    known = request.headers.get("if-none-match", "")
    if etag in (item.strip().removeprefix("W/") for item in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_CONTENT_TYPES[PurePath(name).suffix])
