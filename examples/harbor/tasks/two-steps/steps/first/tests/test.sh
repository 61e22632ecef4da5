#!/bin/bash
[ "$(tail -n 1 words.txt)" = first ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
