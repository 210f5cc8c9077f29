"""Rendered manifests are valid, and their ports, routes, resources, images and paths exist."""

import copy
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import ray
import yaml

from cluster.cli.arguments import Parser, config_from_options
from cluster.cli.commands import serve
from cluster.cli.main import main
from cluster.http.app import build_app
from cluster.serving.serve_app import build_serve_app
from cluster.serving.settings import KEY_VARIABLE
from contracts.config import TandemConfig
from dashboards.rules import alerts
from deploy.app import serve_config
from tests.architecture.support import ROOT
from tests.support.manifests import KUBERNETES, OVERLAYS, Manifest, documents, faults, render

ALONE = ("bulk_job.yaml", "cluster/raycluster.yaml")  # applied by themselves
SERVICES = ("base", "laptop", "gpu")
RENDERED = {name: render(KUBERNETES / name) for name in OVERLAYS}
RENDERED |= {name: documents(KUBERNETES / name) for name in ALONE}
EVERY = [
    pytest.param(manifest, id=f"{name}:{manifest['kind']}:{manifest['metadata']['name']}")
    for name, manifests in RENDERED.items()
    for manifest in manifests
]
(JOB,) = RENDERED["bulk_job.yaml"]
ENTRYPOINT = shlex.split(JOB["spec"]["entrypoint"])
UNITS = {"m": 1e-3, "": 1.0, "Mi": 2.0**20, "Gi": 2.0**30}


def service(overlay: str) -> Manifest:
    (found,) = (one for one in RENDERED[overlay] if one["kind"] == "RayService")
    return found


def of_kind(kind: str) -> Iterator[Manifest]:
    return (one for found in RENDERED.values() for one in found if one["kind"] == kind)


def ray_cluster(overlay: str) -> Manifest:
    found: Manifest = service(overlay)["spec"]["rayClusterConfig"]
    return found


def groups(overlay: str) -> dict[str, Manifest]:
    """Return the head and the worker groups by name."""
    cluster = ray_cluster(overlay)
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def head(overlay: str) -> Manifest:
    found: Manifest = groups(overlay)["head"]["template"]["spec"]
    return found


def pod_templates() -> Iterator[tuple[str, Manifest]]:
    """Yield all pod templates with the labels that KubeRay adds."""
    for name in SERVICES:
        for group, spec in groups(name).items():
            template = copy.deepcopy(spec["template"])
            node = "head" if group == "head" else "worker"
            template["metadata"]["labels"] |= {"ray.io/node-type": node, "ray.io/group": group}
            yield f"{name}:{group}", template
    (deployment,) = of_kind("Deployment")
    yield "single", deployment["spec"]["template"]
    yield "bulk job", JOB["spec"]["submitterPodTemplate"]


PODS = [pytest.param(template, id=name) for name, template in pod_templates()]


def amount(quantity: str | int) -> float:
    found = re.fullmatch(r"(\d+)(m|Mi|Gi|)", str(quantity))
    assert found, quantity
    return int(found[1]) * UNITS[found[2]]


def serve_file(overlay: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(service(overlay)["spec"]["serveConfigV2"])
    return document


def config(overlay: str) -> TandemConfig:
    (application,) = serve_file(overlay)["applications"]
    return serve_config(application["args"])


@pytest.mark.parametrize("manifest", EVERY)
def test_manifest_is_valid_by_its_schema(manifest: Manifest) -> None:
    assert not list(faults(manifest))


def test_schema_check_finds_mistakes() -> None:
    for key, value in (("replicas", "two"), ("replica", 1)):
        manifest = copy.deepcopy(service("base"))
        manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0][key] = value
        assert list(faults(manifest)), key


def test_every_file_is_rendered_and_raycluster_equals_that_of_gpu_service() -> None:
    named = {KUBERNETES / name for name in ALONE}
    for overlay in OVERLAYS:
        document = yaml.safe_load((KUBERNETES / overlay / "kustomization.yaml").read_text())
        named.add(KUBERNETES / overlay / "kustomization.yaml")
        files = (*document["resources"], *(patch["path"] for patch in document.get("patches", ())))
        named |= {(KUBERNETES / overlay / name).resolve() for name in files}
    assert set(KUBERNETES.rglob("*.yaml")) <= named
    (cluster,) = RENDERED["cluster/raycluster.yaml"]
    assert cluster["spec"] == ray_cluster("gpu")


