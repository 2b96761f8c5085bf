"""KFP component: REINFORCE++ of the search router on outcomes, from the SFT checkpoint."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def rl(
    dataset: dsl.Input[dsl.Dataset],
    examples: dsl.Input[dsl.Dataset],
    sft: dsl.Input[dsl.Model],
    profile: str,
    seed: int,
    model: dsl.Output[dsl.Model],
    curves: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """REINFORCE++ of the search router on outcomes, from the SFT checkpoint.

    Args:
        dataset: What fetch-dataset wrote.
        examples: What synthesize wrote.
        sft: What sft wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        model: The router's folder (safetensors) with history.jsonl.
        curves: Reward, KL to SFT, entropy and agents per query over steps.
        metrics: The last value of each curve.
        log: What the stage printed.
    """
    from pathlib import Path

    from components.presentation import show_training
    from components.stage import stage
    from routewright import tracking
    from routewright.config import load_profile

    settings = {"profile": profile, "seed": seed}
    inputs = {"dataset": dataset, "examples": examples, "sft": sft}
    with stage("rl", inputs, settings, model, log) as run:
        with tracking.stage_run(run.name, run.key, settings, load_profile(profile)) as fresh:
            if not run.done:
                from routewright.search_router.rl import train_rl

                settled = load_profile(profile)
                train_rl(Path(dataset.path), Path(examples.path), Path(sft.path), run.folder, settled, seed)
            if fresh:
                tracking.log_dataset(Path(examples.path), "examples", "training")
                tracking.log_history(run.folder / "history.jsonl")
                tracking.log_search_model(run.folder, "search-router")
        show_training(run.folder, curves, metrics, ["reward", "kl", "entropy", "agents_per_query"], "REINFORCE++")
