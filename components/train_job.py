"""Training on several nodes: a stage whose placement says so hands its training function to a Kubeflow TrainJob.

The placement puts the TrainJob's manifest into ``ROUTEWRIGHT_TRAIN_JOB``; without it the function runs right here. The
nodes share the stage's work volume: the call and its inputs are laid there, and the first process writes its result there.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components.stage import link_or_copy, write_atomically
from routewright.errors import BadInput, StageFailed

# Their training keeps several processes in step (DistributedDataParallel); the others' would each go its own way.
DISTRIBUTED = frozenset({"sft", "distill-bc"})
# Of these, where FSDP may spread the weights over the processes.
SHARDED = frozenset({"sft"})
TRAIN_JOB = "ROUTEWRIGHT_TRAIN_JOB"
POD_NAME, POD_UID, NAMESPACE = "ROUTEWRIGHT_POD_NAME", "ROUTEWRIGHT_POD_UID", "ROUTEWRIGHT_NAMESPACE"
PATH, MODEL, VALUE = "path", "model", "value"
GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
FIRST_NODE = "batch.kubernetes.io/job-completion-index=0"
POLL_S = 5.0
SILENCE_S = 60.0  # a log that says nothing for so long is asked for anew, after a look at the job
GONE_S = 300.0


def train(function: Callable[..., None], *arguments: Any) -> None:
    """Call a training function, here or on the nodes of the TrainJob that the placement asks for.

    ``function`` is importable and names one of its parameters ``out``, a folder on the work volume; its arguments are
    paths, profiles and JSON values. Raises what it raises; StageFailed with the reason where the job fails.
    """
    manifest = os.environ.get(TRAIN_JOB)
    if not manifest:
        function(*arguments)
        return
    named = inspect.signature(function).bind(*arguments).arguments
    out: Path = named["out"]
    call, inputs, error = (out.with_name(f"{out.name}.{name}") for name in ("call.json", "inputs", "error.json"))
    error.unlink(missing_ok=True)
    lay_out_call(function, named, call, inputs)
    try:
        run_train_job(train_job_for(json.loads(manifest), out.name, call))
    except StageFailed:
        if error.exists():
            told = json.loads(error.read_text(encoding="utf-8"))
            raise (BadInput if told["bad_input"] else StageFailed)(told["sentence"]) from None
        raise
    shutil.rmtree(inputs, ignore_errors=True)
    call.unlink()


def lay_out_call(function: Callable[..., None], named: Mapping[str, Any], call: Path, inputs: Path) -> None:
    """Write what the nodes call to ``call``, and what it reads, which only this pod has, to ``inputs``."""
    written: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        if isinstance(value, Path) and name != "out":
            shutil.rmtree(inputs / name, ignore_errors=True)
            if value.is_dir():
                shutil.copytree(value, inputs / name, copy_function=link_or_copy)
            else:
                inputs.mkdir(parents=True, exist_ok=True)
                link_or_copy(str(value), str(inputs / name))
            written[name] = {PATH: str(inputs / name)}
        elif isinstance(value, Path):
            written[name] = {PATH: str(value)}
        elif isinstance(value, BaseModel):
            written[name] = {MODEL: name_of(type(value)), VALUE: value.model_dump(mode="json")}
        else:
            written[name] = {VALUE: value}
    write_atomically(call, json.dumps({"function": name_of(function), "arguments": written}))


def name_of(thing: Any) -> str:
    """ "module:name" of a function or class."""
    return f"{thing.__module__}:{thing.__qualname__}"


def train_job_for(manifest: dict[str, Any], name: str, call: Path) -> dict[str, Any]:
    """The placement's TrainJob for this stage: named, owned by this pod, told what to call."""
    owner = {
        "apiVersion": "v1", "kind": "Pod", "name": os.environ[POD_NAME], "uid": os.environ[POD_UID], "controller": True,
        "blockOwnerDeletion": False,
    }  # fmt: skip
    given = manifest["metadata"]
    metadata = {**given, "name": name, "namespace": os.environ[NAMESPACE], "ownerReferences": [owner]}
    trainer = {**manifest["spec"]["trainer"], "command": ["torchrun", "-m", "components.train_node", str(call)]}
    return {**manifest, "metadata": metadata, "spec": {**manifest["spec"], "trainer": trainer}}


