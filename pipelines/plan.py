"""What would be submitted: the pipeline with its placement, typed parameters, stages with resources, GPU-hours and cost.

Nothing here asks a cluster.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.image import BUILD_IT, is_placeholder
from pipelines.compile import PIPELINES, compile_one, pipeline_resources, read_placement
from pipelines.placement import PLACEMENTS, Placement, StagePlacement, placed
from routewright.data_versions import parse_source
from routewright.errors import BadInput
from routewright.pools.fetch import EMBEDDED
from routewright.validation import fault

KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "STRING": ("text", (str,)),
    "NUMBER_INTEGER": ("a whole number", (int,)),
    "NUMBER_DOUBLE": ("a number", (int, float)),
    "BOOLEAN": ("true or false", (bool,)),
    "LIST": ("a JSON list", (list,)),
    "STRUCT": ("a JSON object", (dict,)),
}
"""KFP's parameter types: as a person reads them, and as Python has them."""
NAMED = {"pool": (EMBEDDED,), "environment": ("textworld", "shell")}
ALWAYS_RUN = ("drift-check", "promote")
"""Stages that look at what changes by itself, a log and the champion: never taken from KFP's cache."""


@dataclass(frozen=True)
class Compiled:
    """A pipeline compiled with a placement.

    ``text`` is what is uploaded: KFP's pipeline spec and platform spec as YAML. ``version`` is the name that
    `routewright compile` gives to the same content, so that a version applied by GitOps is not uploaded again.
    """

    pipeline: str
    placement: Placement
    spec: dict[str, Any]
    text: str
    version: str


def compiled(pipeline: str, placement: str, cache: bool = False) -> Compiled:
    """Compile a pipeline with a placement (a shipped one or a file).

    ``cache`` turns KFP's cache on for the stages that are not in `ALWAYS_RUN`. BadInput for a pipeline or a placement that
    is not there, and for what is wrong in the placement's file.
    """
    if pipeline not in PIPELINES:
        raise BadInput(f"pipeline {pipeline}: expected one of {', '.join(PIPELINES)}")
    where = read_placement(placement)
    with tempfile.TemporaryDirectory() as folder:
        file = compile_one(pipeline, placed(PIPELINES[pipeline], where), Path(folder))
        spec, *platform = yaml.safe_load_all(file.read_text(encoding="utf-8"))
        if cache:
            for dag in dags(spec):
                for task in dag["tasks"].values():
                    if task["componentRef"]["name"].removeprefix("comp-") not in ALWAYS_RUN:
                        task["cachingOptions"] = {"enableCache": True}
            file.write_text(yaml.safe_dump_all([spec, *platform], sort_keys=True), encoding="utf-8")
        version = cast("dict[str, str]", pipeline_resources(pipeline, where, file)[1]["metadata"])["name"]
        return Compiled(pipeline, where, spec, file.read_text(encoding="utf-8"), version)


def images(spec: Mapping[str, Any]) -> list[str]:
    """The images that the stages of a pipeline spec run in."""
    return sorted({executor["container"]["image"] for executor in spec["deploymentSpec"]["executors"].values()})


def check_images(spec: Mapping[str, Any]) -> None:
    """BadInput where a stage would wait for a placeholder, which no registry has."""
    for image in images(spec):
        if is_placeholder(image):
            raise BadInput(f"image {image}: is a placeholder, {BUILD_IT}")


