"""The documented configurations are what Ray Serve and the command take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hetero_kv.errors import ConfigError
from hetero_kv.server.checked_flags import checked
from hetero_kv.server.command import add_flags
from hetero_kv.settings.flags import FlagParser

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def serve_configurations():
    """What each file hands to Ray Serve."""
    kuberay = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8"))
    return {
        "cluster": yaml.safe_load((EXAMPLES / "cluster.yaml").read_text(encoding="utf-8")),
        "kuberay": yaml.safe_load(kuberay["spec"]["serveConfigV2"]),
    }


@pytest.mark.parametrize("name", ["cluster", "kuberay"])
def test_the_arguments_are_flags_of_the_command(name, tmp_path):
    (application,) = serve_configurations()[name]["applications"]
    assert application["import_path"] == "hetero_kv.serving.cluster:app"
    keys = tmp_path / "keys"
    keys.write_text("team:SECRET-KEY", encoding="utf-8")
    parser = FlagParser("hetero-kv serve", "")
    add_flags(parser)
    values = {**application["args"], "api_key_file": str(keys), "cluster": True}
    found = checked(parser.parse(parser.words(values)), listens=False)
    assert (found.cluster.replicas, found.cluster.most_replicas) == ("auto", 4)
    assert found.keys


def test_an_application_whose_address_is_rays_needs_keys():
    pytest.importorskip("ray")
    from hetero_kv.serving.cluster import app

    with pytest.raises(ConfigError, match=r"Ray Serve's proxies may be reached .* give one, or --insecure"):
        app({"max_seq_len": 4096})
    with pytest.raises(ConfigError, match=r"host has no effect here; give it in Ray Serve's http_options"):
        app({"host": "127.0.0.1"})


@pytest.mark.parametrize("name", ["cluster", "kuberay"])
def test_ray_serve_takes_the_configuration(name):
    schema = pytest.importorskip("ray.serve.schema")
    assert schema.ServeDeploySchema.model_validate(serve_configurations()[name]).applications[0].name == "hetero-kv"


def test_the_manifest_has_the_fields_of_a_ray_service():
    # A dependency of Ray.
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(Path(__file__).with_name("ray_service_schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    manifest = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8"))
    assert [each.message for each in validator.iter_errors(manifest)] == []
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]
    head["rayStartParams"]["num-cpus"] = 0
    head["template"]["spec"]["container"] = head["template"]["spec"].pop("containers")
    del manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["groupName"]
    found = [each.message for each in validator.iter_errors(manifest)]
    assert len(found) == 4
    assert "0 is not of type 'string'" in found


def test_the_pods_of_the_manifest_run_what_the_application_needs():
    manifest = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    cluster = manifest["spec"]["rayClusterConfig"]
    arguments = serve_configurations()["kuberay"]["applications"][0]["args"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["maxReplicas"] == arguments["most_replicas"]
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        paths = [each["mountPath"] for each in container["volumeMounts"]]
        volumes = {each["name"] for each in group["template"]["spec"]["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == volumes
        for flag in ("context_folder", "file_folder", "api_key_file"):
            assert any(arguments[flag].startswith(f"{path}/") for path in paths), flag
    (worker,) = workers["template"]["spec"]["containers"]
    assert float(worker["resources"]["limits"]["cpu"]) >= arguments["replica_cpus"]
