"""KFP component: train the process verifier, which scores an action in its context."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def verifier(
    dataset: dsl.Input[dsl.Dataset],
    examples: dsl.Input[dsl.Dataset],
    bc: dsl.Input[dsl.Model],
    profile: str,
    seed: int,
    model: dsl.Output[dsl.Model],
    curves: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Train the process verifier, which scores an action in its context.

    Args:
        dataset: What fetch-dataset wrote.
        examples: What synthesize wrote.
        bc: What distill-bc wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        model: The verifier's folder (safetensors) with history.jsonl.
        curves: Loss and what else the training records, over steps.
        metrics: The last value of each curve.
        log: What the stage printed.
    """
    from pathlib import Path

    from components.presentation import show_training
    from components.stage import stage
    from routewright import tracking
    from routewright.step_router.profile import load_step_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"dataset": dataset, "examples": examples, "bc": bc}
    with stage("verifier", inputs, settings, model, log, "step-router") as run:
        settled = load_step_profile(profile)
        with tracking.stage_run(run.name, run.key, settings, settled, "step-router") as fresh:
            if not run.done:
                from routewright.step_router.verifier import train_verifier

                train_verifier(Path(dataset.path), Path(examples.path), Path(bc.path), run.folder, settled, seed)
            if fresh:
                tracking.log_dataset(Path(examples.path), "examples", "training")
                tracking.log_history(run.folder / "history.jsonl")
        show_training(run.folder, curves, metrics, (), "Process verifier")
