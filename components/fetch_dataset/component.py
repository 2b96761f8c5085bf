"""KFP component: bring what a router is trained on into one self-contained folder."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def fetch_dataset(
    dataset: dsl.Output[dsl.Dataset],
    log: dsl.Output[dsl.Artifact],
    router: str = "search-router",
    pool: str = "",
    environment: str = "",
    profile: str = "",
) -> None:
    """Bring a pool with its corpora and queries, or an environment's tasks, into one self-contained folder.

    Args:
        dataset: Search: pool.yaml, corpora, queries and dataset.json. Step: tasks.json and the tasks' files.
        log: What the stage printed.
        router: Whom the data is for: "search-router" (of a pool) or "step-router" (of an environment).
        pool: Search only: "aws-docs", or the path of a pool file that the task can read.
        environment: Step only: "textworld", "shell", or the path of a problem file or of a folder of task folders.
        profile: Step only: the name of a profile, or the path of a profile file, which says how many tasks.
    """
    import json

    from components.stage import profile_of, stage
    from routewright import tracking

    step = router == "step-router"
    settings = {"environment": environment, "profile": profile} if step else {"pool": pool}
    with stage("fetch-dataset", {}, settings, dataset, log, router) as run:
        settled = profile_of(router, profile) if step else None
        with tracking.stage_run(run.name, run.key, settings, settled, router) as fresh:
            if not run.done and step:
                from routewright.step_router.dataset import fetch_tasks
                from routewright.step_router.profile import load_step_profile

                fetch_tasks(environment, run.folder, load_step_profile(profile))
            elif not run.done:
                from routewright.pools.fetch import fetch_dataset as fetch

                fetch(pool, run.folder)
            if fresh:
                tracking.log_dataset(run.folder, "dataset", "source")
                tracking.log_files([run.folder / ("tasks.json" if step else "dataset.json")])
        if step:
            tasks = json.loads((run.folder / "tasks.json").read_text())
            counts = {split: len(names) for split, names in tasks["splits"].items()}
            facts = {"environment": tasks["environment"], "tasks": counts, "md5": tracking.md5_of(run.folder)}
        else:
            facts = json.loads((run.folder / "dataset.json").read_text())
        dataset.metadata.update(facts)
