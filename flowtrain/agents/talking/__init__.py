"""Agents that talk by way of a chat template: alone, with tools, or with an environment."""
