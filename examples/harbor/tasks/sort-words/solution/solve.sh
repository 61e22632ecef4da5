#!/bin/bash
sort -u -o words.txt words.txt
