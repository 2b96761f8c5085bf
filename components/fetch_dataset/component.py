"""KFP component: bring a pool with its corpora and queries into one self-contained folder."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def fetch_dataset(pool: str, dataset: dsl.Output[dsl.Dataset], log: dsl.Output[dsl.Artifact]) -> None:
    """Bring a pool with its corpora and queries into one self-contained folder.

    Args:
        pool: "aws-docs", or the path of a pool file that the task can read.
        dataset: pool.yaml, corpora, queries and dataset.json; the metadata holds the md5 sums and the pool's digest.
        log: What the stage printed.
    """
    import json

    from components.stage import stage
    from routewright import tracking
    from routewright.pools.fetch import fetch_dataset as fetch

    settings = {"pool": pool}
    with stage("fetch-dataset", {}, settings, dataset, log) as run:
        with tracking.stage_run(run.name, run.key, settings) as fresh:
            if not run.done:
                fetch(pool, run.folder)
            if fresh:
                tracking.log_dataset(run.folder, "dataset", "source")
                tracking.log_files([run.folder / "dataset.json"])
        dataset.metadata.update(json.loads((run.folder / "dataset.json").read_text()))
