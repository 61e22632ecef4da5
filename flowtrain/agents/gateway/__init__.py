"""The gateway: an OpenAI-compatible endpoint in front of the policy's engine, for training any
program.
"""
