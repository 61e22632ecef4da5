#!/bin/sh
# mini-swe-agent as a program behind the gateway, one task and then its end:
#   pip install mini-swe-agent
#   python -m flowtrain.train ... --agent.name gateway --gateway.command '["examples/gateway/mini_swe_agent.sh"]'
# It works in the folder of the rollout, without asking, so give it a container of its own. What it
# submits goes between <answer> and </answer>. Further words of the command are options of mini.
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors
export MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1  # beyond the limits the endpoint stays with its no
export LITELLM_LOCAL_MODEL_COST_MAP=True  # or it asks the network for prices
export OPENAI_API_BASE="$OPENAI_BASE_URL"
question=$(python3 -c 'import json, os; print(json.load(open(os.environ["FLOWTRAIN_TASK"]))["question"])')
exec mini --yolo --exit-immediately --cost-limit 0 -m openai/policy -t "$question" -o trajectory.json "$@"
