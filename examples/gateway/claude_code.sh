#!/bin/sh
# Claude Code as a program behind the gateway, one task and then its end:
#   npm install -g @anthropic-ai/claude-code
#   python -m flowtrain.train ... --agent.name gateway --gateway.command '["examples/gateway/claude_code.sh"]'
# It works in the folder of the rollout, without asking, so give it a container of its own. The
# endpoint and its key are in the environment; what it sends elsewhere without need is switched off.
# Further words of the command are options of claude.
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
export CLAUDE_CODE_ATTRIBUTION_HEADER=0  # a line of the system prompt that is another one each time
export IS_SANDBOX=1  # or it does not start as root
question=$(python3 -c 'import json, os; print(json.load(open(os.environ["FLOWTRAIN_TASK"]))["question"])')
exec claude -p "$question" --model policy --dangerously-skip-permissions "$@"
