"""The pipeline that co-evolves LoRA agents with the router that chooses among them, and judges both."""

from kfp import dsl

from components.coevolve.component import coevolve
from components.evaluate_ensemble.component import evaluate_ensemble
from components.fetch_dataset.component import fetch_dataset
from components.image import IMAGE
from components.promote.component import promote as promote_router
from components.synthesize.component import synthesize

ROUTER = "ensemble-router"


@dsl.pipeline(
    name="ensemble-router", description="Co-evolve agents and the router among them, compare it with other routing rules."
)
def ensemble_router(profile: str, seed: int = 0, promote: bool = False, deploy: str = "") -> None:
    """fetch-dataset → synthesize → coevolve → evaluate → promote.

    Args:
        profile: smoke, laptop, gpu, or the path of a profile file, which names the tasks' families and files.
        seed: Seed of all random choices.
        promote: Judge the router against the champion and, where every gate passes, put it in the champion's place.
        deploy: Path of a deployment file that the promotion can read; "" registers the router and serves nothing.
    """
    fetched = fetch_dataset(router=ROUTER, profile=profile)
    dataset = fetched.outputs["dataset"]
    made = synthesize(router=ROUTER, dataset=dataset, profile=profile, seed=seed)
    examples = made.outputs["examples"]
    coevolved = coevolve(examples=examples, profile=profile, seed=seed)
    judged = evaluate_ensemble(examples=examples, trained=coevolved.outputs["trained"], profile=profile, seed=seed)
    with dsl.If(promote == True, "promote"):  # noqa: E712
        promoted = promote_router(
            dataset=dataset, examples=examples, model=coevolved.outputs["router"],
            evaluation=judged.outputs["evaluation"], router=ROUTER, deploy=deploy,
        )  # fmt: skip
    for task in (fetched, made, coevolved, judged, promoted):
        # What ran is part of a result's lineage; an image cannot know its own digest.
        task.set_env_variable("ROUTEWRIGHT_IMAGE", IMAGE)
        # KFP's cache would look at the text of a path or a tag only, not at what is behind it now; stages look themselves.
        task.set_caching_options(False)
