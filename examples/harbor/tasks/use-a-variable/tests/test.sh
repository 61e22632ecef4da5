#!/bin/bash
[ "$(cat ship.txt)" = 'Vasa 1628' ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
