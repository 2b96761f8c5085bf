"""The pipeline that distils a small policy and trains and judges the router that escalates its risky steps."""

from kfp import dsl

from components.calibrate.component import calibrate
from components.distill_bc.component import distill_bc
from components.distill_dpo.component import distill_dpo
from components.evaluate_step_router.component import evaluate_step_router
from components.fetch_dataset.component import fetch_dataset
from components.image import IMAGE
from components.promote.component import promote as promote_router
from components.synthesize.component import synthesize
from components.verifier.component import verifier

ROUTER = "step-router"


@dsl.pipeline(
    name="step-router", description="Distil a small policy, train the router that escalates, compare it with other rules."
)
def step_router(environment: str, profile: str, seed: int = 0, promote: bool = False, deploy: str = "") -> None:
    """fetch-dataset → synthesize → distill-bc → verifier → distill-dpo → calibrate → evaluate → promote.

    Args:
        environment: "textworld", "shell", or the path of a .jsonl(.gz) of problems or of a folder of task folders.
        profile: smoke, laptop, gpu, or the path of a profile file.
        seed: Seed of all random choices.
        promote: Judge the router against the champion and, where every gate passes, put it in the champion's place.
        deploy: Path of a deployment file that the promotion can read; "" registers the router and serves nothing.
    """
    fetched = fetch_dataset(router=ROUTER, environment=environment, profile=profile)
    dataset = fetched.outputs["dataset"]
    made = synthesize(router=ROUTER, dataset=dataset, profile=profile, seed=seed)
    data = {"dataset": dataset, "examples": made.outputs["examples"]}
    cloned = distill_bc(**data, profile=profile, seed=seed)
    bc = cloned.outputs["model"]
    checked = verifier(**data, bc=bc, profile=profile, seed=seed)
    scores = checked.outputs["model"]
    distilled = distill_dpo(**data, bc=bc, verifier=scores, profile=profile, seed=seed)
    small = {"dataset": dataset, "policy": distilled.outputs["model"], "verifier": scores}
    calibrated = calibrate(**small, profile=profile, seed=seed)
    judged = evaluate_step_router(**small, router=calibrated.outputs["router"], profile=profile, seed=seed)
    with dsl.If(promote == True, "promote"):  # noqa: E712
        promoted = promote_router(
            **data, model=calibrated.outputs["router"], evaluation=judged.outputs["evaluation"],
            router=ROUTER, deploy=deploy,
        )  # fmt: skip
    for task in (fetched, made, cloned, checked, distilled, calibrated, judged, promoted):
        # What ran is part of a result's lineage; an image cannot know its own digest.
        task.set_env_variable("ROUTEWRIGHT_IMAGE", IMAGE)
        # KFP's cache would look at the text of a path or a tag only, not at what is behind it now; stages look themselves.
        task.set_caching_options(False)
