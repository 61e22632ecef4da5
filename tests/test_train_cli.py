"""The two commands as a person runs them: what a run leaves, crashes and interrupts and going on, bad input, a full disk, eight ranks.

Most runs are forked from a process that has imported everything once, because importing takes ten times as long as these runs do; what a
fork could hide (a fresh interpreter, its exit, torchrun) is tried with real subprocesses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowtrain.config import parse
from flowtrain.training.model import load_tokenizer

SMALL = (
    *("--tiny.hidden_size", "32", "--tiny.num_layers", "1", "--tiny.num_heads", "2", "--tasks.num_train", "400", "--eval.num_tasks", "20"),
    *("--eval.every", "0", "--rollout.num_questions", "4", "--rollout.group_size", "8", "--rollout.max_new_tokens", "24"),
    *("--run.threads", "1", "--run.device", "cpu", "--log.tensorboard", "false"),
)
RFT = ("--rft.num_rollouts", "300", "--rft.num_steps", "120", "--rft.lr", "1e-2", "--rft.warmup_steps", "10", "--rft.keep", "all")
NUM_STEPS = 6
ENV = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

SERVER = """
import atexit, gc, json, os, resource, runpy, sys, threading, traceback
import flowtrain.session, flowtrain.agents.expert, flowtrain.report.panels

def serve():
    for line in sys.stdin:
        job = json.loads(line)
        if "poll" in job:
            pid, status = os.waitpid(job["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            return job
        print(pid, flush=True)

gc.collect()
gc.freeze()
job = serve()
if job is not None:
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)):
        os.dup2(os.open(path, flags), number)
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    if job["max_file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_file_bytes"],) * 2)
    sys.argv = [job["module"], *job["argv"]]
    exec(job["before"])
    try:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    # All of Python's own exit but taking every module apart, which would copy the memory that is shared with the server.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
"""
"""Reads jobs, one JSON line each, forks a process for each and answers with its number; {"poll": pid} asks for an exit code."""


@dataclass(frozen=True)
class Process:
    """A command under way, with its output in files."""

    pid: int
    out: Path
    err: Path
    poll: Callable[[], int | None]

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code, or minus the signal that ended it."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"still running after {timeout_s} s: {self.err.read_text()[-2000:]}")
            time.sleep(0.02)
        return code

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.poll() is None and time.monotonic() < deadline, self.err.read_text()[-2000:]
            time.sleep(0.005)


class Server:
    """Starts commands in forks of one warm process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENV}
        )

    def start(self, module: str, *argv: object, before: str = "", max_file_bytes: int = 0, cwd: Path | None = None) -> Process:
        """`before` is Python that runs first; `max_file_bytes` is how large a file may grow, which is how a disk gets full here."""
        self._count += 1
        out, err = self._folder / f"{self._count}.out", self._folder / f"{self._count}.err"
        out.touch(), err.touch()
        job = {"module": f"flowtrain.{module}", "argv": [*map(str, argv)], "out": str(out), "err": str(err), "env": {}, "before": before}
        pid = self._ask({**job, "cwd": str(cwd or self._folder), "max_file_bytes": max_file_bytes})
        return Process(pid, out, err, lambda: self._ask({"poll": pid}))

    def resume(self, run: Path, *argv: object) -> None:
        """Go on with a run to its end, without the picture, which takes longer than all the rest."""
        before = "import flowtrain.session; flowtrain.session.plot_curves = lambda path: None"
        code, lines, _ = self.run("train", *argv, "--run.dir", run, "--resume", "auto", before=before)
        assert (code, lines) == (0, [])

    def run(self, module: str, *argv: object, **options: Any) -> tuple[int, list[str], str]:
        """(exit code, lines on stderr without progress, stdout)"""
        process = self.start(module, *argv, **options)
        code = process.wait()
        lines = [line for line in process.err.read_text().splitlines() if not line.startswith("step ")]
        return code, lines, process.out.read_text()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, job: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks that the tiny planner solves every other time as soon as it names a tool, so that rewards vary."""
    place = tmp_path_factory.mktemp("cli")
    values = range(10, 18)
    corpus = [{"name": f"Land{index}", "kind": "country", "facts": {"area": value}} for index, value in enumerate(values)]
    (place / "corpus.json").write_text(json.dumps(corpus))
    tasks = [{"question": f"What is {i} plus {i % 7}?", "answer": [v for v in values if (v ^ i) & 1]} for i in range(40)]
    (place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return place


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def warm(place: Path) -> Path:
    """The run folder of a real `python -m flowtrain.rft`; its model can name tools, now and then."""
    command = [sys.executable, "-m", "flowtrain.rft", *SMALL, *RFT, "--run.dir", str(place / "warm")]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return place / "warm"


@pytest.fixture(scope="module")
def words(place: Path, warm: Path) -> tuple[str, ...]:
    """Options of a training run of NUM_STEPS steps; what is left to say is --run.dir."""
    return (
        *SMALL,
        *("--tasks.name", "file", "--tasks.path", str(place / "tasks.jsonl"), "--tasks.corpus", str(place / "corpus.json")),
        *("--model.path", str(warm / "model"), "--train.num_steps", str(NUM_STEPS), "--train.lr", "3e-3", "--checkpoint.every", "2"),
        # Without the tool that takes time: what shares a batch then never depends on the clock, and neither does any bit of the result.
        *("--log.num_rollouts", "2", "--agent.tools", '["Search", "Base_Generator"]'),
    )


@pytest.fixture(scope="module")
def full(place: Path, server: Server, words: tuple[str, ...]) -> Path:
    """The folder of a run that nothing disturbed."""
    code, lines, _ = server.run("train", *words, "--run.dir", place / "full")
    assert code == 0, lines
    return place / "full"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(record: Any) -> Any:
    """The record without what a clock decides."""
    if isinstance(record, dict):
        return {key: timeless(value) for key, value in record.items() if not (key.endswith("_s") or key == "seconds")}
    return [timeless(item) for item in record] if isinstance(record, list) else record


def alike(ours: Any, theirs: Any) -> bool:
    """Equal, up to the rounding of floats."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return ours == pytest.approx(theirs, rel=1e-3, abs=1e-4) if isinstance(theirs, float) else ours == theirs


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [timeless(record) for record in read(run / name)]


