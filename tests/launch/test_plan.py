"""Plans are read strictly, and printed without their secrets."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import CONFIG, PLAN, fake_python, write_plan

from flowtrain.launch.__main__ import main
from flowtrain.launch.plan import Host, read_plan
from flowtrain.launch.printed import kubernetes, shell, slurm
from flowtrain.launch.processes import over
from flowtrain.launch.roles import Commands, Kind, Role, controlled_script, plain_script
from flowtrain.types import UserError

SECRET = "never-shown-1234"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('database = "flow.sqlite"', 'database = "f"\nport_ = 1', "service.port_=1: Extra inputs"),
        ("[nodes.cpu]\n", "[nodes.cpu]\ncuont = 3\n", "nodes.cpu.cuont=3: Extra inputs"),
        ("count = 2", "count = 0", "nodes.eu.count=0: Input should be greater"),
        ("count = 2", "count = 2\ngpus = [0]", "nodes.eu.count=2: `gpus` has 1 entries"),
        ('[nodes.eu]\nhost = "far"', '[nodes.eu]\nhost = "moon"', "nodes.eu.host='moon': [hosts]"),
        ("[trainers.planner]", "[trainers.judge]", "trainers.judge: a policy is one of planner"),
        ('"A_TOKEN"', '"$A_TOKEN"', "token_env='$A_TOKEN' must be the name"),
        ("flow.sqlite", "postgresql://a:b@db/flow", "the password belongs into PGPASSWORD"),
        ("me@127.0.0.1", "-oProxyCommand=x", "hosts.far.ssh='-oProxyCommand=x': must be"),
        ("me@127.0.0.1", "me@gpu-1", "hosts.here.address='127.0.0.1': far cannot reach it there"),
        ("env = {{ OMP", 'secrets = ["FLOWTRAIN_TOKEN"]\nenv = {{ OMP', "gets FLOWTRAIN_TOKEN by"),
        ("env = {{ OMP", 'env = {{ "a b" = 1, OMP', "'a b' is no name of a variable"),
        (
            "weights_port = {ports[1]}",
            "weights_port = 8400",
            "service.port has this port of 'here'",
        ),
        ('folder = "{folder}"', 'folder = "~/x"', "hosts.far.folder='~/x': must be a folder"),
        ("[nodes.eu]", "[nodes.EU]", "nodes.EU: a name has at most"),
        ("[service]", "[service", "not TOML"),
    ],
)
def test_a_mistake_names_key_and_value(
    old: str, new: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in PLAN
    path = write_plan(tmp_path, plan=PLAN.replace(old, new, 1))
    assert main([str(path), "--print", "shell"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and problem in said


def test_a_missing_plan_and_a_missing_token_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(tmp_path / "none.toml")]) == 2
    assert "No such file" in capsys.readouterr().err
    monkeypatch.delenv("A_TOKEN", raising=False)
    assert main([str(write_plan(tmp_path))]) == 2
    assert "A_TOKEN is not in the environment" in capsys.readouterr().err
    monkeypatch.setenv("A_TOKEN", "with space")
    assert main([str(write_plan(tmp_path))]) == 2
    assert "with space" not in capsys.readouterr().err


def test_a_plan_becomes_these_command_lines(tmp_path: Path) -> None:
    text = PLAN.replace("count = 2", 'gpus = [0, "1,2"]').replace(
        "weights_port = {ports[1]}", 'weights_port = 8321\nnproc = 2\ngpus = "3,4"'
    )
    roles = Commands(read_plan(write_plan(tmp_path, plan=text))).roles()
    assert [role.name for role in roles] == [
        *("service", "weights-planner", "trainer-planner", "cpu-0", "eu-0", "eu-1")
    ]
    assert [role.kind for role in roles[:3]] == [Kind.SERVICE, Kind.WEIGHTS, Kind.TRAINER]
    assert shlex.join(roles[0].words) == (
        "-m flowtrain.dataflow serve --database flow.sqlite --host 127.0.0.1 --port 8400 "
        "--config run.toml --train.num_steps 2"
    )
    assert shlex.join(roles[2].words) == (
        "-m flowtrain.torchrun --standalone --nproc_per_node 2 -m flowtrain.train "
        "--config run.toml --train.num_steps 2 --run.dir runs/planner --run.resume auto "
        "--train.policy planner --dataflow.url http://127.0.0.1:8400 "
        "--dataflow.store http://127.0.0.1:8321"
    )
    assert shlex.join(roles[5].words) == (
        "-m flowtrain.node --dataflow http://127.0.0.1:8400 --name eu-1 --run.threads 1"
    )
    assert [dict(role.env) for role in roles[2:]] == [
        {"CUDA_VISIBLE_DEVICES": "3,4"},
        {},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1,2"},
    ]


# ---- printed


def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_TOKEN", SECRET)
    text = PLAN.replace("[kubernetes]", '[slurm]\noptions = ["--time=1:00:00"]\n[kubernetes]')
    plan = read_plan(write_plan(tmp_path, plan=text.replace("count = 2", "gpus = [0, 1]")))
    return {"shell": shell(plan), "slurm": slurm(plan), "kubernetes": kubernetes(plan)}


def test_no_secret_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in scripts(tmp_path, monkeypatch).values():
        assert SECRET not in text and "FLOWTRAIN_TOKEN" in text


def test_scripts_are_bash_that_names_its_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = scripts(tmp_path, monkeypatch)
    for name in ("shell", "slurm"):
        done = subprocess.run(["bash", "-n"], input=printed[name], text=True, check=False)
        assert done.returncode == 0
        assert ': "${A_TOKEN:?export it first}"' in printed[name]
    for option in ("--nodes=2", "--gpus-per-node=2", "--time=1:00:00"):
        assert f"#SBATCH {option}\n" in printed["slurm"]
    assert "--host $at_0 --port 8400" in printed["slurm"]
    assert "--dataflow http://$at_0:8400 --name eu-1" in printed["slurm"]
    assert "export CUDA_VISIBLE_DEVICES=1 " in printed["slurm"]
    assert "ADDRESS-OF" not in printed["slurm"] and "127.0.0.1" not in printed["slurm"]


FAKE_SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'


@pytest.mark.parametrize("name", ["shell", "slurm"])
def test_a_script_runs_all_and_ends_with_the_code_of_the_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {
        "srun": FAKE_SRUN,
        "scontrol": "#!/bin/sh\necho m1\necho m2\n",
    }
    for program, text in texts.items():
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_TOKEN", SECRET)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "m[1-2]")
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    python = fake_python(tmp_path)
    plan = read_plan(write_plan(tmp_path, plan=PLAN.replace("{python}", python)))
    script = {"shell": shell, "slurm": slurm}[name](plan)
    threading.Timer(0.5, (tmp_path / "done").touch).start()
    done = subprocess.run(
        ["bash", "-c", script, "script", "here"], timeout=60, capture_output=True, check=False
    )
    assert done.returncode == 7, done.stderr
    lines = (tmp_path / "calls").read_text().splitlines()
    num_nodes = 3 if name == "slurm" else 1
    started = [line for line in lines if line.startswith(f"started {SECRET} ")]
    assert len(started) == 3 + num_nodes
    ended = [line.split()[1] for line in lines if line.startswith("ended")]
    assert ended[:num_nodes] == ["flowtrain.node"] * num_nodes
    assert sorted(ended[num_nodes:]) == ["flowtrain.dataflow", "flowtrain.weights"]
    assert (name == "slurm") == any("http://m1:8400" in line for line in lines)


def test_kubernetes_manifests_hold_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = list(yaml.safe_load_all(scripts(tmp_path, monkeypatch)["kubernetes"]))
    found = {(item["kind"], item["metadata"]["name"]): item for item in items}
    assert list(found) == [
        ("ConfigMap", "flowtrain-config"),
        ("Deployment", "flowtrain-service"),
        ("Service", "flowtrain-service"),
        ("Job", "flowtrain-trainer-planner"),
        ("Service", "flowtrain-weights-planner"),
        ("Job", "flowtrain-nodes-cpu"),
        ("Job", "flowtrain-nodes-eu"),
    ]
    config = tomllib.loads(found["ConfigMap", "flowtrain-config"]["data"]["run.toml"])
    assert config["rollout"]["group_size"] == tomllib.loads(CONFIG)["rollout"]["group_size"]
    trainer = found["Job", "flowtrain-trainer-planner"]["spec"]["template"]
    assert trainer["metadata"]["labels"]["app"] == "flowtrain-trainer-planner"
    assert trainer["spec"]["initContainers"][0]["restartPolicy"] == "Always"
    [container] = trainer["spec"]["containers"]
    assert container["args"][container["args"].index("--dataflow.store") + 1] == (
        "http://flowtrain-weights-planner:8321"
    )
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "flowtrain", "key": "token"}
    job = found["Job", "flowtrain-nodes-eu"]["spec"]
    assert job["completions"] == job["parallelism"] == 2
    [node] = job["template"]["spec"]["containers"]
    assert node["resources"] == {"limits": {"nvidia.com/gpu": 1}} and "--name" not in node["args"]
    for name in ("service", "weights-planner"):
        spec = found["Service", f"flowtrain-{name}"]["spec"]
        assert [
            item
            for item in items
            if item.get("spec", {}).get("template", {}).get("metadata", {}).get("labels")
            == spec["selector"]
        ], "there is a pod behind the name"


@pytest.mark.parametrize("value", ["1e-5", "0o14", "on", "y", "no", "~", "1_000", "2026-01-01"])
def test_texts_that_yaml_may_read_as_something_else_have_quotes(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PLAN.replace("OMP_NUM_THREADS = 1", f'LOOKS = "{value}"')
    printed = kubernetes(read_plan(write_plan(tmp_path, plan=text)))
    assert {f'value: "{value}"', f"value: '{value}'"} & set(map(str.strip, printed.splitlines()))


def test_the_config_is_a_block_and_nothing_is_an_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = scripts(tmp_path, monkeypatch)["kubernetes"]
    assert "  run.toml: |\n" in text and "\n    [run]\n" in text
    assert not re.search(r"^[^\n]*: [&*]id", text, re.MULTILINE)


# ---- quoting

words = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), max_size=4
)


@settings(max_examples=50, deadline=None)
@given(words, st.text(st.sampled_from("a b'\"$\\\n;&%~"), max_size=12))
def test_words_and_environment_reach_a_process_unchanged(rest: list[str], value: str) -> None:
    """Through the shells of this machine and of ssh's other end."""
    host = Host.model_construct(
        ssh="a@b", folder="/", python="/usr/bin/printf", env={"A": value}, secrets=()
    )
    role = Role("r", Kind.NODE, "h", ("%s\\0", *rest))
    expected = "".join(f"{word}\0" for word in rest) or "\0"
    remote = over(host, plain_script(host, role))
    assert remote[-2] == "a@b" and remote[0] == "ssh" and "BatchMode=yes" in remote
    done = subprocess.run(["sh", "-c", remote[-1]], capture_output=True, check=True)
    assert done.stdout.decode() == expected
    shown = over(host, controlled_script(host, role, ()))[-1]
    with subprocess.Popen(
        ["sh", "-c", shown], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read().decode() == expected
        assert process.wait(10) == 0


def test_an_unknown_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.toml"):
        read_plan(tmp_path / "nothing.toml")
