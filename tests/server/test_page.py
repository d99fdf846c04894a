"""The page at `/`: its files, their types, and that they ask no other host for anything."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx2 as httpx
import pytest

from hetero_kv.server.page_routes import page_files
from tests.server.running import host_of, running

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "hetero_kv" / "server" / "page"
NAMES = sorted(path.name for path in FOLDER.iterdir())
# A name that documents carry, and no request goes to.
NAMESPACE = "http://www.w3.org/2000/svg"


class Elements(HTMLParser):
    """The elements of a document: (tag, attributes)."""

    def __init__(self, text):
        super().__init__()
        self.all = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements():
    return Elements((FOLDER / "index.html").read_text(encoding="utf-8")).all


def test_the_page_is_at_the_root(http):
    found = http.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert found.content == (FOLDER / "index.html").read_bytes()
    assert http.head("/").headers["etag"] == found.headers["etag"]


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_there_with_its_media_type(http, name):
    types = {
        ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
    }  # fmt: skip
    found = http.get(f"/page/{name}")
    assert found.status_code == 200
    assert found.headers["content-type"] == types[Path(name).suffix]
    assert found.headers["x-content-type-options"] == "nosniff"


def test_the_policy_lets_the_page_load_its_own_files_alone(http):
    policy = http.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


def test_a_file_that_has_not_changed_is_not_sent_again(http):
    etag = http.get("/page/script.js").headers["etag"]
    again = http.get("/page/script.js", headers={"if-none-match": f'"other", W/{etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/page/script.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "nothing.js", "", "%2e%2e/%2e%2e/pyproject.toml"])
def test_nothing_but_the_pages_files_is_served(http, name):
    found = http.get(f"/page/{name}")
    assert found.status_code == 404
    assert "error" in found.json()


def test_the_page_needs_no_key_and_what_it_shows_does(served, tmp_path):
    with running(host_of(served, folder=tmp_path, keys=("secret-of-ann",))) as address:
        assert httpx.get(f"{address}/").status_code == 200
        assert httpx.get(f"{address}/page/script.js").status_code == 200
        assert httpx.get(f"{address}/v1/models").status_code == 401


def test_the_files_name_no_other_host():
    for name in NAMES:
        text = (FOLDER / name).read_text(encoding="utf-8").replace(NAMESPACE, "")
        # Regular expressions that know links are no addresses.
        assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), name


def test_the_page_has_no_inline_script_or_style(elements):
    for tag, attributes in elements:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "style"
        assert tag != "script" or attributes["src"].startswith("page/")


def test_no_script_makes_nodes_of_text():
    for name in NAMES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_what_the_page_names_is_there(elements):
    links = [attributes.get("src") or attributes.get("href") for _, attributes in elements]
    names = {link.removeprefix("page/") for link in links if link and link.startswith("page/")}
    for path in FOLDER.glob("*.js"):
        names |= set(re.findall(r'from "\./([a-z_]+\.js)"', path.read_text(encoding="utf-8")))
    assert names <= set(NAMES)
    assert {name for name in NAMES if name != "index.html"} == names


def test_icons_that_are_named_are_there(elements):
    icons = {attributes["id"] for tag, attributes in elements if tag == "symbol"}
    named = {attributes["href"].removeprefix("#") for tag, attributes in elements if tag == "use"}
    for path in FOLDER.glob("*.js"):
        named |= {
            f"icon-{name}" for name in re.findall(r'icon(?:Button)?\("([a-z]+)"', path.read_text(encoding="utf-8"))
        }
    assert named == icons


def test_every_field_and_button_has_a_name(elements):
    labels = {attributes.get("for") for tag, attributes in elements if tag == "label"}
    for tag, attributes in elements:
        if tag == "button" and "wide" not in attributes["class"]:
            assert attributes.get("aria-label")
        if tag == "textarea":
            assert attributes.get("aria-label") or attributes["id"] in labels


def test_the_wheel_has_the_page():
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in patterns["hetero_kv"] for path in (REPOSITORY / "hetero_kv").glob(pattern)}
    assert set(FOLDER.iterdir()) <= packaged
    assert set(page_files()) == set(NAMES)
