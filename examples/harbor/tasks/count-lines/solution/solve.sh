#!/bin/bash
grep -c error log.txt > count.txt