# ---- what a run leaves


def test_a_run_leaves_its_files(full: Path) -> None:
    names = {path.name for path in full.iterdir()}
    assert names >= {
        "config.toml",
        "manifest.json",
        "metrics.jsonl",
        "trajectories.jsonl",
        "summary.json",
        "curves.png",
        "checkpoints",
        "weights",
    }
    assert (full / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in full.rglob("*") if "writing" in path.name or path.name.startswith(".")], "nothing half-written stays"
    manifest = json.loads((full / "manifest.json").read_text())
    assert manifest["world_size"] == 1 and manifest["versions"]["torch"] and "--train.num_steps" in manifest["argv"]


def test_the_config_that_is_left_starts_the_same_run(full: Path, words: tuple[str, ...]) -> None:
    expected = parse([*words, "--run.dir", str(full)])
    assert parse(["--config", str(full / "config.toml")]) == expected


def test_metrics_of_every_step_have_the_promised_keys(full: Path) -> None:
    first, *steps = read(full / "metrics.jsonl")
    assert (first["step"], set(first)) == (0, {"step", "version", "eval_reward", "eval_s"})
    assert [(record["step"], record["version"]) for record in steps] == [(step, step) for step in range(1, NUM_STEPS + 1)]
    for record in steps:
        assert set(record) >= {
            *("reward_mean", "turns_mean", "malformed_share", "tool_share/Search", "num_tokens", "collect_s", "train_s", "publish_s"),
            *(
                "loss",
                "grad_norm",
                "kl",
                "entropy",
                "clip_fraction",
                "ratio_mean",
                "logprob_mismatch",
                "num_groups_dropped",
                "tokens_per_s",
            ),
        }
        assert all(value is not None for value in record.values())
        assert record["step_s"] == pytest.approx(
            sum(record[f"{stage}_s"] for stage in ("collect", "train", "publish", "load", "eval", "other"))
        )
        assert record["logprob_mismatch"] < 1e-4, "sampler and trainer agree on the tokens of the step"
    assert any(0 < record["reward_mean"] < 1 and record["num_tokens"] > 0 for record in steps), "this run shows something"


