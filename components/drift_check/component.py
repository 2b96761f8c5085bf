"""KFP component: has a served router's traffic changed since an earlier log?"""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def drift_check(
    decisions: str,
    reference: str,
    seed: int,
    traffic: dsl.Output[dsl.Dataset],
    table: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
    query_log: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> int:
    """Compare a served search router's log with an earlier one, by the routes taken and the queries' embeddings.

    Args:
        decisions: Path of the log that routewright serve --log writes, or of a folder of several, which the task can read.
        reference: Path of an earlier such log: the traffic that the router was made for.
        seed: Seed of the resampling that sets the thresholds.
        traffic: drift.json (the decision and its numbers), learn.jsonl and held-out.jsonl (the log by query).
        table: The decision, both statistics with their thresholds, and the shares of the routes.
        metrics: Both statistics and their thresholds.
        log: What the stage printed.
        query_log: Path of learn.jsonl where the stage worked, which outlives the task under ROUTEWRIGHT_WORK.

    Returns:
        Output: 1 where the traffic has changed, else 0. KFP's local runner knows no other name in a condition.
    """
    import json
    from pathlib import Path

    from components.presentation import show_numbers
    from components.stage import digest_of, stage
    from routewright import tracking
    from routewright.pools.decision_log import log_files
    from routewright.retraining import DRIFT, LEARN, check_drift, drift_markdown

    logs = {"decisions": Path(decisions), "reference": Path(reference)}
    settings = {**{name: str(path) for name, path in logs.items()}, "seed": seed}
    # The path stays while the log grows: what counts is the content, and a missing file is told by the function.
    content = {name: [digest_of(file) for file in log_files(path) if file.is_file()] for name, path in logs.items()}
    with stage("drift-check", {}, settings | {"content": content}, traffic, log) as run:
        with tracking.stage_run(run.name, run.key, settings) as fresh:
            if not run.done:
                check_drift(logs["decisions"], logs["reference"], run.folder, seed)
            found = json.loads((run.folder / DRIFT).read_text())
            if fresh:
                tracking.log_files([run.folder / DRIFT])
        Path(table.path).write_text(drift_markdown(found), encoding="utf-8")
        show_numbers(run.folder / DRIFT, metrics)
        traffic.metadata.update({name: found[name] for name in ("drifted", "reason", "psi", "mmd")})
        print(f"{'drifted' if found['drifted'] else 'not drifted'}: {found['reason']}")
    Path(query_log).write_text(str(run.folder / LEARN))
    return int(found["drifted"])
