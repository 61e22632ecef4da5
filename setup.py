"""Packaging lives in pyproject.toml; this file will build the C++ extension and is what older tools call."""

from setuptools import setup

setup()
