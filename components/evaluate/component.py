"""KFP component: compare the routers with baselines and the oracle on held-out queries."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def evaluate(
    dataset: dsl.Input[dsl.Dataset],
    examples: dsl.Input[dsl.Dataset],
    sft: dsl.Input[dsl.Model],
    rl: dsl.Input[dsl.Model],
    profile: str,
    seed: int,
    evaluation: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    table: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    confusion: dsl.Output[dsl.ClassificationMetrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Compare the routers with baselines and the oracle on held-out queries.

    Args:
        dataset: What fetch-dataset wrote.
        examples: What synthesize wrote.
        sft: What sft wrote.
        rl: What rl wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        evaluation: summary.json, report.html, table.md, records.jsonl, queries.jsonl and confusion.json.
        report: The report, one page that works offline.
        table: Rows by metrics.
        metrics: NDCG@10 of every row, overall and on the mismatch subset.
        confusion: Chosen agent against best agent.
        log: What the stage printed.
    """
    import json
    from pathlib import Path

    from components.presentation import show_evaluation
    from components.stage import stage
    from routewright import tracking
    from routewright.config import load_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"dataset": dataset, "examples": examples, "sft": sft, "rl": rl}
    with stage("evaluate", inputs, settings, evaluation, log) as run:
        with tracking.stage_run(run.name, run.key, settings, load_profile(profile)) as fresh:
            if not run.done:
                from routewright.search_router.evaluate import evaluate as compare

                data, models = (Path(dataset.path), Path(examples.path)), (Path(sft.path), Path(rl.path))
                compare(*data, *models, run.folder, load_profile(profile), seed)
            if fresh:
                tracking.log_dataset(Path(examples.path), "examples", "evaluation")
                tracking.log_summary(json.loads((run.folder / "summary.json").read_text()))
                tracking.log_files([run.folder / name for name in ("summary.json", "report.html", "table.md")])
        show_evaluation(run.folder, report, table, metrics, confusion)
