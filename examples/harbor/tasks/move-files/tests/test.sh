#!/bin/bash
[ -e out/a.txt ] && [ -e out/b.txt ] && [ ! -e in/a.txt ] && [ -e in/c.md ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
