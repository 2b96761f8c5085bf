"""KFP component: would a trained search router have done better on logged traffic?"""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def off_policy_check(
    traffic: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    decision: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    log: dsl.Output[dsl.Artifact],
) -> int:
    """Judge a trained search router on logged decisions that it did not learn from.

    Args:
        traffic: What drift-check wrote; only held-out.jsonl is read.
        model: The router's folder, as rl wrote it.
        decision: off-policy.json: whether it passed, why, and the estimates with their intervals.
        metrics: The gain over the logged router with its interval, and how much the log can say.
        log: What the stage printed.

    Returns:
        Output: 1 where the log is enough to conclude and the candidate is surely not much worse, else 0.
    """
    import json
    from pathlib import Path

    from components.stage import stage
    from routewright import tracking
    from routewright.retraining import HELD_OUT_LOG, OFF_POLICY, check_off_policy

    with stage("off-policy-check", {"traffic": traffic, "model": model}, {}, decision, log) as run:
        with tracking.stage_run(run.name, run.key, {}) as fresh:
            if not run.done:
                check_off_policy(Path(model.path), Path(traffic.path) / HELD_OUT_LOG, run.folder)
            found = json.loads((run.folder / OFF_POLICY).read_text())
            if fresh:
                tracking.log_files([run.folder / OFF_POLICY])
        estimate = found["estimate"]
        for name in ("n", "effective_sample_size", "explored"):
            metrics.log_metric(name, float(estimate[name]))
        for name, value in (estimate["gain"] or {}).items():
            metrics.log_metric(f"gain {name}", float(value))
        decision.metadata.update({"passed": found["passed"], "reason": found["reason"]})
        print(f"{'passed' if found['passed'] else 'not passed'}: {found['reason']}")
    return int(found["passed"])
