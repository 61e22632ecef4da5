#!/bin/bash
echo first >> words.txt
