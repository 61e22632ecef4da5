"""Train a program that speaks to OpenAI's API: an endpoint before the policy's engine."""
