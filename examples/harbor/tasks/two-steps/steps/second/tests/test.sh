#!/bin/bash
[ "$(tail -n 1 words.txt)" = second ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
