"""KFP component: make and label training, dev and test examples for a pool."""

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
    query_log: str = "",
) -> None:
    """Make and label training, dev and test examples for a pool.

    Args:
        dataset: What fetch-dataset wrote.
        profile: The name of a profile, or the path of a profile file.
        seed: Seed of all random choices.
        examples: train.jsonl, dev.jsonl, test.jsonl, stats.json and labeller.json.
        metrics: The numbers of stats.json.
        log: What the stage printed.
        query_log: Path of a query log (JSON lines) to learn from too; "" for none.
    """
    from pathlib import Path

    from components.presentation import show_numbers
    from components.stage import stage
    from routewright import tracking
    from routewright.config import load_profile
    from routewright.search_router.synthesis import synthesize as make_examples

    settings = {"profile": profile, "seed": seed, "query_log": query_log}
    with stage("synthesize", {"dataset": dataset}, settings, examples, log) as run:
        with tracking.stage_run(run.name, run.key, settings, load_profile(profile)) as fresh:
            if not run.done:
                logged = Path(query_log) if query_log else None
                make_examples(Path(dataset.path), run.folder, load_profile(profile), seed, logged)
            if fresh:
                tracking.log_dataset(Path(dataset.path), "dataset", "source")
                tracking.log_dataset(run.folder, "examples", "training")
                tracking.log_files([run.folder / "stats.json"])
        show_numbers(run.folder / "stats.json", metrics)
