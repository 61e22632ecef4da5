#!/bin/bash
mkdir -p out && mv in/*.txt out/
