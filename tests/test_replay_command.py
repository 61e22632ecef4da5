"""Runs made again from their replay log, and what is said of logs and code that changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import AFTER_STEP_3, NUM_STEPS, SMALL, Process, Server, check_equal, replayed

from flowtrain.records import UserError
from flowtrain.replay.log import chained, decode, encode
from flowtrain.replay.recorded import Recorded

pytest_plugins = ("cli_runs",)

CONFIGS = Path(__file__).parents[1] / "configs"
LOG = (
    *("--log.replay", "true", "--eval.at_ends", "false"),
    *("--algorithm.mode", "released", "--algorithm.equal_groups", "keep"),
    *("--rollout.max_new_tokens", "6", "--agent.max_turns", "2"),  # a replay samples nothing
)

Train = Callable[..., Path]


def ended(processes: list[Process], code: int = 0) -> None:
    codes = [process.wait() for process in processes]
    assert code in codes and (code or not any(codes)), [
        process.err.read_text()[-2000:] for process in processes
    ]


@pytest.fixture(scope="module")
def train(
    server: Server,
    words: tuple[str, ...],
    by_seed: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Train:
    """Train on so many ranks with a replay log, in a new folder or on from `start`."""

    def run(
        *argv: object, size: int = 1, start: Path | None = None, before: str = "", code: int = 0
    ) -> Path:
        path = start or tmp_path_factory.mktemp("replayed") / "run"
        options = (*words, *by_seed, *LOG, *argv, "--run.dir", path, "--resume", "auto")
        ended(server.start_ranks(size, *options, before=[before] * size), code)
        return path

    return run


@pytest.fixture(scope="module")
def whole(train: Train) -> Path:
    """A run of NUM_STEPS steps on one rank; read only."""
    return train()


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def refused(server: Server, run: Path, *argv: object) -> str:
    code, lines, _ = server.run("replay", run, *argv)
    assert code == 2
    return lines[-1]


def test_a_run_comes_out_as_it_was(server: Server, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    check_equal(server, whole, NUM_STEPS)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before, "reads alone"


def test_so_do_some_of_its_steps_from_a_checkpoint(server: Server, whole: Path) -> None:
    check_equal(server, whole, 2, "--from", 5)
    check_equal(server, whole, 1, "--from", 5, "--to", 5)
    check_equal(server, whole, 3, "--to", 3)


def test_steps_that_cannot_be_begun_with_are_refused(server: Server, whole: Path) -> None:
    text = refused(server, whole, "--from", 4)
    assert "after step 3" in text and "[1, 5]" in text and "checkpoint.keep" in text
    assert "recorded steps: 1 to 6" in refused(server, whole, "--to", 7)
    assert "before --from 5" in refused(server, whole, "--from", 5, "--to", 4)
    assert "--log.replay true" in refused(server, whole / "checkpoints")


def test_a_split_run_comes_out_on_its_ranks_and_on_its_trainer_alone(
    server: Server, train: Train
) -> None:
    run = train("--rollout.num_engine_ranks", 1, "--train.num_steps", 3, size=2)
    check_equal(server, run, 3, size=2)
    check_equal(server, run, 3)


def test_a_killed_and_resumed_run_comes_out_as_a_whole(server: Server, train: Train) -> None:
    """Step 3 is there twice in the run's history, and once in its log."""
    run = train(before=AFTER_STEP_3, code=-signal.SIGKILL)
    assert sorted(Recorded.read(run).steps) == [1, 2, 3]
    train("--train.minibatch_size", 0, start=run)
    lines = (run / "replay" / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "files" in json.loads(line)]
    assert steps == list(range(1, NUM_STEPS + 1))
    check_equal(server, run, NUM_STEPS)


def test_lives_with_a_hole_between_them_and_with_other_options(
    server: Server, train: Train
) -> None:
    """Steps without log.replay are a hole and no damage; options are followed life by life."""
    run = train("--train.num_steps", 2)
    for num_steps, *change in ((3, "--log.replay", "false"), (4,), (6, "--train.lr", "1e-3")):
        (run / "summary.json").unlink()
        train("--checkpoint.keep", 9, "--train.num_steps", num_steps, *change, start=run)
    assert sorted(Recorded.read(run).steps) == [1, 2, 4, 5, 6]
    check_equal(server, run, 2)
    check_equal(server, run, 1, "--from", 4)
    check_equal(server, run, 2, "--from", 5)
    text = refused(server, run, "--from", 3)
    assert "--from 3 is not recorded; recorded steps: 1 to 2, 4 to 6" in text
    for first, last, alike in ((1, 4, 2), (4, 5, 4)):
        text = refused(server, run, "--from", first, "--to", last)
        assert f"other options, or without log.replay, after step {alike}" in text


