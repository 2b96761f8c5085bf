"""The pipeline that trains and judges a search router."""

from typing import Any

from kfp import dsl

from components.evaluate.component import evaluate
from components.fetch_dataset.component import fetch_dataset
from components.image import IMAGE
from components.promote.component import promote as promote_router
from components.rl.component import rl
from components.sft.component import sft
from components.synthesize.component import synthesize


@dsl.pipeline(name="search-router", description="Train a search router from outcomes and compare it with baselines.")
def search_router(
    pool: str, profile: str, seed: int = 0, query_log: str = "", promote: bool = False, deploy: str = ""
) -> None:
    """fetch-dataset → synthesize → sft → rl → evaluate → promote.

    Args:
        pool: "aws-docs", or the path of a pool file that the tasks can read.
        profile: smoke, laptop, gpu, or the path of a profile file.
        seed: Seed of all random choices.
        query_log: Path of a query log to learn from too; "" for none.
        promote: Judge the router against the champion and, where every gate passes, put it in the champion's place.
        deploy: Path of a deployment file that the promotion can read; "" registers the router and serves nothing.
    """
    fetched = fetch_dataset(pool=pool)
    dataset = fetched.outputs["dataset"]
    made = synthesize(dataset=dataset, profile=profile, seed=seed, query_log=query_log)
    data: dict[str, Any] = {"dataset": dataset, "examples": made.outputs["examples"]}
    tuned = sft(**data, profile=profile, seed=seed)
    learnt = rl(**data, sft=tuned.outputs["model"], profile=profile, seed=seed)
    models = {"sft": tuned.outputs["model"], "rl": learnt.outputs["model"]}
    judged = evaluate(**data, **models, profile=profile, seed=seed)
    with dsl.If(promote == True, "promote"):  # noqa: E712
        promoted = promote_router(
            **data, model=learnt.outputs["model"], evaluation=judged.outputs["evaluation"],
            router="search-router", deploy=deploy,
        )  # fmt: skip
    for task in (fetched, made, tuned, learnt, judged, promoted):
        # What ran is part of a result's lineage; an image cannot know its own digest.
        task.set_env_variable("ROUTEWRIGHT_IMAGE", IMAGE)
        # KFP's cache would look at the text of a path or a tag only, not at what is behind it now; stages look themselves.
        task.set_caching_options(False)
