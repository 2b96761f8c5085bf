"""The pipeline that retrains a search router when its traffic has changed; meant to be scheduled."""

from typing import Any

from kfp import dsl

from components.drift_check.component import drift_check
from components.evaluate.component import evaluate
from components.fetch_dataset.component import fetch_dataset
from components.image import IMAGE
from components.off_policy_check.component import off_policy_check
from components.promote.component import promote as promote_router
from components.rl.component import rl
from components.sft.component import sft
from components.synthesize.component import synthesize


@dsl.pipeline(
    name="retrain", description="Where a search router's traffic has changed: learn from its log, promote as challenger."
)
def retrain(pool: str, decisions: str, reference: str, profile: str, seed: int = 0) -> None:
    """drift-check → if drifted: fetch-dataset → synthesize → sft → rl → evaluate, off-policy-check → if passed: promote.

    Args:
        pool: "aws-docs", the path of a pool file that the tasks can read, or a version of a pool.
        decisions: Path of the log that routewright serve --log writes with exploration, or of a folder where several
            servers do, each in a file of its own; the tasks can read it.
        reference: Path of an earlier such log: the traffic that the router in service was made for.
        profile: smoke, laptop, gpu, or the path of a profile file.
        seed: Seed of all random choices.
    """
    checked = drift_check(decisions=decisions, reference=reference, seed=seed)
    with dsl.If(checked.outputs["Output"] == 1, "drifted"):
        fetched = fetch_dataset(pool=pool)
        dataset = fetched.outputs["dataset"]
        made = synthesize(dataset=dataset, profile=profile, seed=seed, query_log=checked.outputs["query_log"])
        data: dict[str, Any] = {"dataset": dataset, "examples": made.outputs["examples"]}
        tuned = sft(**data, profile=profile, seed=seed)
        learnt = rl(**data, sft=tuned.outputs["model"], profile=profile, seed=seed)
        judged = evaluate(**data, sft=tuned.outputs["model"], rl=learnt.outputs["model"], profile=profile, seed=seed)
        tried = off_policy_check(traffic=checked.outputs["traffic"], model=learnt.outputs["model"])
        with dsl.If(tried.outputs["Output"] == 1, "passed"):
            promoted = promote_router(
                **data, model=learnt.outputs["model"], evaluation=judged.outputs["evaluation"],
                router="search-router", deploy="", challenger=True,
            )  # fmt: skip
    for task in (checked, fetched, made, tuned, learnt, judged, tried, promoted):
        # What ran is part of a result's lineage; an image cannot know its own digest.
        task.set_env_variable("ROUTEWRIGHT_IMAGE", IMAGE)
        # KFP's cache would look at the text of a path or a tag only, not at what is behind it now; stages look themselves.
        task.set_caching_options(False)
