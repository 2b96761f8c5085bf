"""KFP component: train the risk router on the policy's own failures, calibrate it and fit its threshold."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def calibrate(
    dataset: dsl.Input[dsl.Dataset],
    policy: dsl.Input[dsl.Model],
    verifier: dsl.Input[dsl.Model],
    profile: str,
    seed: int,
    router: dsl.Output[dsl.Model],
    curves: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    roc: dsl.Output[dsl.ClassificationMetrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Train the risk router on the policy's own failures, calibrate it and fit its threshold.

    Args:
        dataset: What fetch-dataset wrote.
        policy: What distill-dpo wrote.
        verifier: What verifier wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        router: The risk router's folder (safetensors, risk.json) with history.jsonl and roc.json.
        curves: Brier term, cost, CVaR and its multiplier over steps.
        metrics: The last value of each curve, and every threshold of risk.json.
        roc: Failures of the small model told from its successes by their risk, on the threshold split.
        log: What the stage printed.
    """
    from pathlib import Path

    from components.presentation import show_roc, show_thresholds, show_training
    from components.stage import stage
    from routewright import tracking
    from routewright.step_router.profile import load_step_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"dataset": dataset, "policy": policy, "verifier": verifier}
    with stage("calibrate", inputs, settings, router, log, "step-router") as run:
        settled = load_step_profile(profile)
        with tracking.stage_run(run.name, run.key, settings, settled, "step-router") as fresh:
            if not run.done:
                from routewright.step_router.calibration import calibrate_router

                calibrate_router(Path(dataset.path), Path(policy.path), Path(verifier.path), run.folder, settled, seed)
            if fresh:
                tracking.log_dataset(Path(dataset.path), "dataset", "training")
                tracking.log_history(run.folder / "history.jsonl")
                tracking.log_files([run.folder / "risk.json", run.folder / "roc.json"])
                tracking.log_risk_model(run.folder, "step-router")
        show_training(run.folder, curves, metrics, ["brier", "cost", "cvar", "lambda"], "Risk router")
        show_thresholds(run.folder / "risk.json", metrics)
        show_roc(run.folder / "roc.json", roc)
