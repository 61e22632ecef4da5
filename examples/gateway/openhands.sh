#!/bin/sh
# OpenHands as a program behind the gateway, one task and then its end:
#   pip install openhands  # in an environment of its own, with Python 3.12
#   python -m flowtrain.train ... --agent.name gateway --gateway.command '["examples/gateway/openhands.sh"]'
# It works in the folder of the rollout, without asking, so give it a container of its own. What it
# says when it finishes goes between <answer> and </answer>.
export LLM_MODEL=openai/policy LLM_BASE_URL="$OPENAI_BASE_URL" LLM_API_KEY="$OPENAI_API_KEY"
export LITELLM_LOCAL_MODEL_COST_MAP=True  # or it asks the network for prices
export OPENHANDS_SUPPRESS_BANNER=1
question=$(python3 -c 'import json, os; print(json.load(open(os.environ["FLOWTRAIN_TASK"]))["question"])')
exec openhands --headless --json --override-with-envs --task "$question"
