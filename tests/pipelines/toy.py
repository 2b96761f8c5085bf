"""A pipeline of two stages that can be told to fail; the first one counts how often it really works."""

from kfp import dsl


@dsl.component(base_image="python@sha256:" + "0" * 64, packages_to_install=[], install_kfp_package=False)
def first(count: str, made: dsl.Output[dsl.Dataset], log: dsl.Output[dsl.Artifact]) -> None:
    from pathlib import Path

    from components.stage import stage

    with stage("first", {}, {}, made, log) as run:
        if not run.done:
            print("first works")
            with Path(count).open("a") as counter:
                counter.write("x")
            (run.folder / "made.txt").write_text("made")
            (run.folder / "checkpoints" / "checkpoint-1").mkdir(parents=True)
            (run.folder / "checkpoints" / "checkpoint-1" / "state").write_text("for resuming only")


@dsl.component(base_image="python@sha256:" + "0" * 64, packages_to_install=[], install_kfp_package=False)
def second(
    made: dsl.Input[dsl.Dataset], wish: str, judged: dsl.Output[dsl.Artifact], log: dsl.Output[dsl.Artifact]
) -> None:
    import json
    import os
    import signal
    from pathlib import Path

    from components.stage import stage
    from routewright.errors import BadInput

    with stage("evaluate", {"made": made}, {"wish": Path(wish).name}, judged, log) as run:
        word = Path(wish).read_text()
        step = run.folder / "step.txt"
        if word == "bad input":
            raise BadInput("corpus.jsonl, line 7: field text: expected a string")
        if word == "bug":
            raise ZeroDivisionError("division by zero")
        if word == "killed":
            step.write_text("half way")
            os.kill(os.getpid(), signal.SIGKILL)
        if not run.done:
            found = step.read_text() if step.exists() else "from the start"
            print("second continues", found)
            (run.folder / "report.html").write_text((Path(made.path) / "made.txt").read_text())
            (run.folder / "summary.json").write_text(json.dumps({"found": found, "wall_s": 0, "artifacts": {}}))


@dsl.pipeline(name="toy")
def toy(count: str, wish: str) -> None:
    made = first(count=count)
    second(made=made.outputs["made"], wish=wish)
