#!/bin/bash
[ "$(paste -sd' ' words.txt)" = 'ant bee cow' ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
