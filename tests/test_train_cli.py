"""The two commands as a person runs them: output, bad input, a full disk, several ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli_runs import NUM_STEPS, RFT, SMALL, Server, check_same_run, read
from forks import ENV
from processes import run_program
from refusals import check_parts, rows
from safetensors.torch import load_file
from tokenizers import Tokenizer

import flowtrain
from flowtrain.algorithms import load_algorithm
from flowtrain.config.options import parse
from flowtrain.trainer.model.loading import load_tokenizer
from flowtrain.utils.step_timer import STAGES

pytest_plugins = ("cli_runs",)

# ---- what a run leaves


@pytest.mark.smoke
def test_a_run_leaves_its_files(full: Path) -> None:
    names = "config.toml manifest.json metrics.jsonl trajectories.jsonl summary.json curves.png"
    assert {path.name for path in full.iterdir()} >= {*names.split(), "checkpoints", "weights"}
    assert (full / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not [
        path for path in full.rglob("*") if "writing" in path.name or path.name.startswith(".")
    ], "nothing half-written stays"
    manifest = json.loads((full / "manifest.json").read_text())
    assert manifest["world_size"] == 1
    assert manifest["versions"]["torch"]
    assert "--train.num_steps" in manifest["argv"]


def test_the_config_that_is_left_starts_the_same_run(full: Path, words: tuple[str, ...]) -> None:
    expected = parse([*words, "--run.dir", str(full)])
    left = parse(["--config", str(full / "config.toml")])
    assert left == load_algorithm(expected).config, "with the clips that the algorithm chose"


def test_metrics_of_every_step_have_the_promised_keys(full: Path) -> None:
    first, *steps = read(full / "metrics.jsonl")
    assert first["step"] == 0
    assert set(first) == {"step", "version", "eval_reward", "eval_reward_error", "eval_s"}
    found = [(record["step"], record["version"]) for record in steps]
    assert found == [(step, step) for step in range(1, NUM_STEPS + 1)]
    for record in steps:
        assert set(record) >= {
            *("reward_mean", "turns_mean", "malformed_share", "tool_share/Search", "num_tokens"),
            *("collect_s", "train_s", "publish_s", "loss", "grad_norm", "kl_ref", "entropy"),
            *("clip_fraction", "ratio_mean", "logprob_mismatch", "num_groups_dropped"),
            *("num_excluded/too_long", "num_excluded/logprob", "tokens_per_s", "train_tflop"),
        }
        assert 0 < record["packing_efficiency"] < 1
        assert record["peak_memory_gb"] > 0
        assert "mfu" not in record, "nobody knows the peak of this CPU"
        assert all(value is not None for value in record.values())
        found = record["step_s"]
        assert found == pytest.approx(sum(record[f"{stage}_s"] for stage in (*STAGES, "other")))
        found = record["logprob_mismatch"]
        assert found < 1e-4, "sampler and trainer agree on the tokens of the step"
    assert any(0 < record["reward_mean"] < 1 and record["num_tokens"] > 0 for record in steps), (
        "this run shows something"
    )


def test_the_memory_plan_is_left_beside_what_was_measured(full: Path) -> None:
    plan, summary = (
        json.loads((full / name).read_text()) for name in ("manifest.json", "summary.json")
    )
    parts = plan["memory_plan"]
    held = ("weights", "gradients", "reference", "engine")
    others = ("moments", "gathered", "activations", "head", "merged", "published", "beside")
    assert set(parts) == {*held, *others}
    assert {parts[name] for name in held} == {parts["moments"] // 2} != {0}
    assert summary["planned_memory_gb"] == pytest.approx(sum(parts.values()) / 1e9)
    assert summary["peak_memory_gb"] > 0


def test_trajectories_are_whole_groups_stamped_with_the_weights_that_sampled_them(
    full: Path,
) -> None:
    records = read(full / "trajectories.jsonl")
    assert len(records) == NUM_STEPS * 32
    for step in range(1, NUM_STEPS + 1):
        of_step = [record for record in records if record["step"] == step]
        found = [record["group_index"] for record in of_step]
        assert found == [index for index in range(4) for _ in range(8)]
        assert len({record["seed"] for record in of_step}) == 32
    for record in records:
        assert record["version"] == record["step"] - 1
        assert record["turns"] and record["reward"] in (0, 1)
        for turn in record["turns"]:
            assert turn["spans"] == [[0, len(turn["response_ids"]), record["step"] - 1]]
            assert len(turn["response_logprobs"]) == len(turn["response_ids"]) <= 24


def test_a_turn_is_logged_with_what_training_made_of_it(full: Path) -> None:
    records = read(full / "trajectories.jsonl")
    num_trained = 0
    for step in range(1, NUM_STEPS + 1):
        for index in range(4):
            group = [
                record
                for record in records
                if (record["step"], record["group_index"]) == (step, index)
            ]
            trained = [[turn["training"] for turn in record["turns"]] for record in group]
            if len({record["reward"] for record in group}) == 1:
                assert not any(map(any, trained)), "no signal, no training"
                continue
            for record, training in zip(group, trained, strict=True):
                assert all((each["advantage"] > 0) == (record["reward"] == 1) for each in training)
                assert {each["minibatch"] for each in training} == {index // 2}
                num_trained += sum(len(turn["response_ids"]) for turn in record["turns"])
    assert (
        num_trained == sum(record["num_tokens"] for record in read(full / "metrics.jsonl")[1:]) > 0
    )


def test_the_log_has_the_prompts_and_the_tokenizer_that_reads_them(full: Path) -> None:
    tokenizer = Tokenizer.from_file(str(full / "tokenizer.json"))
    for record in read(full / "trajectories.jsonl"):
        prompt: list[int] = []
        for turn in record["turns"]:
            prompt = [*prompt[: turn["prompt_shared"]], *turn["prompt_ids"]]
            assert len(prompt) == turn["num_prompt_tokens"]
            assert record["question"] in tokenizer.decode(prompt)
            assert tokenizer.decode(turn["response_ids"]) == turn["response_text"]
            assert 0 < turn["plan_s"] <= turn["seconds"] and turn["tool_s"] <= turn["seconds"]


def test_the_frozen_policys_held_out_rollouts_are_logged(full: Path) -> None:
    records = read(full / "held_out.jsonl")
    found = [(record["step"], record["version"], record["group_index"]) for record in records]
    assert found == [(0, 0, n) for n in range(4)]
    mean = sum(record["reward"] for record in records) / 4
    assert mean == pytest.approx(json.loads((full / "warm.json").read_text())["eval_reward"])
    assert not any(turn["training"] for record in records for turn in record["turns"])


def test_rewards_in_the_metrics_are_those_of_the_trajectories(full: Path) -> None:
    records = read(full / "trajectories.jsonl")
    for metrics in read(full / "metrics.jsonl")[1:]:
        rewards = [record["reward"] for record in records if record["step"] == metrics["step"]]
        assert metrics["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.smoke
def test_the_summary_compares_warm_and_trained(full: Path) -> None:
    summary = json.loads((full / "summary.json").read_text())
    for side in (summary["warm"], summary["trained"]):
        kinds = ("by_num_turns", "by_kind", "tool_shares", "turns_mean", "splits")
        assert set(side) >= {f"eval_reward{end}" for end in ("", "_error", "_greedy")} | {*kinds}
        assert 0 <= side["eval_reward"] <= 1
        assert set(side["tool_shares"]) == {"Search", "Base_Generator"}
    stages = "collect train publish load eval checkpoint step warm_up"
    assert set(summary["seconds"]) >= set(stages.split())
    assert summary["warm"]["eval_reward"] == read(full / "metrics.jsonl")[0]["eval_reward"]


def test_old_checkpoints_and_versions_are_cleaned_up(full: Path) -> None:
    kept = {
        folder: sorted(path.name for path in (full / folder).iterdir())
        for folder in ("checkpoints", "weights")
    }
    assert kept["checkpoints"] == ["step_00000004", "step_00000006"]
    assert kept["weights"] == ["HEAD", "v00000005", "v00000006"]
    assert (full / "weights" / "HEAD").read_text() == "6\n"


@pytest.mark.smoke
def test_fine_tuning_leaves_a_model_and_its_log(warm: Path) -> None:
    names = {"config.toml", "manifest.json", "metrics.jsonl", "model"}
    assert {path.name for path in warm.iterdir()} >= names
    steps = read(warm / "metrics.jsonl")
    assert [record["step"] for record in steps] == list(range(10, 121, 10))
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    facts = json.loads((warm / "model" / "rft.json").read_text())
    assert (facts["num_rollouts"], facts["num_steps"]) == (300, 120) and facts["seconds"] > 0


def test_a_checkpoint_is_a_model_for_anyone(full: Path, warm: Path) -> None:
    """In an interpreter that knows nothing of flowtrain it samples."""
    code = """if True:
        import json, sys
        from transformers import AutoModelForCausalLM, AutoTokenizer
        for path in sys.argv[1:]:
            model = AutoModelForCausalLM.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
            prompt = "Question: What is 3 plus 4?\\nSub-Goal:"
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            assert int(ids.max()) < model.config.vocab_size, (ids, model.config.vocab_size)
            out = model.generate(ids, max_new_tokens=3, do_sample=False)
            is_longer = out.shape[1] > ids.shape[1]
            print(json.dumps([ids[0].tolist(), tokenizer.eos_token_id, is_longer]))
        assert not any(name.startswith("flowtrain") for name in sys.modules)
    """
    paths = [str(full / "checkpoints" / "step_00000006" / "model"), str(warm / "model")]
    done = run_program([sys.executable, "-c", code, *paths], env={**os.environ, **ENV})
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    ours = load_tokenizer(paths[0])
    ids = ours.encode("Question: What is 3 plus 4?\nSub-Goal:", add_special_tokens=False)
    assert told == [[ids, ours.eos_token_id, True]] * 2


# ---- what a person got wrong


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, warm: Path, full: Path) -> Path:
    """A folder with what the commands of refusals.toml trip over."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "broken.toml").write_text("[run\n")
    row, long = '{"question": "q", "answer": "a"}\n', "a" * 3000
    (desk / "list.jsonl").write_text(row + "[]\n")
    (desk / "one.jsonl").write_text(row)
    rows = [json.dumps({"question": f"q{n}", "answer": long}) + "\n" for n in range(4)]
    (desk / "long.jsonl").write_text("".join(rows))
    unanswered = [json.dumps({"question": f"Name {n}.", "number": n}) + "\n" for n in range(9)]
    (desk / "unanswered.jsonl").write_text("".join(unanswered))
    (desk / "empty").mkdir()
    (desk / "used").mkdir()
    (desk / "used" / "notes.txt").write_text("mine")
    shutil.copytree(warm / "model", desk / "cut")
    with (desk / "cut" / "model.safetensors").open("rb+") as file:
        file.truncate(5000)
    shutil.copytree(full, desk / "full")
    return desk


@pytest.mark.parametrize(
    ("command", "parts"), rows(Path(__file__).parent / "refusals.toml", "commands")
)
def test_bad_input_is_one_line_and_leaves_nothing(
    command: str, parts: str, server: Server, words: tuple[str, ...], place: Path, desk: Path
) -> None:
    if "cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    options: dict[str, tuple[str, ...]] = {"$SMALL": SMALL, "$WORDS": words, "$RFT": RFT}
    module, *given = shlex.split(command.replace("$PLACE", str(place)))
    argv = [word for each in given for word in options.get(each, (each,))]
    there = sorted(desk.rglob("*"))
    code, lines, out = server.run(module, *argv, cwd=desk)
    assert (code, out, len(lines)) == (2, "", 1), lines
    check_parts(lines[0], f"flowtrain.{module}: … {parts}")
    assert sorted(desk.rglob("*")) == there


# ---- a full disk


@pytest.mark.parametrize("what", ["weights", "checkpoints", "trajectories.jsonl"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    what: str, server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the disk."""
    run, num_log_bytes = tmp_path / "run", (full / "trajectories.jsonl").stat().st_size
    limit = {
        "weights": 40_000,
        "checkpoints": 170_000,
        "trajectories.jsonl": num_log_bytes - 10_000,
    }[what]
    every = ("--checkpoint.every", "0") if what == "trajectories.jsonl" else ()
    code, lines, _ = server.run("train", *words, *every, "--run.dir", run, max_file_bytes=limit)
    assert len(lines) == 1 and code == 2, lines
    assert lines[0].startswith(f"flowtrain.train: cannot write {run / what}: File too large; ")
    assert not list(run.rglob("*.writing"))
    if what == "trajectories.jsonl":  # which ends in half a line
        server.resume(run, *words)
        check_same_run(run, full)


FULL_FOR_RANK_0 = """
import errno, os
from flowtrain.{module} import {owner}
def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
{owner}.{name} = full
"""


@pytest.mark.parametrize(
    ("module", "owner", "name", "what"),
    [
        ("trainer", "checkpoint", "HuggingFaceStorageWriter.write_data", "checkpoints"),
        ("weights.stores.folder", "WeightStore", "collect_garbage", "weights"),
        ("weights.stores.folder", "WeightStore", "rollback", "weights"),
    ],
)
def test_a_disk_that_is_full_for_one_rank_ends_all_of_them(
    module: str,
    owner: str,
    name: str,
    what: str,
    server: Server,
    words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    before = (FULL_FOR_RANK_0.format(module=module, owner=owner, name=name), "")
    run = tmp_path / "run"
    options = (*words, "--checkpoint.every", "1", "--run.dir", run)
    ranks = server.start_ranks(2, *options, before=before)
    assert [rank.wait(timeout_s=180) for rank in ranks] == [2, 2]
    lines = [line for rank in ranks for line in rank.err.read_text().splitlines()]
    (ours,) = (line for line in lines if line.startswith("flowtrain.train: "))
    assert ours.startswith(f"flowtrain.train: cannot write {run / what}: No space left on device; ")
    assert not any("Traceback" in line for line in lines)


# ---- several ranks


def ranks(server: Server, num_ranks: int, *argv: object) -> str:
    """Returns the output of so many ranks together, started without torchrun."""
    processes = server.start_ranks(num_ranks, *argv)
    codes = [process.wait(timeout_s=240) for process in processes]
    assert not any(codes), [process.err.read_text()[-1500:] for process in processes]
    return "".join(process.out.read_text() for process in processes)


def test_the_docs_list_what_a_run_leaves(full: Path) -> None:
    pages = Path(flowtrain.__file__).parents[1] / "docs"
    listed = (pages / "watching.md").read_text().split("## What a run leaves")[1].split("\n## ")[0]
    named = {name.strip("/") for name in re.findall(r"`([\w./]+)`", listed)}
    assert {path.name for path in full.iterdir()} - named == set()


@pytest.mark.dist
def test_one_rank_that_trains_and_one_that_samples_make_the_run_of_one_rank(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    """The same rollouts, metrics, checkpoints and versions."""
    run = tmp_path / "run"
    printed = ranks(server, 2, *words, "--run.dir", run, "--rollout.num_engine_ranks", 1)
    check_same_run(run, full)
    logs = {path.stem for path in run.glob("*.jsonl")}
    assert logs == {"held_out", "metrics", "trained", "trajectories"}
    assert printed.count("held-out reward") == 1, "what one rank shows, once"
    assert printed.count("tasks: tasks.jsonl, ") == 1


@pytest.mark.dist
def test_two_ranks_train_for_one_and_then_one_for_two(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    """The run of one rank but for rounding, resumed with other places of ranks."""
    run, half = tmp_path / "run", NUM_STEPS - 2
    for num_engines, num_steps in ((1, 2), (2, half)):
        argv = ("--rollout.num_engine_ranks", num_engines, "--train.num_steps", num_steps)
        ranks(server, 3, *words, *argv, "--run.dir", run, "--run.resume", "auto")
    ours, theirs = (
        load_file(each / "checkpoints" / f"step_{half:08d}" / "model" / "model.safetensors")
        for each in (run, full)
    )
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
    rewards = [
        [record.get("reward_mean") for record in read(each / "metrics.jsonl")]
        for each in (run, full)
    ]
    assert rewards[0] == rewards[1][: half + 1]
    assert {
        (record["step"] > 2, record["group_index"] % 2)
        for record in read(run / "trajectories.rank1.jsonl")
    } == {(True, 1)}


@pytest.mark.dist
def test_questions_that_do_not_divide_among_ranks_are_refused_once(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    argv = (*words, "--run.dir", "run", "--rollout.num_questions", "3")
    processes = server.start_ranks(2, *argv, cwd=tmp_path)
    assert [process.wait() for process in processes] == [2, 2]
    said = "".join(process.err.read_text() for process in processes).splitlines()
    ours = [line for line in said if line.startswith("flowtrain.train: ")]
    assert ours == [
        "flowtrain.train: rollout.num_questions=3 must be a multiple of the 2 ranks that torchrun "
        "started"
    ]
    assert not (tmp_path / "run").exists()
