#!/bin/bash
tar -xOf pack.tar note.txt > answer.txt
