#!/bin/bash
found=0
for name in one two three; do [ -e $name ] && found=$((found + 1)); done
awk "BEGIN { printf \"{\\\"reward\\\": %g, \\\"files\\\": %d}\", $found / 3, $found }" > /logs/verifier/reward.json
