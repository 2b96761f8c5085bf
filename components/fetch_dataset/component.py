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
    """Bring a pool with its corpora and queries, an environment's tasks, or task files into one self-contained folder.

    Args:
        dataset: Search: pool.yaml, corpora, queries and dataset.json. Step: tasks.json and the tasks' files. Ensemble:
            the task files and dataset.json.
        log: What the stage printed.
        router: Whom the data is for: "search-router" (of a pool), "step-router" (of an environment) or "ensemble-router".
        pool: Search only: "aws-docs", the path of a pool file that the task can read, or a version of a pool's folder:
            {repo: …, rev: …, path: …}, s3://… or file:///…, with #md5=… where it is known.
        environment: Step only: "textworld", "shell", the path of a problem file or of a folder of task folders, or a
            version of one of these or of what this stage wrote.
        profile: Step and ensemble: the name of a profile, or the path of a profile file, which says how many tasks, and
            of which families and files.
    """
    import json

    from components.stage import profile_of, stage
    from routewright import tracking

    step, ensemble = router == "step-router", router == "ensemble-router"
    settings = {"environment": environment} if step else {} if ensemble else {"pool": pool}
    settings |= {"profile": profile} if step or ensemble else {}
    content = {**settings, "tasks": profile} if ensemble else settings
    with stage("fetch-dataset", {}, content, dataset, log, router) as run:
        settled = profile_of(router, profile) if step or ensemble else None
        with tracking.stage_run(run.name, run.key, settings, settled, router) as fresh:
            if not run.done and step:
                from routewright.step_router.fetch import fetch_dataset as fetch_tasks
                from routewright.step_router.profile import load_step_profile

                fetch_tasks(environment, run.folder, load_step_profile(profile))
            elif not run.done and ensemble:
                from routewright.ensemble_router.fetch import fetch_tasks as fetch_task_files
                from routewright.ensemble_router.profile import load_ensemble_profile

                fetch_task_files(run.folder, load_ensemble_profile(profile))
            elif not run.done:
                from routewright.pools.fetch import fetch_dataset as fetch

                fetch(pool, run.folder)
            if fresh:
                tracking.log_dataset(run.folder, "dataset", "source")
                tracking.log_files([run.folder / ("tasks.json" if step else "dataset.json")])
        if step:
            tasks = json.loads((run.folder / "tasks.json").read_text())
            counts = {split: len(names) for split, names in tasks["splits"].items()}
            version = run.folder / "dataset.json"
            facts = json.loads(version.read_text()) if version.is_file() else {}
            facts |= {"environment": tasks["environment"], "tasks": counts, "md5": tracking.md5_of(run.folder)}
        else:
            facts = json.loads((run.folder / "dataset.json").read_text())
        dataset.metadata.update(facts)
