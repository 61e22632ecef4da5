"""AgentFlow: planner, executor, verifier and generator around an explicit memory."""
