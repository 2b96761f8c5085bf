"""Compile every pipeline to KFP's intermediate representation, bare and for each placement."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import yaml
from kfp import compiler
from kfp.dsl.graph_component import GraphComponent

from components.image import IMAGE
from components.train_job import DISTRIBUTED, SHARDED
from pipelines.ensemble_router import ensemble_router
from pipelines.placement import Placement, load_placement, placed, shipped_placements, stages_of
from pipelines.retrain import retrain
from pipelines.search_router import search_router
from pipelines.step_router import step_router
from pipelines.trainjob import WORK_VOLUME, pod_template

PIPELINES: dict[str, GraphComponent] = {
    "search-router": search_router,
    "step-router": step_router,
    "ensemble-router": ensemble_router,
    "retrain": retrain,
}
ALL = "all"


def compile_all(out: Path, placement: str | None = None) -> list[Path]:
    """Compile every pipeline into ``out`` and return the files.

    Without a placement: ``<pipeline>.yaml``. With one, by name or file: ``<placement>/<pipeline>.yaml`` with KFP's
    platform spec, and under ``<placement>/gitops`` what a GitOps controller applies instead of uploading them. ``all``
    is the first and every shipped placement. Raises BadInput naming the placement's file and field.
    """
    if placement is None:
        return [compile_one(name, pipeline, out) for name, pipeline in PIPELINES.items()]
    if placement != ALL:
        return compile_placed(read_placement(placement), out)
    files = compile_all(out)
    for name in shipped_placements():
        files += compile_placed(read_placement(name), out)
    return files


def read_placement(name_or_path: str) -> Placement:
    """The placement of that name or file, whose stages are those of the pipelines."""
    stages = set().union(*(stages_of(pipeline) for pipeline in PIPELINES.values()))
    return load_placement(name_or_path, stages, DISTRIBUTED, SHARDED)


def compile_one(name: str, pipeline: GraphComponent, out: Path) -> Path:
    """Write ``<name>.yaml``."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.yaml"
    compiler.Compiler().compile(pipeline, str(file))
    return file


def compile_placed(placement: Placement, out: Path) -> list[Path]:
    """Write the pipelines as that placement has them, with their resources and its claims, and what makes these writable."""
    folder = out / placement.name
    (folder / "gitops").mkdir(parents=True, exist_ok=True)
    files = []
    for name, pipeline in PIPELINES.items():
        file = compile_one(name, placed(pipeline, placement), folder)
        resources = folder / "gitops" / f"{name}.yaml"
        write_manifests(resources, pipeline_resources(name, placement, file))
        files += [file, resources]
    if placement.claims:
        write_manifests(folder / "gitops" / "claims.yaml", [*claims_of(placement), *volume_jobs(placement)])
        files.append(folder / "gitops" / "claims.yaml")
    return files


def pipeline_resources(name: str, placement: Placement, compiled: Path) -> list[dict[str, object]]:
    """A Pipeline, and the PipelineVersion that ``compiled`` is.

    A version cannot be changed, so its name ends in a hash of what it holds. The namespace is left to who applies them.
    """
    pipeline_spec, platform_spec = yaml.safe_load_all(compiled.read_text(encoding="utf-8"))
    content = json.dumps([pipeline_spec, platform_spec], sort_keys=True)
    version = f"{name}-{placement.name}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"
    description = pipeline_spec["pipelineInfo"]["description"]
    kind = {"apiVersion": "pipelines.kubeflow.org/v2beta1"}
    labels = {"app.kubernetes.io/part-of": "routewright"}
    return [
        {
            **kind,
            "kind": "Pipeline",
            "metadata": {"name": name, "labels": labels},
            "spec": {"displayName": name, "description": description},
        },
        {
            **kind,
            "kind": "PipelineVersion",
            "metadata": {"name": version, "labels": labels},
            "spec": {
                "pipelineName": name,
                "versionName": version,
                "displayName": version,
                "description": f"{description} Placement: {placement.name}.",
                "pipelineSpec": pipeline_spec,
                "platformSpec": platform_spec,
            },
        },
    ]


def claims_of(placement: Placement) -> list[dict[str, object]]:
    """The PersistentVolumeClaims that its stages mount."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "routewright"}},
            "spec": {
                "storageClassName": claim.storage_class,
                "accessModes": list(claim.access_modes),
                "resources": {"requests": {"storage": claim.size}},
            },
        }
        for name, claim in placement.claims.items()
    ]


def volume_jobs(placement: Placement) -> list[dict[str, object]]:
    """A Job for each work volume: its pod gives the volume to the group of the steps, and fails if it cannot write there.

    A Job cannot be changed, so its name ends in a hash of what it is.
    """
    places = (*placement.stages.values(), placement.defaults)
    named = {where.work.claim: (where.work.mount, where) for where in places if where.work}
    found: list[dict[str, object]] = []
    for claim, (mount, where) in named.items():
        alone = where.model_copy(update={"volumes": (), "empty_dirs": (), "config_maps": (), "shm": None})
        amount = {"cpu": "100m", "memory": "64Mi"}
        template = pod_template(
            alone,
            {
                "name": "writable",
                "image": IMAGE,
                "command": ["test", "-w", mount],
                "resources": {"requests": amount, "limits": dict(amount)},
            },
        )
        template["spec"] |= {"restartPolicy": "Never", "automountServiceAccountToken": False}
        spec = {"backoffLimit": 2, "template": template}
        made = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:10]
        labels = {"app.kubernetes.io/part-of": "routewright", WORK_VOLUME: claim[:63]}
        metadata = {"name": f"{claim[:50]}-{made}", "labels": labels}
        found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    return found


def write_manifests(file: Path, manifests: list[dict[str, object]]) -> None:
    """Write one YAML document for each manifest."""
    file.write_text(yaml.safe_dump_all(manifests, sort_keys=False, allow_unicode=True, width=200), encoding="utf-8")
