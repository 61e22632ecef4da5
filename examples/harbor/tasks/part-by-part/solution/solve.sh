#!/bin/bash
touch one two three
