"""The playground: static files without a build step."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response

from forerun.serve.errors import ApiError

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"


def install(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files under ``/page/``. Only files of this package are known by name."""
    known = {path.name: path for path in Path(__file__).parent.iterdir() if path.suffix in KINDS}

    def answer(name: str) -> Response:
        if name not in known:
            raise ApiError(404, f"there is nothing at /page/{name}")
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return Response(known[name].read_bytes(), headers=headers, media_type=KINDS[known[name].suffix])

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return answer("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return answer(name)
