"""KFP component: compare escalation rules on the same held-out episodes."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def evaluate_step_router(
    dataset: dsl.Input[dsl.Dataset],
    policy: dsl.Input[dsl.Model],
    verifier: dsl.Input[dsl.Model],
    router: dsl.Input[dsl.Model],
    profile: str,
    seed: int,
    evaluation: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    table: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Compare escalation rules on the same held-out episodes.

    Args:
        dataset: What fetch-dataset wrote.
        policy: What distill-dpo wrote.
        verifier: What verifier wrote.
        router: What calibrate wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        evaluation: summary.json, report.html, table.md, episodes.jsonl and results.json.
        report: The report, one page that works offline.
        table: Rows by metrics.
        metrics: Success and escalation of every row.
        log: What the stage printed.
    """
    import json
    from pathlib import Path

    from components.presentation import show_step_evaluation
    from components.stage import stage
    from routewright import tracking
    from routewright.step_router.profile import load_step_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"dataset": dataset, "policy": policy, "verifier": verifier, "router": router}
    with stage("evaluate", inputs, settings, evaluation, log, "step-router") as run:
        settled = load_step_profile(profile)
        with tracking.stage_run(run.name, run.key, settings, settled, "step-router") as fresh:
            if not run.done:
                from routewright.step_router.evaluation_run import evaluate

                data, models = Path(dataset.path), (Path(policy.path), Path(verifier.path), Path(router.path))
                evaluate(data, *models, run.folder, settled, seed)
            if fresh:
                tracking.log_dataset(Path(dataset.path), "dataset", "evaluation")
                tracking.log_summary(json.loads((run.folder / "summary.json").read_text()))
                tracking.log_files([run.folder / name for name in ("summary.json", "report.html", "table.md")])
        show_step_evaluation(run.folder, report, table, metrics)
