"""KFP component: co-evolve LoRA agents and the router that chooses among them, under every rule of the profile."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def coevolve(
    examples: dsl.Input[dsl.Dataset],
    profile: str,
    seed: int,
    trained: dsl.Output[dsl.Model],
    router: dsl.Output[dsl.Model],
    curves: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> None:
    """Co-evolve LoRA agents and the router that chooses among them, under every rule of the profile.

    Args:
        examples: What synthesize wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        trained: The base model, the warm agents, each rule's agents and router with history.jsonl, and router/.
        router: The router's folder alone, as it is served: heads, adapters and the base model.
        curves: Agents per query, and each co-evolved agent's share of the queries and mean familiarity, over steps.
        metrics: The last value of each curve.
        log: What the stage printed.
    """
    from pathlib import Path

    from components.presentation import show_training
    from components.stage import digest_of, publish, stage
    from routewright import tracking
    from routewright.ensemble_router.curves import shown_curves, write_curves
    from routewright.ensemble_router.profile import load_ensemble_profile

    settings = {"profile": profile, "seed": seed}
    with stage("coevolve", {"examples": examples}, settings, trained, log, "ensemble-router") as run:
        settled = load_ensemble_profile(profile)
        with tracking.stage_run(run.name, run.key, settings, settled, "ensemble-router") as fresh:
            if not run.done:
                from routewright.ensemble_router.coevolve_rules import coevolve_rules

                coevolve_rules(Path(examples.path), run.folder, settled, seed)
                write_curves(run.folder)
            if fresh:
                tracking.log_dataset(Path(examples.path), "examples", "training")
                tracking.log_history(run.folder / "history.jsonl")
                tracking.log_files([run.folder / "router" / "familiarity.json"])
        show_training(run.folder, curves, metrics, shown_curves(run.folder), "Co-evolution")
        publish(run.folder / "router", Path(router.path))
        router.metadata["digest"] = digest_of(Path(router.path))
