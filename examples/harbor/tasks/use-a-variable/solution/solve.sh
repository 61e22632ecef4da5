#!/bin/bash
echo "$SHIP" > ship.txt
