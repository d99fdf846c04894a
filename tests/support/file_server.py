"""A local web server for the tests of fetching: an index page of wheels, and a hub's repository."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zipfile import ZIP_DEFLATED, ZipFile

import huggingface_hub


class FileServer:
    """Serves `files` (path → bytes) and links to them at `/`; counts requests; never answers those in `hold`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.hold: set[str] = set()
        self.is_waiting = threading.Event()
        self.released = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(with_body=False)

            def do_GET(self):
                server.requests[self.path] += 1
                if self.path in server.hold:
                    server.is_waiting.set()
                    server.released.wait()
                    return
                self.answer(with_body=True)

            def answer(self, with_body):
                links = "".join(f'<a href="{path}">{path.rpartition("/")[2]}</a>' for path in server.files)
                body = links.encode() if self.path == "/" else server.files.get(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "text/html" if self.path == "/" else "application/octet-stream")
                self.send_header("Content-Length", str(len(body or b"")))
                self.send_header("ETag", f'"{len(body or b"")}"')
                self.send_header("X-Repo-Commit", "0" * 40)
                self.end_headers()
                if with_body:
                    self.wfile.write(body or b"")

            def log_message(self, *args):
                pass

        return Handler


def use_hub(monkeypatch, url):
    """Let the hub's client talk to the server at `url`."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def wheel_of(path, package, version, member, content):
    """Write the wheel of `package` that holds `content` as `member`, and return its bytes."""
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    wheel = path / f"{name}-{version}-py3-none-any.whl"
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel.read_bytes()
