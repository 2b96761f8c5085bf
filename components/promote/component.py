"""KFP component: judge a trained router against the champion, roll it out in steps and make it the champion."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def promote(
    dataset: dsl.Input[dsl.Dataset],
    examples: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Artifact],
    router: str,
    deploy: str,
    decision: dsl.Output[dsl.Artifact],
    table: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
    challenger: bool = False,
) -> None:
    """Judge a trained router against the champion, roll it out in steps and make it the champion.

    Args:
        dataset: What fetch-dataset wrote.
        examples: What synthesize wrote.
        model: The router's folder, as rl, calibrate or coevolve wrote it.
        evaluation: What evaluate wrote.
        router: "search-router", "step-router" or "ensemble-router".
        deploy: Path of a deployment file that the task can read; "" registers and sets aliases only.
        decision: decision.json, decision.md and MODEL_CARD.md.
        table: The decision and every gate with value, bound and reason.
        metrics: The value of every gate.
        log: What the stage printed.
        challenger: Register the router as the challenger and leave the champion; there must be no deployment then.
    """
    import shutil
    from pathlib import Path

    from components.stage import stage
    from routewright.evaluation.gates import GateBounds
    from serving.promotion.deployment import load_deployment
    from serving.promotion.promote import Candidate, raise_unless_done
    from serving.promotion.promote import promote as decide

    inputs = {"dataset": dataset, "examples": examples, "model": model, "evaluation": evaluation}
    settings = {"router": router, "deploy": deploy, "challenger": challenger}
    with stage("promote", inputs, settings, decision, log, router) as run:
        parts = [Path(artifact.path) for artifact in (model, evaluation, dataset, examples)]
        deployment = load_deployment(Path(deploy)) if deploy else None
        # Also where an earlier run finished: what it changed lies outside, and a repetition changes nothing.
        found = decide(Candidate(router, *parts), deployment, GateBounds(), run.folder, print, challenger=challenger)  # type: ignore[arg-type]
        shutil.copyfile(run.folder / "decision.md", table.path)
        for check in found.checks:
            if check.value is not None:
                metrics.log_metric(check.name, check.value)
        raise_unless_done(found)
        print(f"{found.outcome}: {found.reason}")