def dags(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The graphs of a pipeline spec: the root's, and those of conditions, loops and nested pipelines."""
    yield spec["root"]["dag"]
    yield from (component["dag"] for component in spec["components"].values() if "dag" in component)


def typed_parameters(spec: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter of the pipeline with its value, defaults filled in; texts are read as the type that is expected.

    BadInput names a parameter that is unknown, missing or of another type, and what was expected.
    """
    known = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    pipeline = spec["pipelineInfo"]["name"]
    for name in given:
        if name not in known:
            raise BadInput(f"parameter {name}: {pipeline} has none of that name, expected one of {', '.join(known)}")
    found = {}
    for name, kind in known.items():
        expected, _ = KINDS[kind["parameterType"]]
        if name in given:
            found[name] = typed(name, kind["parameterType"], given[name])
        elif "defaultValue" in kind:
            found[name] = typed(name, kind["parameterType"], kind["defaultValue"])
        elif not kind.get("isOptional"):
            about = f" ({kind['description']})" if kind.get("description") else ""
            raise BadInput(f"parameter {name}: missing, {pipeline} expects {expected}{about}")
    return found


def typed(name: str, kind: str, value: Any) -> Any:
    """``value`` as KFP's type ``kind``; a text is parsed unless a text is expected. BadInput for anything else."""
    found = value
    if isinstance(value, str) and kind != "STRING":
        with contextlib.suppress(ValueError):
            found = json.loads(value)
    # In YAML and in KFP's own files a whole number may be written 3.0.
    if kind == "NUMBER_INTEGER" and isinstance(found, float) and found.is_integer() and not isinstance(value, str):
        found = int(found)
    expected, types = KINDS[kind]
    if not isinstance(found, types) or (isinstance(found, bool) and kind != "BOOLEAN"):
        raise BadInput(f"parameter {name}: expected {expected}, got {value!r}")
    return found


def check_names(pipeline: str, parameters: Mapping[str, Any]) -> None:
    """BadInput where profile, pool, environment or seed are nothing that a stage takes: a name, a file, a version, 0 up.

    Files lie where the stages run, so only their paths can be looked at here: in a pod, none is relative.
    """
    folder = PLACEMENTS.parent / (pipeline if pipeline in ("step-router", "ensemble-router") else "profiles")
    shipped = {"profile": tuple(sorted(file.stem for file in folder.glob("*.yaml"))), **NAMED}
    for name in shipped.keys() & parameters.keys():
        value = parameters[name]
        if value in shipped[name] or Path(value).is_absolute():
            continue
        versioned = name != "profile"
        if versioned and parse_source(value) is not None:
            continue
        expected = f"{', '.join(shipped[name])}, or the absolute path of a file that the stages see"
        version = ", or a version ({repo: …, rev: …, path: …}, s3://…, file:///…)" if versioned else ""
        raise BadInput(f"parameter {name}: expected {expected}{version}, got {value!r}")
    if parameters.get("seed", 0) < 0:
        raise BadInput(f"parameter seed: expected a whole number of at least 0, got {parameters['seed']}")


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """``name=value`` texts of the command line as a mapping; BadInput for one without "=" or given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadInput(f"--param {text}: expected name=value")
        if name in found:
            raise BadInput(f"--param {name}: given twice")
        found[name] = value
    return found


class Costs(BaseModel):
    """What GPUs cost and how long stages take where one pays (costs.yaml); nothing of it is guessed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    currency: str = Field(min_length=1)
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(description="{GPU type: price of one for an hour}")
    hours: dict[str, Annotated[float, Field(gt=0)]] = Field(default={}, description="{stage: expected hours}")


def load_costs(path: Path, stages: Collection[str]) -> Costs:
    """The prices and expected hours of a YAML file; BadInput names file and field."""
    try:
        costs = Costs.model_validate(yaml.safe_load(path.read_bytes()))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}), expected YAML with currency and prices") from None
    except ValidationError as error:
        raise BadInput(f"{path}: field {fault(error, Costs)}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise BadInput(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    for stage in costs.hours:
        if stage not in stages:
            raise BadInput(f"{path}: field hours.{stage}: no such stage, expected one of {', '.join(stages)}")
    return costs


@dataclass(frozen=True)
class StagePlan:
    """One stage as it would run.

    ``gpus`` counts all nodes of a distributed stage. ``hours`` is None where neither expected hours nor a timeout are
    stated; ``expected`` tells which of them it is. ``condition`` says when the stage runs at all, "" for always.
    """

    name: str
    condition: str
    where: StagePlacement
    gpus: int
    gpu_type: str
    hours: float | None
    expected: bool

    @property
    def gpu_hours(self) -> float | None:
        """GPUs times hours, 0 for a stage without."""
        if not self.gpus:
            return 0.0
        return None if self.hours is None else self.gpus * self.hours


def stage_plans(made: Compiled, costs: Costs | None = None) -> list[StagePlan]:
    """The stages in an order in which they can run."""
    hours = costs.hours if costs else {}

    def walk(dag: Mapping[str, Any], condition: str) -> Iterator[StagePlan]:
        order = TopologicalSorter({name: task.get("dependentTasks", []) for name, task in dag["tasks"].items()})
        for task in (dag["tasks"][name] for name in order.static_order()):
            label = task["componentRef"]["name"]
            component = made.spec["components"][label]
            when = " and ".join(filter(None, (condition, readable(task.get("triggerPolicy", {}).get("condition", "")))))
            if "dag" in component:
                yield from walk(component["dag"], when)
                continue
            name = label.removeprefix("comp-")
            where = made.placement.of(name)
            timeout = where.timeout_s / 3600 if where.timeout_s else None
            yield StagePlan(
                name, when, where,
                gpus=where.gpu.count * (where.distributed or 1) if where.gpu else 0,
                gpu_type=gpu_type(where),
                hours=hours.get(name, timeout),
                expected=name in hours,
            )  # fmt: skip

    return list(walk(made.spec["root"]["dag"], ""))


def readable(condition: str) -> str:
    """KFP's condition without its way of naming parameters."""
    for noise in ("inputs.parameter_values['", "pipelinechannel--", "']"):
        condition = condition.replace(noise, "")
    return condition


def gpu_type(where: StagePlacement) -> str:
    """The product that the node selector names, else the resource; "" without GPU."""
    if where.gpu is None:
        return ""
    named = [value for key, value in where.node_selector.items() if key.endswith(("gpu.product", "accelerator"))]
    return named[0] if named else where.gpu.type


def plan_lines(made: Compiled, parameters: Mapping[str, Any], costs: Costs | None) -> Iterator[str]:
    """The plan as a person reads it; BadInput where a GPU type of the plan has no price in ``costs``."""
    plans = stage_plans(made, costs)
    yield f"pipeline {made.pipeline}, placement {made.placement.name}, version {made.version}"
    yield f"service account {made.placement.account_for(parameters)}"
    for image in images(made.spec):
        yield f"image {image}" + (f" (a placeholder: {BUILD_IT})" if is_placeholder(image) else "")
    yield "parameters"
    yield from (f"  {name} = {json.dumps(value, ensure_ascii=False)}" for name, value in parameters.items())
    yield "stages"
    width = max(len(plan.name) for plan in plans)
    for plan in plans:
        where = plan.where
        cpu, memory = ((where.cpu and where.cpu.limit) or "any", (where.memory and where.memory.limit) or "any")
        gpus = f", {plan.gpus} × {plan.gpu_type}" if plan.gpus else ""
        term = "no time limit" if plan.hours is None else f"{'expected' if plan.expected else 'at most'} {plan.hours:g} h"
        when = f", only if {plan.condition}" if plan.condition else ""
        yield f"  {plan.name:{width}}  cpu {cpu}, memory {memory}{gpus}, {term}{when}"
    yield from cost_lines([plan for plan in plans if plan.gpus], costs)


def cost_lines(plans: Sequence[StagePlan], costs: Costs | None) -> Iterator[str]:
    """GPU-hours, where they come from, and what they cost where prices are stated."""
    endless = [plan.name for plan in plans if plan.gpu_hours is None]
    if endless:
        yield f"GPU-hours: not known, neither timeout_s nor expected hours for {', '.join(endless)}"
        return
    total = sum(plan.gpu_hours or 0 for plan in plans)
    stated = [plan.expected for plan in plans]
    if all(stated):
        source = "from the expected hours"
    elif any(stated):
        source = "from expected hours where stated, else the timeouts of one attempt"
    else:
        source = "at most, from the timeouts of one attempt each"
    yield f"GPU-hours: {total:g}" + (f" ({source})" if plans else " (no stage has a GPU)")
    if not plans:
        return
    if costs is None:
        yield "cost: not known, state prices with --costs FILE"
        return
    for plan in plans:
        if plan.gpu_type not in costs.prices:
            raise BadInput(f"--costs: field prices: no price for {plan.gpu_type}, which stage {plan.name} asks for")
    money = sum((plan.gpu_hours or 0) * costs.prices[plan.gpu_type] for plan in plans)
    yield f"cost of the GPUs: {money:.2f} {costs.currency} ({source})"