@pytest.mark.parametrize("overlay", SERVICES)
def test_ranks_fit_into_pods_of_their_group(overlay: str) -> None:
    found, wanted = groups(overlay), config(overlay).groups
    pods = {"attention": {"attention", "expert"}, "expert": set()} if overlay == "gpu" else {}
    offered: Counter[str] = Counter()
    for group in ("attention", "expert", "prefill"):
        spec, kinds = found[group], pods.get(group, {group})
        (document,) = shlex.split(spec["rayStartParams"]["resources"])
        of_pod = yaml.safe_load(document)
        assert set(of_pod) == kinds or not spec["replicas"], "no other group's ranks come here"
        offered += Counter({kind: spec["replicas"] * count for kind, count in of_pod.items()})
        assert spec["minReplicas"] <= spec["replicas"] <= spec["maxReplicas"]
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        ranks = sum(of_pod.values())
        assert wanted.cpus_per_rank * ranks <= amount(limits["cpu"])
        assert wanted.torch_threads * ranks <= amount(limits["cpu"])
        assert int(limits.get("nvidia.com/gpu", 0)) == (ranks if overlay == "gpu" else 0)
    assert wanted.attention_resources == {"attention": 1}
    assert (wanted.expert_resources, wanted.prefill_resources) == ({"expert": 1}, {"prefill": 1})
    assert offered == {
        "attention": wanted.attention_ranks,
        "expert": wanted.expert_ranks,
        "prefill": wanted.prefill_ranks,
    }
    assert found["head"]["rayStartParams"]["num-cpus"] == "0"
    assert found["prefill"]["maxReplicas"] == config(overlay).prefill_slots
    assert ray_cluster(overlay)["enableInTreeAutoscaling"] is True


