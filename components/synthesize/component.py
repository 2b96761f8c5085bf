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
    """Make and label examples for a pool, play the teacher's episodes under perturbation, or make the agents' questions.

    Args:
        dataset: What fetch-dataset wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        examples: Search: train.jsonl, dev.jsonl, test.jsonl, labeller.json. Step: states.jsonl. Both: stats.json. Ensemble:
            a file of tasks for each split, and dataset.json.
        metrics: The numbers of stats.json; the ensemble's majority-answer baseline by domain.
        log: What the stage printed.
        router: Who learns from it: "search-router", "step-router" or "ensemble-router".
        query_log: Search only: path of a query log (JSON lines) to learn from too; "" for none.
    """
    import json
    from pathlib import Path

    from components.presentation import show_numbers
    from components.stage import profile_of, stage
    from routewright import tracking

    search = router == "search-router"
    settings = {"profile": profile, "seed": seed} | ({"query_log": query_log} if search else {})
    with stage("synthesize", {"dataset": dataset}, settings, examples, log, router) as run:
        with tracking.stage_run(run.name, run.key, settings, profile_of(router, profile), router) as fresh:
            if not run.done and router == "step-router":
                from routewright.step_router.profile import load_step_profile
                from routewright.step_router.synthesis import synthesize as play_teacher

                play_teacher(Path(dataset.path), run.folder, load_step_profile(profile), seed)
            elif not run.done and router == "ensemble-router":
                from routewright.ensemble_router.fetch import synthesize_tasks
                from routewright.ensemble_router.profile import load_ensemble_profile

                synthesize_tasks(Path(dataset.path), run.folder, load_ensemble_profile(profile), seed)
            elif not run.done:
                from routewright.config import load_profile
                from routewright.search_router.synthesis import synthesize as make_examples

                logged = Path(query_log) if query_log else None
                make_examples(Path(dataset.path), run.folder, load_profile(profile), seed, logged)
            told = run.folder / ("dataset.json" if router == "ensemble-router" else "stats.json")
            if fresh:
                tracking.log_dataset(Path(dataset.path), "dataset", "source")
                tracking.log_dataset(run.folder, "examples", "training")
                tracking.log_files([told])
        show_numbers(told, metrics)
        for domain, share in json.loads(told.read_text()).get("majority_answer", {}).items():
            metrics.log_metric(f"majority answer {domain}", share)
