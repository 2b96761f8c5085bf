"""The pipeline that trains and judges a search router."""

from typing import Any

from kfp import dsl

from components.evaluate.component import evaluate
from components.fetch_dataset.component import fetch_dataset
from components.image import IMAGE
from components.rl.component import rl
from components.sft.component import sft
from components.synthesize.component import synthesize


@dsl.pipeline(name="search-router", description="Train a search router from outcomes and compare it with baselines.")
def search_router(pool: str, profile: str, seed: int = 0, query_log: str = "") -> None:
    """fetch-dataset → synthesize → sft → rl → evaluate.

    Args:
        pool: "aws-docs", or the path of a pool file that the tasks can read.
        profile: smoke, laptop, gpu, or the path of a profile file.
        seed: Seed of all random choices.
        query_log: Path of a query log to learn from too; "" for none.
    """
    fetched = fetch_dataset(pool=pool)
    dataset = fetched.outputs["dataset"]
    made = synthesize(dataset=dataset, profile=profile, seed=seed, query_log=query_log)
    data: dict[str, Any] = {"dataset": dataset, "examples": made.outputs["examples"]}
    tuned = sft(**data, profile=profile, seed=seed)
    learnt = rl(**data, sft=tuned.outputs["model"], profile=profile, seed=seed)
    models = {"sft": tuned.outputs["model"], "rl": learnt.outputs["model"]}
    judged = evaluate(**data, **models, profile=profile, seed=seed)
    for task in (fetched, made, tuned, learnt, judged):
        # What ran is part of a result's lineage; an image cannot know its own digest.
        task.set_env_variable("ROUTEWRIGHT_IMAGE", IMAGE)
