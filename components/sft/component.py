"""KFP component: supervised fine-tuning of the search router on intent labels."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def sft(
    dataset: dsl.Input[dsl.Dataset],
    examples: dsl.Input[dsl.Dataset],
    profile: str,
    seed: int,
    model: dsl.Output[dsl.Model],
    curves: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Supervised fine-tuning of the search router on intent labels.

    Args:
        dataset: What fetch-dataset wrote.
        examples: What synthesize wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        model: The router's folder (safetensors) with history.jsonl.
        curves: Loss and agreement with the intent labels over steps.
        metrics: The last value of each curve.
        log: What the stage printed.
    """
    from pathlib import Path

    from components.presentation import show_training
    from components.stage import stage
    from components.train_job import train
    from routewright import tracking
    from routewright.config import load_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"dataset": dataset, "examples": examples}
    with stage("sft", inputs, settings, model, log) as run:
        with tracking.stage_run(run.name, run.key, settings, load_profile(profile)) as fresh:
            if not run.done:
                from routewright.search_router.sft import train_sft

                settled = load_profile(profile)
                train(train_sft, Path(dataset.path), Path(examples.path), run.folder, settled, seed)
            if fresh:
                tracking.log_dataset(Path(examples.path), "examples", "training")
                tracking.log_history(run.folder / "history.jsonl")
                tracking.log_search_model(run.folder, "search-router-sft")
        show_training(run.folder, curves, metrics, ["loss", "answer_loss", "intent_accuracy"], "SFT")
