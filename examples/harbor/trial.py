"""A program behind the gateway that runs each rollout as a trial of Harbor, and its tasks as rows:

python examples/harbor/trial.py my_tasks/* > runs/harbor.jsonl

Harbor is a program of its own (`uv tool install harbor`), which needs Docker. Its agent terminus-2
runs beside it, outside of the container, and so reaches the endpoint. Further words of the command
are options of `harbor run`, say ["python", "examples/harbor/trial.py", "--env", "podman"].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

AGENT = ("--agent", "terminus-2", "--model", "openai/policy")


def row(folder: Path) -> dict[str, str]:
    """Return a folder of Harbor's as a row of `tasks.path`."""
    question = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    return {"id": folder.name, "question": question, "path": str(folder.resolve())}


def play(task: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """Run one trial in this folder and return its outcome; exits where it has no reward that says
    something of the policy.
    """
    endpoint = ("--ak", f"api_base={os.environ['OPENAI_BASE_URL']}")
    # Or LiteLLM asks the network for prices.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    subprocess.run(
        ["harbor", "run", "--path", task["path"], "-o", "jobs", "-qy", *AGENT, *endpoint, *options],
        env=environment,
        check=True,
    )
    (path,) = Path("jobs").glob("*/*/result.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    if not result["reward_valid"]:
        sys.exit(f"no reward: {(result['exception_info'] or {}).get('exception_message')}")
    # Beside "reward" may stand figures that explain it.
    return {"answer": "", "reward": float(result["verifier_result"]["rewards"]["reward"])}


def main(words: list[str]) -> None:
    if told := os.environ.get("FLOWTRAIN_OUTCOME"):
        task = json.loads(Path(os.environ["FLOWTRAIN_TASK"]).read_text(encoding="utf-8"))
        Path(told).write_text(json.dumps(play(task, words)), encoding="utf-8")
    else:
        print("\n".join(json.dumps(row(Path(folder))) for folder in words))


if __name__ == "__main__":
    main(sys.argv[1:])