def test_trajectories_are_whole_groups_stamped_with_the_weights_that_sampled_them(full: Path) -> None:
    records = read(full / "trajectories.jsonl")
    assert len(records) == NUM_STEPS * 32
    for step in range(1, NUM_STEPS + 1):
        of_step = [record for record in records if record["step"] == step]
        assert [record["group_index"] for record in of_step] == [index for index in range(4) for _ in range(8)]
        assert len({record["seed"] for record in of_step}) == 32
    for record in records:
        assert record["version"] == record["step"] - 1
        assert record["turns"] and record["reward"] in (0, 1)
        for turn in record["turns"]:
            assert turn["spans"] == [[0, len(turn["response_ids"]), record["step"] - 1]]
            assert len(turn["response_logprobs"]) == len(turn["response_ids"]) <= 24


def test_rewards_in_the_metrics_are_those_of_the_trajectories(full: Path) -> None:
    records = read(full / "trajectories.jsonl")
    for metrics in read(full / "metrics.jsonl")[1:]:
        rewards = [record["reward"] for record in records if record["step"] == metrics["step"]]
        assert metrics["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_the_summary_compares_warm_and_trained(full: Path) -> None:
    summary = json.loads((full / "summary.json").read_text())
    for side in (summary["warm"], summary["trained"]):
        assert set(side) >= {"eval_reward", "eval_reward_greedy", "by_num_turns", "by_kind", "tool_shares", "turns_mean", "splits"}
        assert 0 <= side["eval_reward"] <= 1 and set(side["tool_shares"]) == {"Search", "Base_Generator"}
    assert set(summary["seconds"]) >= {"collect", "train", "publish", "load", "eval", "checkpoint", "step", "warm_up"}
    assert summary["warm"]["eval_reward"] == read(full / "metrics.jsonl")[0]["eval_reward"]


def test_old_checkpoints_and_versions_are_cleaned_up(full: Path) -> None:
    assert sorted(path.name for path in (full / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    assert sorted(path.name for path in (full / "weights").iterdir()) == ["HEAD", "v00000005", "v00000006"]
    assert (full / "weights" / "HEAD").read_text() == "6\n"


def test_fine_tuning_leaves_a_model_and_its_log(warm: Path) -> None:
    assert {path.name for path in warm.iterdir()} >= {"config.toml", "manifest.json", "metrics.jsonl", "model"}
    steps = read(warm / "metrics.jsonl")
    assert [record["step"] for record in steps] == list(range(10, 121, 10))
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    facts = json.loads((warm / "model" / "rft.json").read_text())
    assert (facts["num_rollouts"], facts["num_steps"]) == (300, 120) and facts["seconds"] > 0


def test_a_checkpoint_is_a_model_for_anyone(full: Path, warm: Path) -> None:
    """Loaded in an interpreter that knows nothing of flowtrain; it samples, and its tokenizer is the one that trained."""
    code = """if True:
        import json, sys
        from transformers import AutoModelForCausalLM, AutoTokenizer
        for path in sys.argv[1:]:
            model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
            ids = tokenizer("Question: What is 3 plus 4?\\nSub-Goal:", return_tensors="pt").input_ids
            assert int(ids.max()) < model.config.vocab_size, (ids, model.config.vocab_size)
            out = model.generate(ids, max_new_tokens=3, do_sample=False)
            print(json.dumps([ids[0].tolist(), tokenizer.eos_token_id, out.shape[1] > ids.shape[1]]))
        assert not any(name.startswith("flowtrain") for name in sys.modules)
    """
    paths = [str(full / "checkpoints" / "step_00000006"), str(warm / "model")]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], env={**os.environ, **ENV}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    ours = load_tokenizer(paths[0])
    ids = ours.encode("Question: What is 3 plus 4?\nSub-Goal:", add_special_tokens=False)
    assert told == [[ids, ours.eos_token_id, True]] * 2


# ---- going on after a crash

KILL = """
import importlib, os, signal

def arm(module, path, number, after):
    owner, name = importlib.import_module(module), path.rpartition(".")[2]
    for part in path.split(".")[:-1]:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), []
    def fatal(*args, **kwargs):
        calls.append(0)
        if len(calls) == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, fatal)

arm({module!r}, {path!r}, {number}, {after})
"""


def check_same_run(run: Path, full: Path) -> None:
    """Apart from the time it took, a run that was resumed is the run that was not: same steps, questions, tokens, rewards and weights."""
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        ours, theirs = rows(run, name), rows(full, name)
        assert [record["step"] for record in ours] == [record["step"] for record in theirs], name
        assert all(map(alike, ours, theirs)), name
    summaries = [timeless(json.loads((each / "summary.json").read_text())) for each in (run, full)]
    assert alike(*summaries)
    weights = [load_file(each / "checkpoints" / f"step_{NUM_STEPS:08d}" / "model.safetensors") for each in (run, full)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[1])
    assert sorted(path.name for path in (run / "weights").iterdir()) == sorted(path.name for path in (full / "weights").iterdir())


@pytest.mark.parametrize(
    ("module", "path", "number", "after"),
    [
        pytest.param("flowtrain.session", "evaluate", 1, False, id="while the warm planner is evaluated"),
        pytest.param("flowtrain.session", "Session.log", 3, True, id="after step 3"),
        pytest.param("flowtrain.session", "Session._write", 4, False, id="between the two logs of step 3"),
        pytest.param("flowtrain.training.checkpoint", "save_file", 2, True, id="inside the checkpoint of step 4"),
        pytest.param("flowtrain.training.checkpoint", "save", 2, True, id="after the checkpoint of step 4"),
        pytest.param("flowtrain.weights.store", "WeightStore._set_head", 6, False, id="before version 5 is the newest"),
        pytest.param("flowtrain.session", "plot_curves", 1, False, id="in the report at the end"),
    ],
)
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    module: str, path: str, number: int, after: bool, place: Path, server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before = KILL.format(module=module, path=path, number=number, after=after)
    code, _, _ = server.run("train", *words, "--run.dir", run, before=before)
    assert code == -signal.SIGKILL
    server.resume(run, *words)
    check_same_run(run, full)


def test_a_run_that_is_killed_at_any_moment_and_more_than_once_goes_on(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (1, 3, 5):
        process = server.start("train", *words, "--run.dir", run, "--resume", "auto")
        process.wait_for(lambda step=step: f'{{"step": {step},' in _text(run / "metrics.jsonl"))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    server.resume(run, *words)
    check_same_run(run, full)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_resuming_a_finished_run_changes_nothing(server: Server, words: tuple[str, ...], full: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    server.resume(run, *words)
    check_same_run(run, full)


def test_a_finished_run_goes_on_to_more_steps(server: Server, words: tuple[str, ...], full: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    server.resume(run, *words, "--train.num_steps", NUM_STEPS + 2)
    assert rows(run, "metrics.jsonl")[: NUM_STEPS + 1] == rows(full, "metrics.jsonl")
    assert [record["step"] for record in read(run / "metrics.jsonl")] == list(range(NUM_STEPS + 3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_step_saves_and_can_be_resumed(
    number: signal.Signals, server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = server.start("train", *words, "--run.dir", run, "--checkpoint.every", "0")
    process.wait_for(lambda: '{"step": 2,' in _text(run / "metrics.jsonl"))
    os.kill(process.pid, number)
    assert process.wait() == 130
    assert "finishing this step, then saving" in process.err.read_text() and "Traceback" not in process.err.read_text()
    last = read(run / "metrics.jsonl")[-1]["step"]
    assert 2 <= last < NUM_STEPS and not (run / "summary.json").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{last:08d}"]
    server.resume(run, *words)
    check_same_run(run, full)


def test_a_second_interrupt_ends_the_run_at_once(server: Server, words: tuple[str, ...], tmp_path: Path) -> None:
    before = """
import asyncio, flowtrain.agents.flow
async def stuck(self, task, seed):
    print("stuck", flush=True)
    await asyncio.sleep(60)
flowtrain.agents.flow.Flow.run = stuck
"""
    process = server.start("train", *words, "--run.dir", tmp_path / "run", before=before)
    process.wait_for(lambda: "stuck" in process.out.read_text())
    os.kill(process.pid, signal.SIGINT)
    process.wait_for(lambda: "once more to stop at once" in process.err.read_text())
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout_s=20) == 130
    assert "Traceback" not in process.err.read_text()


def test_interrupted_fine_tuning_exports_what_it_has(server: Server, tmp_path: Path) -> None:
    process = server.start("rft", *SMALL, *RFT, "--rft.num_steps", "100000", "--run.dir", tmp_path / "run")
    process.wait_for(lambda: '{"step": 10,' in _text(tmp_path / "run" / "metrics.jsonl"))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert 10 <= json.loads((tmp_path / "run" / "model" / "rft.json").read_text())["num_steps"] < 100000
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size > 10_000


# ---- what a person got wrong


def check_refused(server: Server, module: str, *argv: object, parts: tuple[str, ...] = (), cwd: Path | None = None) -> None:
    """Exit code 2 and one line that holds the given parts."""
    code, lines, out = server.run(module, *argv, cwd=cwd)
    assert len(lines) == 1, lines
    assert (code, out) == (2, "")
    assert lines[0].startswith(f"flowtrain.{module}: ")
    assert all(part in lines[0] for part in parts), lines[0]


BAD_TASKS = {
    "no object": ('{"question": "q", "answer": "a"}\n[]\n', "line 2: must be an object"),
    "no json": ('{"question": \n', "line 1: is not JSON"),
    "no answer": ('{"question": "q"}\n', "line 1: key 'answer' is missing"),
    "no task": ("\n", "holds no tasks"),
    "one task": ('{"question": "q", "answer": "a"}\n', "need at least one each"),
    "half a character": ('{"question": "\\ud800", "answer": "a"}\n{"question": "q", "answer": "a"}\n', "line 1"),
    "unknown scorer": (
        '{"question": "q", "answer": "a", "scorer": "bleu"}\n' * 1 + '{"question": "r", "answer": "a"}\n',
        "'bleu' is unknown",
    ),
    "scorer without numbers": (
        '{"question": "q", "answer": "a"}\n{"question": "r", "answer": "a", "scorer": "gameof24"}\n',
        "numbers of the puzzle",
    ),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_bad_task_file_is_refused(case: str, server: Server, tmp_path: Path) -> None:
    text, part = BAD_TASKS[case]
    (tmp_path / "bad.jsonl").write_text(text)
    check_refused(server, "train", *SMALL, "--tasks.name", "file", "--tasks.path", "bad.jsonl", parts=("bad", part), cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"], "nothing half-written"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("--config", "no.toml"), ("no.toml", "No such file")),
        (("--config", "broken.toml"), ("broken.toml", "not TOML")),
        (("--train.learning_rate", "1"), ("unknown key train.learning_rate", "[train] knows")),
        (("--tasks.num_train", "0"), ("tasks.num_train=0",)),
        (("--tasks.num_train", "100000000"), ("num_tasks", "lower")),
        (("--tasks.name", "file", "--tasks.path", "no.jsonl"), ("no.jsonl", "No such file")),
        (("--tasks.corpus", "no.json"), ("no.json", "No such file")),
        (("--tasks.corpus", "broken.toml"), ("broken.toml", "is not JSON")),
        (("--model.path", "no/model/folder"), ("model.path='no/model/folder'",)),
        (("--model.path", "empty"), ("model.path='empty'",)),
        (("--model.path", "cut"), ("model.path='cut'",)),
        (("--agent.prompt", "full"), ("chat template", "agent.prompt='compact'")),
        (("--agent.tools", '["Serch"]'), ("Serch", "Search")),
        (("--tiny.vocab_size", "100"), ("tiny.vocab_size=100", "258")),
        (("--rollout.max_new_tokens", "256"), ("rollout.max_new_tokens=256", "256 positions")),
        (("--run.dir", "used"), ("used", "--resume auto")),
        (("--run.dir", "broken.toml"), ("broken.toml is a file",)),
        (("--run.dir", "broken.toml/run"), ("cannot write broken.toml/run",)),
        (("--run.device", "cuda"), ("run.device='cuda'",)),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    argv: tuple[str, ...], parts: tuple[str, ...], server: Server, warm: Path, tmp_path: Path
) -> None:
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    (tmp_path / "broken.toml").write_text("[run\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    shutil.copytree(warm / "model", tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("rb+") as file:
        file.truncate(5000)
    there = sorted(tmp_path.rglob("*"))
    check_refused(server, "train", *SMALL, *argv, parts=parts, cwd=tmp_path)
    assert sorted(tmp_path.rglob("*")) == there


def test_a_scripted_expert_needs_plans(server: Server, place: Path, tmp_path: Path) -> None:
    argv = ("--tasks.name", "file", "--tasks.path", place / "tasks.jsonl")
    check_refused(server, "rft", *SMALL, *RFT, *argv, parts=("rft.expert='scripted'", "'policy'"), cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_not_resumed(server: Server, words: tuple[str, ...], full: Path, tmp_path: Path) -> None:
    shutil.copytree(full, tmp_path / "run")
    argv = ("--model.path", "tiny", "--tiny.hidden_size", "48", "--run.dir", "run", "--resume", "auto")
    check_refused(server, "train", *words, *argv, parts=("step_00000006", "another model"), cwd=tmp_path)


def test_resuming_what_never_began_starts_it_and_what_is_no_run_is_refused(server: Server, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    check_refused(server, "train", *words, "--run.dir", "used", "--resume", "auto", parts=("used",), cwd=tmp_path)


# ---- a full disk


@pytest.mark.parametrize("what", ["weights", "checkpoints", "trajectories.jsonl"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    what: str, server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the disk: a version has some 115 kB, the optimizer in a checkpoint twice that."""
    run, num_log_bytes = tmp_path / "run", (full / "trajectories.jsonl").stat().st_size
    limit = {"weights": 40_000, "checkpoints": 170_000, "trajectories.jsonl": num_log_bytes - 10_000}[what]
    every = ("--checkpoint.every", "0") if what == "trajectories.jsonl" else ()
    code, lines, _ = server.run("train", *words, *every, "--run.dir", run, max_file_bytes=limit)
    assert len(lines) == 1 and code == 2, lines
    assert lines[0].startswith(f"flowtrain.train: cannot write {run / what}: File too large; ")
    assert not list(run.rglob("*.writing"))
    server.resume(run, *words)
    check_same_run(run, full)


# ---- several ranks


def torchrun(num_ranks: int, *argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "-m", "flowtrain.train"]
    return subprocess.run(
        [*command, *map(str, argv)], cwd=cwd, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.dist
def test_eight_ranks_train_two_steps(words: tuple[str, ...], tmp_path: Path) -> None:
    done = torchrun(
        8, *words, "--run.dir", "run", "--rollout.num_questions", "8", "--rft.batch_size", "8", "--train.num_steps", "2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    assert [record["step"] for record in read(run / "metrics.jsonl")] == [0, 1, 2]
    logs = [run / ("trajectories.jsonl" if rank == 0 else f"trajectories.rank{rank}.jsonl") for rank in range(8)]
    for rank, log in enumerate(logs):
        assert [(record["step"], record["group_index"]) for record in read(log)] == [(step, rank) for step in (1, 2) for _ in range(8)]
    assert "summary.json" in {path.name for path in run.iterdir()}
    assert done.stdout.count("held-out reward") == 1, "one rank speaks"


@pytest.mark.dist
def test_questions_that_do_not_divide_among_ranks_are_refused_once(words: tuple[str, ...], tmp_path: Path) -> None:
    done = torchrun(2, *words, "--run.dir", "run", "--rollout.num_questions", "3", cwd=tmp_path)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("flowtrain.train: ")]
    assert ours == ["flowtrain.train: rollout.num_questions=3 must be a multiple of the 2 ranks that torchrun started"]
    assert not (tmp_path / "run").exists()