def test_two_ranks_come_out_on_two_and_nearly_on_one(server: Server, train: Train) -> None:
    run = train("--train.num_steps", 2, "--train.minibatch_size", 9, size=2)
    check_equal(server, run, 2, size=2)
    code, record = replayed(server, run)
    assert code == 1 and "bits may differ" in record["notes"][0]
    assert record["num_steps"] == 2 and 0 < record["largest_difference"] < 1e-2
    code, record = replayed(server, run, "--tolerance", 1e-2)
    assert (code, record["problems"]) == (0, []) and record["num_close"] > 0
    code, record = replayed(server, run, "--tolerance", 1e-12)
    assert code == 1 and "largest difference" in record["problems"][0]


def test_one_rank_comes_out_nearly_on_two(server: Server, whole: Path) -> None:
    code, record = replayed(server, whole, "--from", 5, "--tolerance", 1e-2, size=2)
    assert (code, record["problems"]) == (0, []) and record["notes"]
    assert 0 < record["largest_difference"] < 1e-2, "two ranks share what one trained"


def test_appo_comes_out_with_the_log_probs_of_its_search(server: Server, train: Train) -> None:
    appo = ("--algorithm.name", "appo", "--appo.num_roots", 3, "--appo.spacing", 2)
    kept = ("--model.dtype", "bfloat16", "--train.rescore", "true", "--algorithm.kl_coef", 0.1)
    run = train(*appo, *kept, "--train.num_steps", 2)
    recorded = Recorded.read(run)
    scored = decode((recorded.folder / "step_00000001/rollouts.rank0.z").read_bytes())
    old, ref = next(iter(scored.logprobs.values()))
    assert old and ref, "both are kept"
    check_equal(server, run, 2)


def test_infoflow_comes_out_with_its_hints(server: Server, warm: Path, tmp_path: Path) -> None:
    options = ("--config", CONFIGS / "infoflow.toml", "--model.path", warm / "model", *SMALL)
    hints = ("--infoflow.hint_rate", 1, "--train.num_steps", 2, "--run.dir", tmp_path / "run")
    ended([server.start("train", *options, *LOG[:4], *hints)])
    check_equal(server, tmp_path / "run", 2)


def test_an_adapter_comes_out(server: Server, train: Train) -> None:
    pytest.importorskip("peft")
    lora = ("--lora.rank", 4, "--train.num_steps", 3)
    run = train(*lora)
    check_equal(server, run, 3)
    check_equal(server, run, 1, "--from", 3)


# ---- what was changed


def test_a_changed_turn_is_named(server: Server, copied: Path) -> None:
    """Someone edits a token and writes all digests of the files anew."""
    group, rollout, turn = edit_a_turn(copied, 3)
    code, record = replayed(server, copied)
    assert (code, record["num_steps"]) == (1, 2)
    assert record["problems"][-1] == (
        f"step 3: the batch differs: group {group}, rollout {rollout}, turn {turn} differs in its "
        "response ids"
    )


def edit_a_turn(run: Path, step: int) -> tuple[int, int, int]:
    """Change the last response token of the first turn that was trained, and everything that says
    so but the digests of the batch. Returns the place.
    """
    folder = run / "replay" / f"step_{step:08d}"
    stream = folder / "rollouts.rank0.z"
    samples = json.loads((folder / "batch.rank0.json").read_text())["samples"]
    number, member, turn = min(tuple(map(int, key.split("/"))) for key in samples)
    rollouts = decode(stream.read_bytes())
    groups = {group.index: group for group in rollouts.groups}
    trajectory = groups[number].trajectories[member]
    call = trajectory.turns[turn].calls["planner"]
    call = replace(call, response_ids=(*call.response_ids[:-1], (call.response_ids[-1] + 1) % 256))
    turns = list(trajectory.turns)
    turns[turn] = replace(turns[turn], calls={**turns[turn].calls, "planner": call})
    members = list(groups[number].trajectories)
    members[member] = replace(trajectory, turns=tuple(turns))
    groups[number] = replace(groups[number], trajectories=tuple(members))
    data = encode(rollouts._replace(groups=list(groups.values())))
    stream.write_bytes(data)
    lines = [json.loads(line) for line in (folder.parent / "steps.jsonl").read_text().splitlines()]
    chain = ""
    for line in lines:
        if line["step"] == step and "files" in line:
            file = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            line["files"][stream.name] = file
        line["chain"] = chain = chained(chain, line)
    (folder.parent / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return number, member, turn


@pytest.mark.parametrize("seed", range(20))
def test_one_changed_byte_is_found(copied: Path, seed: int) -> None:
    rng = random.Random(seed)
    paths = sorted(path for path in (copied / "replay").rglob("*") if path.is_file())
    path = rng.choice(paths)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    try:
        recorded = Recorded.read(copied)
        for life in recorded.lives:
            recorded.config(life)
        found = [text for _, text in recorded.problems]
        found += [text for step in recorded.steps for text in recorded.damage(step)]
    except ValueError as error:  # a line that is none any more, or the options
        found = [str(error)]
    assert found, (path, at)
    if path.parent.name != "replay":
        assert found == [f"step {int(path.parent.name[5:])}: {path} was changed"]


def test_every_byte_of_the_lines_is_covered(copied: Path) -> None:
    """Nothing of a changed line is believed, so what is not damaged can be read."""
    path = copied / "replay" / "steps.jsonl"
    data, rng = path.read_bytes(), random.Random(0)
    for _ in range(300):
        at = rng.randrange(len(data) - 1)  # a line may end without its newline
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(UserError):  # names the line that is none any more
            recorded = Recorded.read(copied)
            assert recorded.problems, at
            for step in recorded.steps:
                assert recorded.version(step) and recorded.damage(step) == []
            with contextlib.suppress(UserError):  # names the line that is gone
                recorded.config(0)


def test_a_changed_byte_ends_the_replay_before_its_step(server: Server, copied: Path) -> None:
    path = copied / "replay" / "step_00000005" / "rollouts.rank0.z"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, record = replayed(server, copied)
    assert (code, record["num_steps"], record["num_equal"]) == (1, 4, 5)
    [text] = record["problems"]
    assert text == f"step 5: {path} was changed"


def test_a_line_that_is_gone_is_missed(server: Server, copied: Path) -> None:
    path = copied / "replay" / "steps.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    code, record = replayed(server, copied)
    assert code == 1 and "no line of step 6, which metrics.jsonl has" in record["problems"][0]


def test_a_line_that_is_gone_breaks_the_chain(server: Server, copied: Path) -> None:
    path = copied / "replay" / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))
    code, record = replayed(server, copied)
    assert (code, record["num_steps"]) == (1, 2)
    changed, gone = record["problems"]
    assert "line 4, of step 4, was changed, or an earlier line is missing" in changed
    assert gone == "step 3: it has no line in the log"