def run_train_job(manifest: Mapping[str, Any]) -> None:
    """Create a TrainJob, print its first node's log, wait for its end and delete it, also when this process is told to end.

    A job of the same name is one that an earlier attempt left: it is deleted first. Raises StageFailed.
    """
    from kubernetes import client, config
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    given = os.environ.get("KUBECONFIG")
    if given:
        config.load_kube_config(given)
    else:
        config.load_incluster_config()
    jobs, pods = client.CustomObjectsApi(), client.CoreV1Api()
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    with ending_on_sigterm():
        try:
            delete(jobs, name, namespace)
            wait_until_gone(jobs, name, namespace)
            jobs.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, dict(manifest))
            print(f"TrainJob {name}: created, {manifest['spec']['trainer']['numNodes']} nodes", flush=True)
            follow(jobs, pods, name, namespace)
        except ApiException as error:
            raise StageFailed(refused(name, error)) from None
        except HTTPError as error:
            raise StageFailed(f"TrainJob {name}: the API server cannot be reached ({error})") from None
        finally:
            # Finished TrainJobs are never collected, and one without its step trains for nobody. Where this fails, it
            # goes with the step's pod, its owner.
            with contextlib.suppress(ApiException, HTTPError):
                delete(jobs, name, namespace)


def refused(name: str, error: Any) -> str:
    """What the API server did not do, as one sentence."""
    try:
        told = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        told = error.reason
    hint = " (is Kubeflow Trainer installed?)" if error.status == 404 else ""
    return f"TrainJob {name}: the API server answered {error.status}: {told}{hint}"


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the process by an exception, so that what was begun is taken back."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def delete(jobs: Any, name: str, namespace: str) -> None:
    """Delete the TrainJob with its pods; one that is not there is fine."""
    from kubernetes.client import ApiException

    try:
        jobs.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, propagation_policy="Foreground")
    except ApiException as error:
        if error.status != 404:
            raise


def wait_until_gone(jobs: Any, name: str, namespace: str) -> None:
    """Until a deleted TrainJob and its pods are gone: two of them would write into one folder."""
    from kubernetes.client import ApiException

    until = time.monotonic() + GONE_S
    while time.monotonic() < until:
        try:
            jobs.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
        except ApiException as error:
            if error.status == 404:
                return
            raise
        time.sleep(POLL_S)
    raise StageFailed(f"TrainJob {name}: an earlier one is still there {GONE_S:.0f} s after it was deleted")


def follow(jobs: Any, pods: Any, name: str, namespace: str) -> None:
    """Print the log of the first node until the job has ended; StageFailed with the reason where it failed."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    selector, printed = f"jobset.sigs.k8s.io/jobset-name={name},{FIRST_NODE}", ""
    while True:
        try:
            job = jobs.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
            ended = end_of(job)
            for pod in pods.list_namespaced_pod(namespace, label_selector=selector).items:
                if pod.status.phase != "Pending":
                    printed = print_log(pods, pod.metadata.name, namespace, printed)
        except ApiException as error:
            if error.status == 404:
                raise StageFailed(f"TrainJob {name}: somebody deleted it while it was running") from None
            # A busy API server says so, and one that is restarted nothing; the job goes on meanwhile.
            if error.status < 500 and error.status != 429:
                raise
            ended = None
        except HTTPError:
            ended = None
        if ended is not None:
            kind, message = ended
            if kind == "Failed":
                raise StageFailed(f"TrainJob {name} failed: {message}")
            return
        time.sleep(POLL_S)


def end_of(job: Mapping[str, Any]) -> tuple[str, str] | None:
    """("Complete" or "Failed", message) of a job that has ended."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return condition["type"], condition.get("message") or condition.get("reason") or "no reason was given"
    return None


def print_log(pods: Any, pod: str, namespace: str, printed: str) -> str:
    """Print the lines of a pod's log that are later than the time ``printed``; returns the last one's time.

    Ends with the container, and where the connection breaks or is silent: the caller comes back for the rest.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        response = pods.read_namespaced_pod_log(
            pod, namespace, follow=True, timestamps=True, _preload_content=False, _request_timeout=(10.0, SILENCE_S)
        )
    except ApiException as error:
        if error.status not in (400, 404):
            raise
        return printed  # the pod is gone or never ran, evicted for example; what that means the job says
    try:
        for line in response:
            stamp, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
            if stamp > printed:
                print(text, flush=True)
                printed = stamp
    except HTTPError:
        pass
    finally:
        response.release_conn()
    return printed
