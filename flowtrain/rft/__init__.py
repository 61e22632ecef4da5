"""Rejection-sampling fine-tuning: demonstrations, the good ones among them, and their imitation."""
