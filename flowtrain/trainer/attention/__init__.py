"""Attention over token trees."""
