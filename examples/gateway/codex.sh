#!/bin/sh
# Codex as a program behind the gateway, one task and then its end:
#   npm install -g @openai/codex
#   python -m flowtrain.train ... --agent.name gateway --gateway.command '["examples/gateway/codex.sh"]'
# It works in the folder of the rollout, without asking, so give it a container of its own. Its tools
# that are no functions (a search of its vendor, other agents) are switched off.
question=$(python3 -c 'import json, os; print(json.load(open(os.environ["FLOWTRAIN_TASK"]))["question"])')
exec codex exec "$question" --model policy --skip-git-repo-check \
    --dangerously-bypass-approvals-and-sandbox \
    -c 'web_search="disabled"' -c features.multi_agent=false \
    -c model_provider=gateway -c model_providers.gateway.name=gateway \
    -c "model_providers.gateway.base_url=\"$OPENAI_BASE_URL\"" \
    -c model_providers.gateway.env_key=OPENAI_API_KEY \
    -c model_providers.gateway.wire_api=responses
