"""Builds each variant with `kubectl kustomize` and validates what comes out.

Kubernetes' own kinds by the API's JSON schemas, strictly, at two versions. KEDA's and prometheus-operator's by their
custom resource definitions, where a folder with them is given; else by the few facts below. And what no schema knows:
that names, labels, ports and keys that refer to each other agree.
"""

import pathlib
import subprocess
import sys
import tempfile

import jsonschema
import kubernetes_validate
import yaml

VERSIONS = ["1.29", "1.37"]
HERE = pathlib.Path("deploy/kubernetes").resolve()
# Of KEDA's scaler (pkg/scalers/rabbitmq_scaler.go).
RABBITMQ_KEYS = {
    "queueName", "mode", "queueLength", "value", "activationValue", "host", "protocol", "vhostName", "useRegex",
    "excludeUnacknowledged", "pageSize", "operation", "timeout", "unsafeSsl", "workloadIdentityResource",
}


def build(variant, components):
    """The variant, as it is or with components named as its comments say."""
    if not components:
        folder = HERE / variant
    else:
        # kustomize takes no absolute paths for components below a temporary root: relative ones.
        root = pathlib.Path(tempfile.mkdtemp(prefix="sconce-kustomize-"))
        for name in ("base", "cpu", "gpu", *components):
            (root / name).mkdir()
            for file in (HERE / name).iterdir():
                (root / name / file.name).write_bytes(file.read_bytes())
        file = root / variant / "kustomization.yaml"
        text = file.read_text().replace("# components:", "components:")
        for name in components:
            text = text.replace(f"#   - ../{name}", f"  - ../{name}")
        file.write_text(text)
        folder = root / variant
    try:
        text = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout
    finally:
        if components:
            subprocess.run(["rm", "-rf", folder.parent], check=True)
    return [document for document in yaml.safe_load_all(text) if document]


def strict(schema):
    """Objects whose keys are listed take no others, as `kubectl apply` with strict validation has it."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for key, value in schema.items():
            if key != "enum":
                strict(value)
    elif isinstance(schema, list):
        for value in schema:
            strict(value)
    return schema


def definitions(folder):
    found = {}
    for file in sorted(pathlib.Path(folder).glob("*.yaml")) if folder else []:
        for document in yaml.safe_load_all(file.read_text()):
            if document and document["kind"] == "CustomResourceDefinition":
                for version in document["spec"]["versions"]:
                    schema = strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = {"type": "object"}
                    kind = document["spec"]["names"]["kind"]
                    found[f"{document['spec']['group']}/{version['name']}", kind] = schema
    return found


def validate(document, crds):
    kind = (document["apiVersion"], document["kind"])
    if kind in crds:
        jsonschema.Draft7Validator(crds[kind]).validate(document)
        return "by its CRD"
    if "." in kind[0] and not kind[0].split("/")[0].endswith("k8s.io"):
        return "not by its CRD"
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
    return "by the API's schema"


def of(documents, kind):
    return next((document for document in documents if document["kind"] == kind), None)


def agree(documents, secret):
    """What refers to each other, as (what, whether)."""
    deployment = of(documents, "Deployment")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"].items()
    yield "labels of the Deployment", deployment["spec"]["selector"]["matchLabels"].items() <= labels
    yield "labels of the disruption budget", of(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels
    port = container["ports"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield f"port of {probe}", container[probe]["httpGet"]["port"] == port["containerPort"]
    environment = {entry["name"]: entry for entry in container["env"]}
    yield "port that it listens on", environment["SCONCE_ADMIN__LISTEN"]["value"].endswith(f":{port['containerPort']}")
    key = environment["SCONCE_BROKER__URL"]["valueFrom"]["secretKeyRef"]
    yield "the Secret's url", key["name"] == secret["metadata"]["name"] and key["key"] in secret["stringData"]
    settings = of(documents, "ConfigMap")
    volume = next(volume for volume in pod["spec"]["volumes"] if "configMap" in volume)
    yield "the ConfigMap", volume["configMap"]["name"] == settings["metadata"]["name"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    yield "volumes and mounts", mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    scaled = of(documents, "ScaledObject")
    if scaled:
        yield "KEDA's target", scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        yield "replicas left to KEDA", "replicas" not in deployment["spec"]
        (trigger,) = scaled["spec"]["triggers"]
        metadata = trigger["metadata"]
        yield "KEDA's trigger: known keys, strings", metadata.keys() <= RABBITMQ_KEYS and all(
            isinstance(value, str) for value in metadata.values())
        yield "KEDA's queue", f'task_queue = "{metadata["queueName"]}"' in settings["data"]["sconce.toml"]
        authentication = of(documents, "TriggerAuthentication")
        yield "KEDA's authentication", trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
        for reference in authentication["spec"]["secretTargetRef"]:
            known = reference["name"] == secret["metadata"]["name"] and reference["key"] in secret["stringData"]
            yield f"KEDA's {reference['parameter']} in the Secret", known
    monitor = of(documents, "PodMonitor")
    if monitor:
        yield "labels of the PodMonitor", monitor["spec"]["selector"]["matchLabels"].items() <= labels
        yield "port of the PodMonitor", monitor["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]
        yield "no annotations beside the PodMonitor", "annotations" not in pod["metadata"]


def main(folder):
    crds = definitions(folder)
    secret = yaml.safe_load((HERE / "base/secret.example.yaml").read_text())
    print(f"  secret.example.yaml: Secret {validate(secret, crds)}")
    wrong = 0
    for variant in ("cpu", "gpu"):
        for components in ([], ["keda"], ["podmonitor"], ["keda", "podmonitor"]):
            documents = build(variant, components)
            name = " + ".join([variant, *components])
            how = ", ".join(f"{document['kind']} {validate(document, crds)}" for document in documents)
            print(f"  {name}: {how}")
            for what, holds in agree(documents, secret):
                if not holds:
                    wrong += 1
                    print(f"  {name}: {what}: does not agree")
    print(f"  Kubernetes {' and '.join(VERSIONS)}; {len(crds)} custom resource definitions")
    return bool(wrong)


sys.exit(main(sys.argv[1]))