def test_a_log_of_an_older_version_is_refused(server: Server, copied: Path) -> None:
    path = copied / "replay" / "steps.jsonl"
    chain, lines = "", [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "files" in line:
            line["files"]["index.rank0.json"] = line["files"].pop("batch.rank0.json")
        line["chain"] = chain = chained(chain, line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "was written by an older version of flowtrain" in refused(server, copied)


def test_a_file_that_is_gone_is_missed(server: Server, copied: Path) -> None:
    (copied / "replay" / "step_00000002" / "batch.rank0.json").unlink()
    code, record = replayed(server, copied, "--to", 2)
    assert code == 1 and record["problems"][0].endswith("batch.rank0.json is missing")


# ---- code that was changed


def patch(module: str, name: str, body: str) -> str:
    """Python that replaces a function; `real` is the function that was there."""
    return (
        f"import {module} as module\nreal = module.{name}\nmodule.{name} = lambda *a, **k: {body}\n"
    )


def test_another_advantage_is_named_before_the_weights(server: Server, whole: Path) -> None:
    body = "[2 * x for x in real(*a, **k)]"
    before = patch("flowtrain.algorithms.flow_grpo", "_over_turns", body)
    code, record = replayed(server, whole, before=before)
    assert (code, record["num_equal"]) == (1, 1 + record["num_steps"])
    [text] = record["problems"]
    assert ": the batch differs: group " in text and text.endswith("differs in its advantages")


def test_another_optimizer_step_is_named_by_tensor_and_word(server: Server, whole: Path) -> None:
    """Of the newest versions the run has the weights, of the others their digests."""
    body = "real(*a, **k) * (1.5 if a[1] == {} else 1)"
    name = ("flowtrain.trainer.setup.learner", "warmed_up")
    code, record = replayed(server, whole, before=patch(*name, body.format(6)))
    assert (code, record["num_steps"]) == (1, 5)
    [text] = record["problems"]
    assert text.startswith("step 6: version 6 differs in 'model.embed_tokens.weight' and ")
    assert "word " in text and ", was 0x" in text and "largest difference" in text
    code, record = replayed(server, whole, before=patch(*name, body.format(3)))
    assert (code, record["num_steps"]) == (1, 2) and "weights.keep" in record["problems"][0]


def test_another_start_is_named_before_the_first_step(server: Server, whole: Path) -> None:
    body = "(lambda found: (found[1].lm_head.weight.data[3, 1].add_(1), found)[1])(real(*a, **k))"
    before = patch("flowtrain.trainer.setup.components", "load_trained_policy", body)
    code, record = replayed(server, whole, before=before)
    assert (code, record["num_steps"], record["num_equal"]) == (1, 0, 0)
    assert record["problems"][0].startswith("step 0: version 0 differs in ")


def test_other_counts_of_what_is_left_out_are_named(server: Server, whole: Path) -> None:
    body = "__import__('dataclasses').replace(real(*a, **k), num_groups_dropped=99)"
    before = patch("flowtrain.algorithms.base", "make_batch", body)
    code, record = replayed(server, whole, before=before)
    assert code == 1
    assert ": 99 left out as num_groups_dropped, there were " in record["problems"][0]


def test_a_run_without_the_option_keeps_nothing(server: Server, train: Train) -> None:
    run = train("--log.replay", "false", "--train.num_steps", 1)
    assert not (run / "replay").exists()
    assert "--log.replay true" in refused(server, run)
