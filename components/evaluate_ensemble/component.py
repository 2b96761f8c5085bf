"""KFP component: compare routing rules on the same held-out questions."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def evaluate_ensemble(
    examples: dsl.Input[dsl.Dataset],
    trained: dsl.Input[dsl.Model],
    profile: str,
    seed: int,
    evaluation: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    table: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Compare routing rules on the same held-out questions.

    Args:
        examples: What synthesize wrote.
        trained: What coevolve wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        evaluation: summary.json, report.html, table.md, results.json and answers/.
        report: The report, one page that works offline.
        table: Rows by metrics.
        metrics: Accuracy and generated tokens of every row.
        log: What the stage printed.
    """
    import json
    import shutil
    from pathlib import Path

    from components.stage import stage
    from routewright import tracking
    from routewright.ensemble_router.profile import load_ensemble_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"examples": examples, "trained": trained}
    with stage("evaluate", inputs, settings, evaluation, log, "ensemble-router") as run:
        settled = load_ensemble_profile(profile)
        with tracking.stage_run(run.name, run.key, settings, settled, "ensemble-router") as fresh:
            if not run.done:
                from routewright.ensemble_router.evaluation_run import evaluate_ensemble as compare_rules

                compare_rules(Path(examples.path), Path(trained.path), run.folder, settled, seed)
            summary = json.loads((run.folder / "summary.json").read_text())
            if fresh:
                tracking.log_dataset(Path(examples.path), "examples", "evaluation")
                tracking.log_summary(summary)
                tracking.log_files([run.folder / name for name in ("summary.json", "report.html", "table.md")])
        shutil.copyfile(run.folder / "report.html", report.path)
        shutil.copyfile(run.folder / "table.md", table.path)
        for row in summary["rows"]:
            for metric in {"accuracy", "tokens"} & row["metrics"].keys():
                metrics.log_metric(f"{row['name']} {metric}", float(row["metrics"][metric]["mean"]))
