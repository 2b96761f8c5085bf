"""KFP component: make and label what a router learns from."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def synthesize(
    dataset: dsl.Input[dsl.Dataset],
    profile: str,
    seed: int,
    examples: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
    router: str = "search-router",
    query_log: str = "",
) -> None:
    """Make and label examples for a pool, or play the teacher's episodes under perturbation.

    Args:
        dataset: What fetch-dataset wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        examples: Search: train.jsonl, dev.jsonl, test.jsonl, labeller.json. Step: states.jsonl. Both: stats.json.
        metrics: The numbers of stats.json.
        log: What the stage printed.
        router: Who learns from it: "search-router" or "step-router".
        query_log: Search only: path of a query log (JSON lines) to learn from too; "" for none.
    """
    from pathlib import Path

    from components.presentation import show_numbers
    from components.stage import profile_of, stage
    from routewright import tracking

    step = router == "step-router"
    settings = {"profile": profile, "seed": seed} | ({} if step else {"query_log": query_log})
    with stage("synthesize", {"dataset": dataset}, settings, examples, log, router) as run:
        with tracking.stage_run(run.name, run.key, settings, profile_of(router, profile), router) as fresh:
            if not run.done and step:
                from routewright.step_router.profile import load_step_profile
                from routewright.step_router.synthesis import synthesize as play_teacher

                play_teacher(Path(dataset.path), run.folder, load_step_profile(profile), seed)
            elif not run.done:
                from routewright.config import load_profile
                from routewright.search_router.synthesis import synthesize as make_examples

                logged = Path(query_log) if query_log else None
                make_examples(Path(dataset.path), run.folder, load_profile(profile), seed, logged)
            if fresh:
                tracking.log_dataset(Path(dataset.path), "dataset", "source")
                tracking.log_dataset(run.folder, "examples", "training")
                tracking.log_files([run.folder / "stats.json"])
        show_numbers(run.folder / "stats.json", metrics)
