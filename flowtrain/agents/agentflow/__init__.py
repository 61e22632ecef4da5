"""AgentFlow's four modules, their memory and the loop around them."""
