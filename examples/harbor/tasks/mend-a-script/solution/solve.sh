#!/bin/bash
sed -i 's/ecco/echo/' hello.sh
