"""GGUF files of a hub's repository, by the type of their weights or by name; the real client, a local server."""

from __future__ import annotations

import json

import huggingface_hub
import pytest

from hetero_kv import load_model
from hetero_kv.cli import main
from hetero_kv.models import ModelError
from hetero_kv.models.locating import locate
from tests.support.file_server import FileServer, use_hub
from tests.support.gguf_models.splitting import split

REPO = "some/tiny-GGUF"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve a repository with these files (path → bytes) from a hub with an empty cache."""
    server = FileServer()
    use_hub(monkeypatch, server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def serve(**files):
        named = {path.replace("__", "/") + ".gguf": content for path, content in files.items()}
        siblings = [{"rfilename": path, "size": len(content)} for path, content in named.items()]
        listing = json.dumps({"id": REPO, "sha": "0" * 40, "siblings": siblings}).encode()
        server.files[f"/api/models/{REPO}?blobs=true"] = server.files[f"/api/models/{REPO}"] = listing
        for path, content in named.items():
            server.files[f"/{REPO}/resolve/{'0' * 40}/{path}"] = content
        return server

    yield serve
    server.close()


FILES = {
    "tiny-Q4_K_M": b"GGUF4",
    "tiny-Q8_0": b"GGUF8",
    "tiny-IQ4_XS": b"GGUFi",
    "UD__tiny-Q2_K": b"GGUF2",
    "tiny-UD-Q8_0": b"GGUFu",
    "mmproj-Q4_K_M": b"GGUFm",
    "mtp-tiny-Q4_K_M": b"GGUFd",
}


@pytest.mark.parametrize(
    ("wanted", "content"),
    [
        ("Q4_K_M", b"GGUF4"),
        ("q4_k_m", b"GGUF4"),
        ("IQ4_XS", b"GGUFi"),
        ("Q2_K", b"GGUF2"),
        ("tiny-Q8_0.gguf", b"GGUF8"),
        ("UD/tiny-Q2_K.gguf", b"GGUF2"),
        ("tiny-Q2_K.gguf", b"GGUF2"),
    ],
)
def test_a_file_is_found_by_the_type_of_its_weights_or_by_its_name(hub, caplog, wanted, content):
    hub(**FILES)
    told = []
    location = locate(f"{REPO}:{wanted}", None, lambda *report: told.append(report))
    assert location.gguf.read_bytes() == content
    assert (location.name, location.pretrained) == (f"{REPO}:{wanted}", None)
    assert told[-1] == ("downloading", len(content), len(content))
    assert "the encoder of images or sounds beside it is left out: mmproj-Q4_K_M.gguf" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("Q4_K_S", r"has no GGUF file for 'Q4_K_S'; it has UD/tiny-Q2_K\.gguf, tiny-IQ4_XS\.gguf, tiny-Q4_K_M"),
        ("Q8_0", r"has 2 files for 'Q8_0': tiny-Q8_0\.gguf, tiny-UD-Q8_0\.gguf; give one as some/tiny-GGUF:NAME"),
        ("other.gguf", r"has no GGUF file for 'other\.gguf'"),
        ("Q4_K", r"has no GGUF file for 'Q4_K'"),
    ],
)
def test_none_and_several_files_are_refused_by_their_names(hub, wanted, message):
    hub(**FILES)
    with pytest.raises(ModelError, match=message):
        locate(f"{REPO}:{wanted}", None, None)


def test_a_missing_repository_is_refused(hub):
    hub().files.clear()
    with pytest.raises(ModelError, match=r"cannot be reached|there is no hub repository 'some/tiny-GGUF'"):
        locate(f"{REPO}:Q8_0", None, None)


def test_a_model_in_parts_is_downloaded_whole_and_loads(hub, tiny_gguf, tmp_path):
    paths = split(tiny_gguf, tmp_path, "tiny-Q8_0", 3)
    hub(**{f"Q8_0__{path.stem}": path.read_bytes() for path in paths})
    location = locate(f"{REPO}:Q8_0", None, None)
    assert [path.name for path in sorted(location.gguf.parent.glob("*.gguf"))] == [path.name for path in paths]
    assert load_model(f"{REPO}:Q8_0").name == f"{REPO}:Q8_0"


def test_a_repository_that_lacks_a_part_is_refused(hub):
    hub(**{"tiny-Q8_0-00001-of-00002": b"GGUF"})
    with pytest.raises(ModelError, match=r"lacks 1 of the 2 parts of .*tiny-Q8_0-00002-of-00002\.gguf"):
        locate(f"{REPO}:Q8_0", None, None)


def test_without_a_hub_its_cache_serves(hub, monkeypatch):
    hub(**FILES)
    first = locate(f"{REPO}:Q4_K_M", None, None)
    use_hub(monkeypatch, "http://127.0.0.1:9")
    assert locate(f"{REPO}:Q4_K_M", None, None) == first
    with pytest.raises(
        ModelError, match=r"in the hub's cache, without network, has no GGUF file for 'Q2_K'; it has tiny"
    ):
        locate(f"{REPO}:Q2_K", None, None)


def test_without_a_hub_and_a_cache_the_repository_is_named(hub, monkeypatch):
    use_hub(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"the hub cannot be reached, and its cache has nothing of 'some/tiny-GGUF'"):
        locate(f"{REPO}:Q2_K", None, None)


def test_the_weights_of_a_configuration_may_be_on_the_hub(hub, tiny_directory):
    hub(**FILES)
    location = locate(tiny_directory, f"{REPO}:Q4_K_M", None)
    assert location.pretrained == str(tiny_directory)
    assert location.gguf.read_bytes() == b"GGUF4"


def test_a_model_with_its_weights_on_the_hub_takes_no_others(hub):
    with pytest.raises(ModelError, match=rf"'{REPO}:Q8_0' includes weights, and gguf_path is 'x.gguf' as well"):
        locate(f"{REPO}:Q8_0", "x.gguf", None)


def test_the_command_fetches_it(hub, capsys):
    hub(**FILES)
    assert main(["models", "fetch", f"{REPO}:Q4_K_M"]) == 0
    assert capsys.readouterr().out.endswith("tiny-Q4_K_M.gguf\n")
