#!/bin/bash
[ "$(cat count.txt)" = 3 ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