@pytest.mark.parametrize("overlay", SERVICES)
def test_serve_configuration_names_existing_objects(overlay: str) -> None:
    document = serve_file(overlay)
    (application,) = document["applications"]
    deployed = build_serve_app(config(overlay))
    names = {deployed._bound_deployment.name}
    assert {one["name"] for one in application["deployments"]} <= names
    module, _, name = application["import_path"].partition(":")
    assert name in (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    ports = {one["name"]: one["containerPort"] for one in head(overlay)["containers"][0]["ports"]}
    assert ports["serve"] == document["http_options"]["port"]
    assert document["http_options"]["request_timeout_s"] > config(overlay).http.request_timeout_s


@pytest.mark.parametrize("template", PODS)
def test_pods_run_with_least_privilege_and_known_environment(template: Manifest) -> None:
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    uid = re.search(r"useradd .*--uid (\d+)", (ROOT / "deploy/Dockerfile").read_text())
    assert uid
    assert spec["securityContext"]["runAsUser"] == int(uid[1])
    volumes = {one["name"]: one for one in spec.get("volumes", ())}
    known = {KEY_VARIABLE, "HOME", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"}
    for container in spec["containers"]:
        assert {one["name"] for one in container.get("env", ())} <= known
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        resources = container["resources"]
        for name, limit in resources["limits"].items():
            assert amount(resources["requests"][name]) <= amount(limit)
        if context.get("readOnlyRootFilesystem"):
            assert {"/tmp", "/dev/shm"} <= {one["mountPath"] for one in container["volumeMounts"]}
        mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts", ())}
        assert set(mounts.values()) <= set(volumes)
        if "/dev/shm" in mounts:
            memory = volumes[mounts["/dev/shm"]]["emptyDir"]
            assert memory["medium"] == "Memory"
            limit = amount(container["resources"]["limits"]["memory"])
            assert amount(memory["sizeLimit"]) <= limit / 2


def test_models_are_mounted_and_object_store_fits_shared_memory() -> None:
    path = config("base").model.path
    for overlay in SERVICES:
        for spec in groups(overlay).values():
            volumes = {one["name"]: one for one in spec["template"]["spec"]["volumes"]}
            size = amount(volumes["shared-memory"]["emptyDir"]["sizeLimit"])
            assert int(spec["rayStartParams"]["object-store-memory"]) <= size / 2
    for spec in groups("base").values():
        mounts = spec["template"]["spec"]["containers"][0]["volumeMounts"]
        (found,) = (one for one in mounts if path.startswith(one["mountPath"] + "/"))
        assert found["readOnly"] is True


def _secret_at(template: Manifest, path: str) -> str:
    """Return the Secret whose key is the file at `path`, or ""."""
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}
    for mount in template["spec"]["containers"][0]["volumeMounts"]:
        if str(Path(path).parent) == mount["mountPath"]:
            return str(volumes[mount["name"]]["secret"]["secretName"])
    return ""


def test_keys_are_mounted_only_where_the_ingress_runs() -> None:
    """The whole folder is mounted, because a single file (subPath) is not updated."""
    for name, template in pod_templates():
        overlay, _, group = name.partition(":")
        if overlay in SERVICES:
            path = config(overlay).http.keys_file
            (application,) = serve_file(overlay)["applications"]
            options = {one["name"]: one for one in application["deployments"]}["Ingress"]
            assert "node:__internal_head__" in options["ray_actor_options"]["resources"]
            assert path
            assert _secret_at(template, path) == ("tandem-keys" if group == "head" else "")
        for container in template["spec"]["containers"]:
            assert not any("subPath" in mount for mount in container.get("volumeMounts", ()))


def routes() -> set[str]:
    """Return the routes in the source of the API."""
    source = Path(str(build_app.__code__.co_filename)).read_text(encoding="utf-8")
    return set(re.findall(r'"(/[\w/]+)", \w', source))


@pytest.mark.parametrize("template", PODS)
def test_probes_use_existing_routes(template: Manifest) -> None:
    of_ray = [Path(ray.__file__).parent / "dashboard" / name for name in ("modules", "consts.py")]
    sources = " ".join(
        path.read_text(encoding="utf-8")
        for at in of_ray
        for path in ([at] if at.is_file() else sorted(at.rglob("*.py")))
    )
    for container in template["spec"]["containers"]:
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
        for probe in (
            container.get(f"{name}Probe") for name in ("startup", "readiness", "liveness")
        ):
            if probe is None:
                continue
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in routes()
                assert probe["httpGet"]["port"] in ports
            for url in re.findall(r"http://localhost:\S+", " ".join(_command(probe))):
                port, _, route = url.removeprefix("http://localhost:").partition("/")
                assert f"/{route}" in sources, url
                assert int(port) in (52365, *ports.values()), url
            assert probe["timeoutSeconds"] >= 5, "a machine may be busy"


def _command(probe: Manifest) -> list[str]:
    command: list[str] = probe.get("exec", {}).get("command", [])
    return command


def test_head_readiness_does_not_depend_on_the_application() -> None:
    """KubeRay submits the application only to a head that is ready."""
    for overlay in SERVICES:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = " ".join(_command(head(overlay)["containers"][0][name]))
            assert "healthz" in command
            assert ":8000" not in command


def test_images_match_the_dockerfile() -> None:
    head = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    for _, template in pod_templates():
        for container in template["spec"]["containers"]:
            assert f"-t {container['image']} " in head
            assert container["image"].startswith(f"tandem-moe:{version[1]}")
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    for overlay in SERVICES:
        assert ray_cluster(overlay)["rayVersion"] == pinned[1]


def test_command_of_the_single_pod_parses() -> None:
    (deployment,) = of_kind("Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["tandem", "serve"]
    parser = Parser()
    serve.add_serve(parser.add_subparsers())
    http = config_from_options(parser.parse_args(container["command"][1:])).http
    assert http.keys_file
    assert _secret_at(deployment["spec"]["template"], http.keys_file) == "tandem-keys"
    assert http.host == "0.0.0.0"
    assert http.port == container["ports"][0]["containerPort"]


def _selects(selector: Manifest, template: Manifest) -> bool:
    labels = template["metadata"].get("labels", {})
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return all(labels.get(name) == value for name, value in wanted.items())


def test_only_the_ingress_port_is_public_and_only_container_ports_are_open() -> None:
    for name in (*SERVICES, "single"):
        policies = [one["spec"] for one in RENDERED[name] if one["kind"] == "NetworkPolicy"]
        for _, template in (each for each in pod_templates() if each[0].split(":")[0] == name):
            matching = [spec for spec in policies if _selects(spec["podSelector"], template)]
            assert any("Ingress" in spec["policyTypes"] for spec in matching), "others are refused"
            rules = [rule for spec in matching for rule in spec.get("ingress", ())]
            for rule in (rule for rule in rules if "from" not in rule):
                assert [port["port"] for port in rule["ports"]] == [8000]
                is_worker = template["metadata"]["labels"].get("ray.io/node-type") == "worker"
                assert not is_worker, "clients have nothing to do with ranks"
    open_ports = {
        port["containerPort"]
        for _, template in pod_templates()
        for container in template["spec"]["containers"]
        for port in container.get("ports", ())
    }
    for policy in of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            assert {port["port"] for port in rule.get("ports", ())} <= open_ports


@pytest.mark.parametrize("overlay", SERVICES)
def test_clients_service_selects_only_pods_with_a_proxy(overlay: str) -> None:
    """KubeRay labels all pods of a RayService ray.io/serve=true; the proxy is on the head."""
    (ours,) = (one for one in RENDERED[overlay] if one["kind"] == "Service")
    assert serve_file(overlay)["proxy_location"] == "HeadOnly"
    selected = []
    for name, template in pod_templates():
        template["metadata"]["labels"]["ray.io/serve"] = "true"
        if _selects({"matchLabels": ours["spec"]["selector"]}, template):
            selected.append(name)
    assert [name for name in selected if name.startswith(overlay)] == [f"{overlay}:head"]
    ports = {one["name"]: one["containerPort"] for one in head(overlay)["containers"][0]["ports"]}
    assert [ports[port["targetPort"]] for port in ours["spec"]["ports"]] == [8000]


@pytest.mark.parametrize("overlay", SERVICES)
def test_workers_outlive_the_drain_of_the_head(overlay: str) -> None:
    found = groups(overlay)
    drain_s = config(overlay).http.drain_timeout_s
    for name, spec in found.items():
        pod = spec["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        wait_s = int(command[-1])
        assert command == ["sleep", str(wait_s)]
        assert wait_s >= drain_s + (5 if name == "head" else 20)
        assert pod["terminationGracePeriodSeconds"] >= wait_s + 30


def test_disruption_budgets_protect_attention_and_expert_ranks() -> None:
    for overlay in SERVICES:
        found = groups(overlay)
        budgets = {
            one["metadata"]["name"].removeprefix("tandem-"): one["spec"]
            for one in RENDERED[overlay]
            if one["kind"] == "PodDisruptionBudget"
        }
        assert set(budgets) == set(found)
        for group, template in (
            (name.split(":")[1], each)
            for name, each in pod_templates()
            if name.startswith(f"{overlay}:")
        ):
            chosen = [name for name, one in budgets.items() if _selects(one["selector"], template)]
            assert chosen == [group]
        for group in ("attention", "expert"):
            assert budgets[group]["minAvailable"] == found[group]["replicas"]


def test_monitoring_finds_pods_and_dashboards() -> None:
    for monitor, pods in zip(of_kind("PodMonitor"), ("base:", "single"), strict=True):
        ports: set[str] = set()
        for name, template in pod_templates():
            if name.startswith(pods):
                assert _selects(monitor["spec"]["selector"], template)
                ports |= {one["name"] for one in template["spec"]["containers"][0]["ports"]}
        ours = monitor["spec"]["podMetricsEndpoints"][0]
        assert (ours["port"], ours["honorLabels"]) == ("serve" if pods == "base:" else "http", True)
        cluster, job = ours["relabelings"]
        assert cluster["targetLabel"] == "cluster"
        assert job == {"targetLabel": "job", "replacement": "tandem"}, "which alerts select"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports
            assert endpoint.get("path", "/metrics") in routes()
    assert not any(config(overlay).metrics.exporters for overlay in SERVICES), "/metrics, or they"
    (rules,) = of_kind("PrometheusRule")
    names = {rule.get("alert") for group in rules["spec"]["groups"] for rule in group["rules"]}
    assert {alert.name for alert in alerts()} <= names
    (boards,) = (one for one in RENDERED["monitoring"] if one["kind"] == "ConfigMap")
    assert boards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert set(boards["data"]) == {path.name for path in (ROOT / "dashboards").glob("*.json")}


def test_entrypoint_passes_all_checks_before_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_ray(*_: object, **__: object) -> None:
        raise RuntimeError("no cluster in this test")

    monkeypatch.setattr(ray, "init", no_ray)
    assert ENTRYPOINT[:4] == ["python", "-m", "tandem", "bulk"]
    words = [word.replace("/shared", str(tmp_path)) for word in ENTRYPOINT[4:]]
    folder = Path(words[words.index("--input") + 1]).parent
    folder.mkdir(parents=True)
    rows = pyarrow.table({"id": [1, 2], "text": ["good", "bad"]})
    pyarrow.parquet.write_table(rows, folder / "rows.parquet")
    assert main(["bulk", *words]) == 2
    assert "no cluster in this test" in capsys.readouterr().err


def test_job_resumes_and_uses_a_persistent_volume() -> None:
    assert "--resume" in ENTRYPOINT
    pod = head("base")
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    claims = {v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    for option in ("--input", "--output"):
        path = Path(ENTRYPOINT[ENTRYPOINT.index(option) + 1])
        assert any(mounts.get(str(parent)) in claims for parent in path.parents), path
    selector = JOB["spec"]["clusterSelector"]["ray.io/cluster"]
    assert selector == f"{service('base')['metadata']['name']}-SUFFIX"
    assert JOB["spec"]["backoffLimit"] == 0


def test_gpu_extras_and_image_use_one_cuda_major() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for major in ("12", "13"):
        extra = " ".join(project["project"]["optional-dependencies"][f"cuda{major}"])
        assert set(re.findall(r"(?:cuda|cu)(\d\d)x?", extra)) == {major}
        assert "triton" in extra
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"\[cuda(\d\d)\]' .*/whl/cu(\d\d)", text) == [("13", "13")]
    assert "COMPILER='gcc libc6-dev'" in text, "Triton needs a C compiler"
