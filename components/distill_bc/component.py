"""KFP component: behaviour cloning of the small policy on perturbed teacher episodes."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def distill_bc(
    dataset: dsl.Input[dsl.Dataset],
    examples: dsl.Input[dsl.Dataset],
    profile: str,
    seed: int,
    model: dsl.Output[dsl.Model],
    curves: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Behaviour cloning of the small policy on perturbed teacher episodes.

    Args:
        dataset: What fetch-dataset wrote.
        examples: What synthesize wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        model: The policy's folder (safetensors) with history.jsonl.
        curves: Loss and what else the training records, over steps.
        metrics: The last value of each curve.
        log: What the stage printed.
    """
    from pathlib import Path

    from components.presentation import show_training
    from components.stage import stage
    from components.train_job import train
    from routewright import tracking
    from routewright.step_router.profile import load_step_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"dataset": dataset, "examples": examples}
    with stage("distill-bc", inputs, settings, model, log, "step-router") as run:
        settled = load_step_profile(profile)
        with tracking.stage_run(run.name, run.key, settings, settled, "step-router") as fresh:
            if not run.done:
                from routewright.step_router.bc import distill_bc as clone

                train(clone, Path(dataset.path), Path(examples.path), run.folder, settled, seed)
            if fresh:
                tracking.log_dataset(Path(examples.path), "examples", "training")
                tracking.log_history(run.folder / "history.jsonl")
        show_training(run.folder, curves, metrics, (), "Behaviour cloning")
