#!/bin/bash
echo second >> words.txt
